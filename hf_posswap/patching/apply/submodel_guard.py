"""Refusing to save a model of which only a submodel was swapped: the outer config has no record of the swap.

A submodel (`lm.model`, `clip.vision_model`) may be swapped and saved separately, and two models may share a body of
which one was swapped. The other model would be saved with its own config, without the record, and load as if there had
been no swap. A module does not know its parent; but `state_dict` passes every module its path, and the caller is on the
call stack.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, cast

from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_posswap.compat.python_objects import self_of
from hf_posswap.compat.torch_modules import compiled_original
from hf_posswap.errors import UnsupportedSwapError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def guard_saving(model: nn.Module) -> RemovableHandle:
    """Make every other model with the body of a swapped `model` refuse to be saved; return a handle that undoes this.

    Refused are `save_pretrained`, and with it `push_to_hub`, and saving by a Trainer. A plain `state_dict()` works as
    usual, as does saving by wrappers that are not transformers models (PEFT, DDP, torch.compile,
    SentenceTransformer), because they contain the whole model. An outer model whose config has the record of this swap
    is saved. Deep copies and pickles of the model keep the guard.

    Args:
        model: a transformers model that carries a swap.
    """
    body = getattr(model, "base_model", model)
    assert isinstance(body, nn.Module)
    return body.register_state_dict_pre_hook(refuse_whole)


def refuse_whole(submodel: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse to give the weights of `submodel` to a model that is being saved without the record of its swap.

    Args:
        submodel: the model that carries the swap, or its body.
        prefix: of the names of its weights; "": `state_dict` was called on the submodel itself.
        keep_vars: whether the weights keep their gradients.

    Raises:
        UnsupportedSwapError: names the outer model, and the path of the submodel in it.
    """
    if not prefix:
        return
    whole = _saved_around(submodel)
    if whole is None:
        return
    outer, carrier = type(whole).__name__, _carrier_in(whole, submodel)
    path = next(path for path, module in whole.named_modules() if module is (carrier or submodel))
    if carrier is None:
        raise UnsupportedSwapError(
            f"{path!r} of this {outer} belongs to another model too, which carries a swap, and {outer} would be saved "
            "without a record of it: it would load as a model that was never swapped. What works: saving the model "
            "that was swapped; or unpatch_model on that one before."
        )
    inner = type(carrier).__name__
    raise UnsupportedSwapError(
        f"{path!r} of this {outer} carries a separate swap, and {outer} would be saved without a record of it: it "
        f"would load as a model that was never swapped. What works: saving the {inner} separately, "
        f"model.get_submodule({path!r}).save_pretrained(...); or, if {outer} can be patched as a whole, "
        f"unpatch_model on that {inner} and patch_model on the {outer}."
    )


def _saved_around(submodel: nn.Module) -> PreTrainedModel | None:
    """Return the outermost transformers model being saved that contains `submodel` and lacks its record; or None."""
    savers = [_saved_by(frame, submodel) for frame in _frames()]
    without_record: PreTrainedModel | None = None
    for saver in savers:
        if saver is None:
            continue
        carrier = _carrier_in(saver, submodel)
        record = getattr(saver.config, "posswap", None)
        if carrier is None or record != getattr(carrier.config, "posswap", None):
            without_record = saver
    return without_record


def _carrier_in(whole: nn.Module, submodel: nn.Module) -> PreTrainedModel | None:
    """Return the innermost model in `whole`, or it itself, with the swap of `submodel`; None: that is another model."""
    carriers = [cast("PreTrainedModel", module) for module in whole.modules() if "_posswap" in vars(module)]
    around = [carrier for carrier in carriers if any(module is submodel for module in carrier.modules())]
    return around[-1] if around else None


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the call stack, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _saved_by(frame: FrameType, submodel: nn.Module) -> PreTrainedModel | None:
    """Return the transformers model around `submodel` that the method running in `frame` saves; None: it saves none."""
    name = frame.f_code.co_name
    if name not in ("save_model", "save_pretrained"):
        return None
    saver = self_of(frame)
    if name == "save_model":
        trainers = sys.modules.get("transformers.trainer")
        if trainers is None or not isinstance(saver, trainers.Trainer):
            return None
        # it gathers sharded weights before it saves them
        saver = None if saver.model is None else _unwrapped(saver.model)
    from transformers import PreTrainedModel

    if not isinstance(saver, PreTrainedModel) or saver is submodel:
        return None
    return saver if any(module is submodel for module in saver.modules()) else None


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the torch wrappers that a Trainer removes before it saves."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return _unwrapped(model.module)
    original = compiled_original(model)
    return model if original is None else _unwrapped(original)
