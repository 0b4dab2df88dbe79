"""When positions may be changed: not under inference mode, not in a forward, and by one thread at a time.

A swap takes several steps, and a forward that reads between two of them computes neither the old mechanism nor the
new. So whoever comes second is refused: a change where a forward or another change is running, a forward where a change
is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from hf_posswap.compat.python_frames import self_of, stacks_of_threads
from hf_posswap.compat.torch_modules import computes
from hf_posswap.errors import ModelInUseError, UnsupportedSwapError
from hf_posswap.patching.plan.plan_swap import unwrap

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Change:
    """What one thread changes: `model` with all its `parts`, by the function `what`."""

    model: nn.Module
    parts: frozenset[nn.Module]
    what: str


_changes: dict[threading.Thread, list[_Change]] = {}
"""What each thread changes, the outermost first."""
_table = threading.Lock()


def alone(*, parameters: bool = True) -> Callable[[F], F]:
    """Return what makes a function of a model, its first argument, hold that model by `changing` from end to end.

    Args:
        parameters: as in `changing`.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def held(model: Any, *args: Any, **kwargs: Any) -> Any:
            with changing(unwrap(model), function.__name__, parameters=parameters):
                return function(model, *args, **kwargs)

        return cast(F, held)

    return decorate


@contextmanager
def changing(model: nn.Module, what: str, *, parameters: bool = True) -> Iterator[None]:
    """Change the positions of `model` in the block, alone: forwards that begin meanwhile in other threads are refused.

    It costs forwards nothing: the gates stand only while the block lasts, and what runs is read from the stacks of the
    threads (in a Python without a GIL that of its own alone). Blocks may be nested in one thread.

    Args:
        model: the transformers model, inside any adapters.
        what: the function that changes it, for messages.
        parameters: whether it makes parameters, which under inference mode would be of no use.

    Raises:
        UnsupportedSwapError: inference mode is on, and parameters are made: there they never train.
        ModelInUseError: a forward or `generate` of the model is running, in this thread or another, or another thread
            is changing its positions.
    """
    if parameters:
        _refuse_inference_mode(what)
    me = threading.current_thread()
    if any(one.model is model for one in _changes.get(me, ())):
        yield
        return
    with _taken(model, what, me), _gated(model, what, me):
        _refuse_forward(model, what)
        yield


def _refuse_inference_mode(what: str) -> None:
    if torch.is_inference_mode_enabled():
        raise UnsupportedSwapError(
            f"{what} under torch.inference_mode() would make parameters that can never be trained, even after it. "
            "Call it outside of that block; or use torch.no_grad() for the block."
        )


@contextmanager
def _taken(model: nn.Module, what: str, me: threading.Thread) -> Iterator[None]:
    """Hold `model` and all in it, as other threads see it, until the block ends."""
    with _table:
        for thread, changes in _changes.items():
            other = next((one for one in changes if thread is not me and _share(model, one)), None)
            if other is not None:
                raise ModelInUseError(
                    f"{what} meets {other.what} of the same {type(other.model).__name__} in thread {thread.name!r}: "
                    "change a model's positions in one thread, before others use it."
                )
        _changes.setdefault(me, []).append(_Change(model, frozenset(model.modules()), what))
    try:
        yield
    finally:
        with _table:
            _changes[me].pop()
            if not _changes[me]:
                del _changes[me]


def _share(model: nn.Module, other: _Change) -> bool:
    """Return whether `model` is what `other` changes, a part of it, or a model around it."""
    if model in other.parts:
        return True
    try:
        return not other.parts.isdisjoint(model.modules())
    except RuntimeError:  # its modules change while they are walked
        return True


class _Gate:
    """A forward pre-hook that refuses what other threads run."""

    def __init__(self, what: str, owner: threading.Thread) -> None:
        self.what, self.owner, self.stands = what, owner, True

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.stands and threading.current_thread() is not self.owner:
            raise ModelInUseError(
                f"{self.what} in thread {self.owner.name!r} is changing the positions of this "
                f"{type(module).__name__}: a forward now would compute neither mechanism. Run it when that is done."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gate:
        return self  # a copy that another thread takes meanwhile holds a gate that opens with this one


@contextmanager
def _gated(model: nn.Module, what: str, me: threading.Thread) -> Iterator[None]:
    """Refuse forwards of other threads: of the model, and of each model in it, as encoders and towers are."""
    from transformers import PreTrainedModel

    gate = _Gate(what, me)
    entries = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    handles = [part.register_forward_pre_hook(gate, prepend=True) for part in entries]
    try:
        yield
    finally:
        gate.stands = False
        for handle in handles:
            handle.remove()


def _refuse_forward(model: nn.Module, what: str) -> None:
    """Refuse where a forward or `generate` of the model, or of a part of it, is on the stack of some thread."""
    parts = {id(part) for part in model.modules()}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, kind in _calls_by_thread(parts).items():
        if kind is None:
            continue
        here = ident == threading.get_ident()
        where = "this thread" if here else f"thread {names.get(ident, str(ident))!r}"
        raise ModelInUseError(
            f"{what} inside {kind} of the same {type(model).__name__}, which runs in {where}: it would go on with "
            f"neither mechanism. {'Change positions before or after it' if here else 'Wait for its end'}."
        )


def _calls_by_thread(parts: set[int]) -> dict[int, str | None]:
    """Return what each thread computes with one of `parts`, by its ident.

    It ends without any frame: one of its own would keep itself, and with it the model, until garbage is searched.
    """
    stacks, found = stacks_of_threads(), {}
    while stacks:
        ident, innermost = stacks.popitem()
        found[ident] = _kind_of_call(innermost, parts)
        del innermost
    return found


def _kind_of_call(frame: FrameType | None, parts: set[int]) -> str | None:
    """Return what the stack from `frame` outwards computes with one of `parts`, modules by id; None: nothing."""
    while frame is not None:
        name = frame.f_code.co_name
        generates = name.startswith("generate")  # whatever it is called: generate, generate_batch, ...
        if (generates or computes(name)) and id(self_of(frame)) in parts:
            return "generate" if generates else "a forward"
        frame = frame.f_back
    return None
