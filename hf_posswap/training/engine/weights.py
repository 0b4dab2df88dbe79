"""Loads the weights of a checkpoint into a model that was prepared in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from hf_posswap.errors import CheckpointError
from hf_posswap.patching.record.refusals import unmark

_ADAPTER = "adapter_model.safetensors"


def load_weights(model: Any, folder: Path) -> None:
    """Load the weights in `folder` into `model`; adapter weights into a PEFT model.

    Args:
        model: of the same classes and shapes as the one that was saved.
        folder: a checkpoint of a training, or a saved model.

    Raises:
        CheckpointError: there are none, or they do not fit.
    """
    if hasattr(model, "peft_config"):
        _load_adapter(model, folder)
        return
    files = sorted(path for path in folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no model*.safetensors to resume from.")
    state: dict[str, Any] = {}
    for file in files:
        state |= _read(file)
    unmark(state, {name: tensor.dim() for name, tensor in model.state_dict().items()})
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    mismatched = sorted(name for name, tensor in state.items() if name in shapes and tensor.shape != shapes[name])
    if mismatched:
        raise CheckpointError(f"the weights in {folder} do not fit the model: different shape for {mismatched[:8]}.")
    integers = [
        name for name, parameter in model.state_dict().items() if name in state and _is_integer(parameter, state[name])
    ]
    if integers:
        raise CheckpointError(f"the weights in {folder} do not fit the model: integers for {sorted(integers)[:8]}.")
    load_result = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(set(load_result.missing_keys) - tied)
    if missing or load_result.unexpected_keys:
        raise CheckpointError(
            f"the weights in {folder} do not fit the model: missing {missing[:8]}, unknown "
            f"{sorted(load_result.unexpected_keys)[:8]}."
        )


def _is_integer(parameter: Any, stored: Any) -> bool:
    return parameter.is_floating_point() and not stored.is_floating_point()


def _read(file: Path) -> dict[str, Any]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Resume from another checkpoint.") from error


def _load_adapter(model: Any, folder: Path) -> None:
    from peft import set_peft_model_state_dict

    if not (folder / _ADAPTER).is_file():
        raise CheckpointError(f"{folder} holds no {_ADAPTER} to resume from.")
    load_result: Any = set_peft_model_state_dict(model, _read(folder / _ADAPTER))
    if load_result.unexpected_keys:
        raise CheckpointError(
            f"the adapter in {folder} does not fit: unknown {sorted(load_result.unexpected_keys)[:8]}."
        )
