"""The weights of an adapter say which swap their base had: no other base takes them, not even without hf_posswap.

A low-rank update that was trained on a swapped base is wrong on any other, and PEFT puts it on whatever it fits. So
each weight in the base is written as [1, *shape], which no stock module takes, and one more tensor holds the record of
the swap. Swapped models restore the shapes when they load. Adapters of bases that stock transformers runs stay plain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_posswap.compat.peft_wrappers import name_without_adapter
from hf_posswap.errors import CheckpointError, PosswapError, RecordError
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.utils.untrusted import parse_json, read_bounded_json

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

SIDECAR = "posswap.json"
"""The file next to an adapter that holds the record, too."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
RECORD = "posswap_record"
"""The last part of the name of the tensor that holds the record: its JSON in UTF-8, as uint8 [N]."""
_BASE = "base_model.model."
"""How the names of weights in the base begin in an adapter; those of prompts do not."""
_FLOATS = ("F", "BF")
"""What the kinds of floating-point numbers begin with, as safetensors calls them."""
_LEARNED = re.compile(r"(weight|bias|prompt_embeddings)$|(^|\.)(lora|ia3|vera)_[^.]*$")
"""The names of what PEFT's methods learn, which are floating-point numbers; the most common ones."""


def mark_adapter(weights: dict[str, Tensor], record: Mapping[str, object]) -> dict[str, Tensor]:
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


def unmark_adapter(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of an adapter in their own shapes, without the record."""
    record = next(filter(_is_record, weights), None)
    if record is None:
        return weights
    prefix = record.removesuffix(RECORD)
    adapter_weights = {name: value for name, value in weights.items() if name != record}
    return adapter_weights | {
        name: value.squeeze(0) for name, value in adapter_weights.items() if _is_marked(name, value, prefix)
    }


def _is_marked(name: str, value: object, prefix: str) -> bool:
    return name.startswith(prefix) and isinstance(value, Tensor)


def _is_record(name: str) -> bool:
    return name.rpartition(".")[2] == RECORD


def record_in(weights: Mapping[str, Tensor]) -> SwapRecord | None:
    """Return the record of the swap that the weights of an adapter belong to; None: they are not marked.

    Raises:
        RecordError: what they hold is none.
    """
    serialized = next((value for name, value in weights.items() if _is_record(name)), None)
    if serialized is None:
        return None
    try:
        return SwapRecord.from_dict(parse_json(bytes(serialized.tolist()).decode()))
    except PosswapError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(
            f"the weights of this adapter hold a {RECORD} that is not a record of a swap ({error}): take them from "
            "where they were saved."
        ) from error


def record_in_file(path: Path) -> SwapRecord | None:
    """Return the record in the safetensors file of an adapter; None: its weights are not marked.

    Raises:
        RecordError: as `record_in`.
        CheckpointError: the file cannot be read.
    """
    return _read_file(path)[0]


def kinds_in_file(path: Path) -> dict[str, str]:
    """Return names and kinds of numbers (F32, I8, ...) of the weights in the safetensors file of an adapter.

    Raises:
        CheckpointError, RecordError: as `record_in_file`.
    """
    return _read_file(path)[1]


def _read_file(path: Path) -> tuple[SwapRecord | None, dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as weights:
            names: list[str] = list(weights.keys())
            serialized = {name: weights.get_tensor(name) for name in names if _is_record(name)}
            dtypes = {name: str(weights.get_slice(name).get_dtype()) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"the adapter {str(path.parent)!r} cannot be loaded: {path.name}: {error}") from error
    return record_in(serialized), dtypes


def kinds_in(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return names and kinds of numbers of an adapter's weights in memory, as `kinds_in_file`."""
    dtypes = {name: value.dtype for name, value in weights.items() if isinstance(value, Tensor)}
    return {
        name: "F" if dtype.is_floating_point else str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()
    }


def refuse_integers(model: nn.Module, dtypes: Mapping[str, str], source: str | None = None) -> None:
    """Refuse integers, truth values and complex numbers where `model` has, or will have, floating-point weights.

    PyTorch converts them silently. Integers that a method of PEFT, or a module trained in full, has as such stay.

    Args:
        model: a transformers model, or a PEFT model around one, the adapter in it or not.
        dtypes: of the adapter's weights.
        source: folder or Hub id of the adapter, where it is known.

    Raises:
        CheckpointError: names them.
    """
    integers = {name: dtype for name, dtype in dtypes.items() if not dtype.startswith(_FLOATS) and not _is_record(name)}
    if not integers:
        return
    adapters = set(getattr(model, "peft_config", None) or ())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    is_float = {_plain(name, adapters): tensor.is_floating_point() for name, tensor in tensors}
    wrong = [name for name in sorted(integers) if is_float.get(_plain(name, adapters), bool(_LEARNED.search(name)))]
    if wrong:
        listed = ", ".join(f"{name} ({integers[name]})" for name in wrong[:4])
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(
            f"the weights of {'this adapter' if source is None else f'the adapter {source!r}'} hold integers, truth "
            f"values or complex numbers where {type(base_of(model)).__name__} has floating-point numbers: {listed}"
            f"{more}. Take them from where they were saved; have the program that quantized them convert them back."
        )


def _plain(name: str, adapters: set[str]) -> str:
    """Return how a file of an adapter calls the parameter `name` of a PEFT model, less what all begin with."""
    return ".".join(word for word in name_without_adapter(name).split(".") if word not in adapters)


def refuse_misfit(model: nn.Module, source: Path) -> None:
    """Refuse an adapter in a folder that was trained on another mechanism, or does not hold a swapped model's numbers.

    Its sidecar says so, or its weights. That of the Hub is refused later, by its weights: nobody who loads an adapter
    is to ask the Hub for one file more.

    Args:
        model: that it is to be put on: a transformers model, or a PEFT model around one.
        source: folder or Hub id, its subfolder appended.

    Raises:
        RecordError: it was trained on another mechanism; or a record cannot be read.
        CheckpointError: a file cannot be read, or holds integers for weights.
    """
    sidecar, weights = source / SIDECAR, source / ADAPTER_WEIGHTS
    record, dtypes = _read_file(weights) if weights.is_file() else (None, {})
    if sidecar.is_file():
        record = _record_in_sidecar(sidecar)
    if record is not None:
        refuse_other_base(model, record, str(source))
    if carries_swap(model):
        refuse_integers(model, dtypes, str(source))


def refuse_misfit_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Refuse the weights of an adapter in memory, as `refuse_misfit` does those in a folder.

    Raises:
        RecordError, CheckpointError: as `refuse_misfit`.
    """
    record = record_in(weights)
    if record is not None:
        refuse_other_base(model, record)
    if carries_swap(model):
        refuse_integers(model, kinds_in(weights))


def _record_in_sidecar(path: Path) -> SwapRecord:
    try:
        values = read_bounded_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path.name} of {str(path.parent)!r}: {error}") from error
    record = values.get("record") if isinstance(values, dict) else None
    if not isinstance(record, dict):
        raise RecordError(
            f"{path.name} of {str(path.parent)!r} must hold an object with a record: take it from where the adapter "
            "was saved."
        )
    return SwapRecord.from_dict(record)


def carries_swap(model: nn.Module) -> bool:
    """Return whether the config of `model`, or of the base inside a PEFT model, records a swap."""
    return getattr(getattr(base_of(model), "config", None), "posswap", None) is not None


def base_of(model: Any) -> PreTrainedModel:
    """Return the model that PEFT's models are around; any other is its own."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model


def refuse_other_base(model: nn.Module, wanted: SwapRecord, source: str | None = None) -> None:
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
    weight, instead = wanted.scheme.get("weight"), "or swap the base in the same way."
    if has is not None and has.scheme | {"weight": weight} == wanted.scheme:
        instead = f"or move the blend there, as before a training is resumed: hf_posswap.set_blend(model, {weight})."
    raise RecordError(
        f"{named} was trained on a {wanted.base_type} "
        f"swapped to {wanted.make_scheme()} for "
        f"{wanted.max_length} tokens, and this {type(model).__name__} "
        + ("is not swapped" if has is None else f"carries {has.make_scheme()} for {has.max_length} tokens")
        + f". Load it by hf_posswap.load({loaded}), {instead}"
    )
