"""Refusing to save a whole model of which only a part was swapped: the whole's config has no record of it.

A part of a model (`lm.model`, `clip.vision_model`) may be swapped by itself, and saved by itself. The whole would be
saved with its own config, which says nothing of the swap, and be loaded as if there had been none. A module does not
know what holds it; but `state_dict` tells every module the path at which it lies, and the one who asks stands on the
call stack.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_posswap.compat.python_frames import self_of
from hf_posswap.compat.torch_wrappers import compiled_original
from hf_posswap.errors import UnsupportedSwapError


def guard_saving(model: nn.Module) -> RemovableHandle:
    """Make every transformers model around a swapped `model` refuse to be saved, and return what takes that back.

    Refused are `save_pretrained`, and with it `push_to_hub`, and a Trainer's saving. A `state_dict()` that nobody saves
    so is given as ever; so is one that wrappers save which are no transformers models (PEFT, DDP, torch.compile,
    SentenceTransformer): they hold the model whole. A whole whose config has the record of this very swap is saved.
    The guard goes along with deep copies and pickles of the model.

    Args:
        model: a transformers model that carries a swap.
    """
    return model.register_state_dict_pre_hook(refuse_whole)


def refuse_whole(part: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse to give the weights of a swapped `part` to a whole model that is being saved.

    Args:
        part: the model that carries the swap.
        prefix: of the names of its weights; "": it is asked for its own.
        keep_vars: whether the weights keep their gradients.

    Raises:
        UnsupportedSwapError: names the whole, and where in it the part lies.
    """
    if not prefix:
        return
    whole = _saved_around(part)
    if whole is None:
        return
    path = next(path for path, module in whole.named_modules() if module is part)
    inner, outer = type(part).__name__, type(whole).__name__
    raise UnsupportedSwapError(
        f"{path!r} of this {outer} carries a swap of its own, and {outer} would be saved without a record of it: it "
        f"would be loaded as a model that was never swapped. What works: unpatch_model on that {inner} and "
        f"patch_model on the whole {outer}; or saving the {inner} by itself, "
        f"model.get_submodule({path!r}).save_pretrained(...)."
    )


def _saved_around(part: nn.Module) -> Any:
    """Return the outermost transformers model that is being saved, holds `part` and lacks its record; or None."""
    record = _record(part)
    saved = [one for frame in _frames() if (one := _saved_by(frame, part)) is not None and _record(one) != record]
    return saved[-1] if saved else None


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the call stack, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _saved_by(frame: FrameType, part: nn.Module) -> Any:
    """Return the transformers model around `part` that the method running in `frame` saves; None: it saves none."""
    name = frame.f_code.co_name
    if name not in ("save_model", "save_pretrained"):
        return None
    saver = self_of(frame)
    if name == "save_model":
        if not isinstance(saver, _trainers()):
            return None
        saver = _unwrapped(saver.model)  # it gathers sharded weights before it saves them
    from transformers import PreTrainedModel

    holds = isinstance(saver, PreTrainedModel) and saver is not part and any(one is part for one in saver.modules())
    return saver if holds else None


def _trainers() -> tuple[Any, ...]:
    """Return transformers' Trainer, where anybody has imported it."""
    module = sys.modules.get("transformers.trainer")
    return () if module is None else (module.Trainer,)


def _unwrapped(model: Any) -> Any:
    """Return the model in the wrappers of torch that a Trainer takes off before it saves."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return _unwrapped(model.module)
    original = compiled_original(model)
    return model if original is None else _unwrapped(original)


def _record(model: Any) -> Any:
    return getattr(model.config, "posswap", None)
