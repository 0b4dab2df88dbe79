"""The weights of an adapter say which swap their base had: no other base takes them, not even without hf_posswap.

A low-rank update that was trained on a swapped base is wrong on any other, and PEFT puts it on whatever it fits. So
each weight in the base is written as [1, *shape], which no stock module takes, and one more tensor holds the record of
the swap. Swapped models restore the shapes when they load. Adapters of bases that stock transformers runs stay plain.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_posswap.errors import CheckpointError, PosswapError, RecordError
from hf_posswap.patching.record.record import SwapRecord

ADAPTER_WEIGHTS = "adapter_model.safetensors"
RECORD = "posswap_record"
"""The last part of the name of the tensor that holds the record: its JSON in UTF-8, as uint8 [N]."""
_BASE = "base_model.model."
"""How the names of weights in the base begin in an adapter; those of prompts do not."""


def mark_adapter(weights: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of an adapter as they are written; those that are marked stay as they are.

    Args:
        weights: by name.
        record: of the swap of its base, as `config.posswap` holds it.
    """
    if any(map(_is_record, weights)):
        return weights
    prefix = _BASE if any(name.startswith(_BASE) for name in weights) else ""
    marked = {name: value.unsqueeze(0) for name, value in weights.items() if _is_marked(name, value, prefix)}
    return {**weights, **marked, prefix + RECORD: torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)}


def unmark_adapter(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of an adapter in their own shapes, without the record."""
    record = next(filter(_is_record, weights), None)
    if record is None:
        return weights
    prefix = record.removesuffix(RECORD)
    adapter_weights = {name: value for name, value in weights.items() if name != record}
    return adapter_weights | {
        name: value.squeeze(0) for name, value in adapter_weights.items() if _is_marked(name, value, prefix)
    }


def _is_marked(name: str, value: Any, prefix: str) -> bool:
    return name.startswith(prefix) and isinstance(value, Tensor)


def _is_record(name: str) -> bool:
    return name.rpartition(".")[2] == RECORD


def record_in(weights: dict[str, Any]) -> SwapRecord | None:
    """Return the record of the swap that the weights of an adapter belong to; None: they are not marked.

    Raises:
        RecordError: what they hold is none.
    """
    serialized = next((value for name, value in weights.items() if _is_record(name)), None)
    if serialized is None:
        return None
    try:
        values = json.loads(bytes(serialized.tolist()))
        return SwapRecord.from_dict(values)
    except PosswapError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(
            f"the weights of this adapter hold a {RECORD} that is no record of a swap ({error}): take them from where "
            "they were saved."
        ) from error


def record_in_file(path: Path) -> SwapRecord | None:
    """Return the record in the safetensors file of an adapter; None: its weights are not marked.

    Raises:
        RecordError: as `record_in`.
        CheckpointError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as weights:
            names: list[str] = list(weights.keys())
            serialized = {name: weights.get_tensor(name) for name in names if _is_record(name)}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"the adapter {str(path.parent)!r} cannot be loaded: {path.name}: {error}") from error
    return record_in(serialized)


def base_of(model: Any) -> Any:
    """Return the model that PEFT's models are around; any other is its own."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model


def refuse_other_base(model: Any, wanted: SwapRecord, source: str | None = None) -> None:
    """Refuse to put an adapter on a base that has another mechanism than its own had.

    Args:
        model: a transformers model, or a PEFT model around one.
        wanted: of the swap that the adapter was trained with.
        source: folder or Hub id of the adapter, where it is known.

    Raises:
        RecordError: names both.
    """
    model = base_of(model)
    carried = getattr(getattr(model, "config", None), "posswap", None)
    has = None if carried is None else SwapRecord.from_dict(carried)
    if has is not None and wanted.is_same_mechanism(has):
        return
    named, loaded = ("this adapter", "adapter") if source is None else (f"the adapter {source!r}", repr(source))
    raise RecordError(
        f"{named} was trained on a {wanted.base_type} "
        f"swapped to {wanted.make_scheme()} for "
        f"{wanted.max_length} tokens, and this {type(model).__name__} "
        + ("is not swapped" if has is None else f"carries {has.make_scheme()} for {has.max_length} tokens")
        + f". Load it by hf_posswap.load({loaded}), or swap the base in the same way."
    )
