"""What `PosswapCallback` finds out about a model in somebody else's Trainer."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from pathlib import Path
from typing import Any

from hf_posswap.checkpoints.adapters import ADAPTER_CONFIG
from hf_posswap.compat.peft_wrappers import weights_without_adapters
from hf_posswap.compat.torch_wrappers import kind_of_wrapper
from hf_posswap.errors import CheckpointError, SwapVerificationError
from hf_posswap.patching.apply.patch_model import unpatch_model
from hf_posswap.patching.plan.inputs import with_native
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.adapter_marks import SIDECAR
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.record.remote_code import package_version
from hf_posswap.patching.verify.behaviour import copy_sharing_weights
from hf_posswap.schemes import Scheme
from hf_posswap.utils.atomic_io import read_json
from hf_posswap.utils.weights_digest import state_digest

ABOVE_GUESSING = 1.5
"""Nats above a uniform guess that a first loss may have: what recipes allow a swap that needs training."""
_PACKAGES = ("transformers", "torch", "peft", "accelerate", "trl", "sentence-transformers", "axolotl", "deepspeed")


def model_inside(model: Any) -> Any:
    """Return the transformers model inside `model`, which may be in DDP, torch.compile, DeepSpeed or PEFT.

    Raises:
        UnsupportedSwapError: there is none.
    """
    from accelerate.utils import extract_model_from_parallel

    return unwrap(extract_model_from_parallel(model, keep_torch_compile=False))


def is_sharded(model: Any) -> bool:
    """Return whether this process holds parts of the weights of `model` (FSDP, ZeRO-3, tensor parallel, meta)."""
    if any(kind_of_wrapper(module) == "FSDP's wrapper" for module in model.modules()):
        return True
    return any(
        hasattr(parameter, "placements") or hasattr(parameter, "ds_id") or parameter.is_meta
        for parameter in model.parameters()
    )


def check_scheme(model: Any, expected: Scheme) -> None:
    """Check that the scheme in force in a swapped `model` is `expected`, in every field that `expected` sets.

    Raises:
        SwapVerificationError: it is another one; names the fields.
        SchemeError: `expected` is only a part of a scheme.
    """
    plan: SwapPlan = model._posswap.plan
    for stack, scheme in plan.schemes.items():
        wanted = with_native(model, plan.sites.stack(stack), expected)
        differing = {} if type(scheme) is not type(wanted) else _differing(scheme, wanted)
        if differing and not any(map(_holds_schemes, differing.values())):
            problem = ", ".join(f"its {name} is {value!r}" for name, value in differing.items())
        elif differing or type(scheme) is not type(wanted):
            problem = f"it carries {scheme}"
        else:
            continue
        where = f" in its {stack}" if stack else ""
        raise SwapVerificationError(
            f"PosswapCallback was to prove {expected}, and {plan.model} has another mechanism{where}: {problem}. "
            "Patch the model with that scheme before the trainer is made, or give the callback the scheme in force."
        )


def _differing(scheme: Scheme, expected: Scheme) -> dict[str, Any]:
    """Return the fields of `scheme`, of the class of `expected`, that are other than `expected` sets them."""
    return {
        field.name: getattr(scheme, field.name)
        for field in dataclasses.fields(expected)
        if not _is_as_set(getattr(scheme, field.name), getattr(expected, field.name), field.default)
    }


def _is_as_set(value: Any, expected: Any, default: Any = dataclasses.MISSING) -> bool:
    if isinstance(expected, Scheme):
        return type(value) is type(expected) and not _differing(value, expected)
    if isinstance(expected, tuple) and _holds_schemes(expected):
        alike = isinstance(value, tuple) and len(value) == len(expected)
        return alike and all(map(_is_as_set, value, expected))
    return bool(expected == default or value == expected)


def _holds_schemes(value: Any) -> bool:
    return isinstance(value, Scheme) or (isinstance(value, tuple) and any(map(_holds_schemes, value)))


def first_loss_limit(model: Any) -> float | None:
    """Return the highest first loss to expect: that of a uniform guess and 1.5 nats; None: it has no vocabulary head.

    Args:
        model: the transformers model.
    """
    if model.get_output_embeddings() is None:
        return None
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    return math.log(vocabulary) + ABOVE_GUESSING if isinstance(vocabulary, int) and vocabulary > 0 else None


def base_digest(model: Any) -> str | None:
    """Return the digest of the weights before the swap, without adapters; None: this process does not hold them.

    A swap that cannot be undone, because it was loaded or fitted, counts with its own weights.

    Args:
        model: the transformers model.
    """
    if is_sharded(model):
        return None
    swap = getattr(model, "_posswap", None)
    if swap is not None and swap.can_undo and not swap.fitted:
        model = unpatch_model(copy_sharing_weights(model))
    return state_digest(weights_without_adapters(model))


def versions() -> dict[str, str]:
    """Return the versions of what trains, as far as it is installed."""
    installed = {"hf_posswap": package_version()}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def trained_part(model: Any) -> str:
    """Return which weights of `model`, as the Trainer has it, are trained: "full", the adapter's type, or "a part"."""
    types = {str(getattr(config.peft_type, "value", config.peft_type)).lower() for config in _adapters(model).values()}
    if types:
        return "+".join(sorted(types))
    return "full" if all(parameter.requires_grad for parameter in model.parameters()) else "a part"


def _adapters(model: Any) -> dict[str, Any]:
    configs = getattr(model, "peft_config", None)
    return configs if isinstance(configs, dict) else {}


def check_written(folder: Path, record: SwapRecord) -> bool:
    """Check that the checkpoint in `folder` names the swap, and return whether it names any.

    Args:
        folder: that a Trainer wrote.
        record: of the model's swap.

    Raises:
        CheckpointError: it holds a model or an adapter that would load without the swap, or with another one.
    """
    adapters = sorted(path.parent for path in folder.glob(f"**/{ADAPTER_CONFIG}"))
    holders = [(path / SIDECAR, "record") for path in adapters] or [
        (path, "posswap") for path in sorted(folder.glob("**/config.json")) if path.parent == folder or _is_model(path)
    ]
    for path, key in holders:
        values = read_json(path) if path.is_file() else {}
        if not isinstance(values, dict) or values.get(key) is None:
            raise CheckpointError(
                f"the trainer wrote {folder} without its swap to {record.scheme['name']}: {path.name} does not name "
                "it, so it would load as the unswapped model. Save with hf_posswap.save(trainer.model, folder)."
            )
        if not SwapRecord.from_dict(values[key]).is_same_mechanism(record):
            raise CheckpointError(
                f"the trainer wrote {folder} with another swap ({values[key]['scheme']}) than the model has "
                f"({record.scheme}). Save with hf_posswap.save(trainer.model, folder)."
            )
    return bool(holders)


def _is_model(path: Path) -> bool:
    values = read_json(path)
    return isinstance(values, dict) and "model_type" in values
