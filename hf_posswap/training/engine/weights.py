"""The weights of a checkpoint, into a model that has been prepared in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from hf_posswap.errors import CheckpointError
from hf_posswap.patching.record.refusals import unmark

_ADAPTER = "adapter_model.safetensors"


def load_weights(model: Any, folder: Path) -> None:
    """Put the weights in `folder` into `model`; an adapter's into a PEFT model.

    Args:
        model: of the same classes and shapes as the one that was saved.
        folder: a checkpoint of a training, or a saved model.

    Raises:
        CheckpointError: they do not fit, or none are there.
    """
    if hasattr(model, "peft_config"):
        _load_adapter(model, folder)
        return
    files = sorted(path for path in folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no model*.safetensors to go on from.")
    state: dict[str, Any] = {}
    for file in files:
        state |= _read(file)
    unmark(state, {name: tensor.dim() for name, tensor in model.state_dict().items()})
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    other = sorted(name for name, tensor in state.items() if name in shapes and tensor.shape != shapes[name])
    if other:
        raise CheckpointError(f"the weights in {folder} do not fit the model: of another shape {other[:8]}.")
    integers = [name for name, held in model.state_dict().items() if name in state and _is_integer(held, state[name])]
    if integers:
        raise CheckpointError(f"the weights in {folder} do not fit the model: integers for {sorted(integers)[:8]}.")
    found = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(set(found.missing_keys) - tied)
    if missing or found.unexpected_keys:
        raise CheckpointError(
            f"the weights in {folder} do not fit the model: missing {missing[:8]}, unknown "
            f"{sorted(found.unexpected_keys)[:8]}."
        )


def _is_integer(held: Any, stored: Any) -> bool:
    return held.is_floating_point() and not stored.is_floating_point()


def _read(file: Path) -> dict[str, Any]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Go on from another checkpoint.") from error


def _load_adapter(model: Any, folder: Path) -> None:
    from peft import set_peft_model_state_dict

    if not (folder / _ADAPTER).is_file():
        raise CheckpointError(f"{folder} holds no {_ADAPTER} to go on from.")
    found: Any = set_peft_model_state_dict(model, _read(folder / _ADAPTER))
    if found.unexpected_keys:
        raise CheckpointError(f"the adapter in {folder} does not fit: unknown {sorted(found.unexpected_keys)[:8]}.")
