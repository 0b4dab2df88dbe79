"""When positions may be changed: not under inference mode, not in a forward, and by one thread at a time.

A swap takes several steps. A forward between two of them would compute neither the old mechanism nor the new one. So
the second caller is refused: a change while a forward or another change is running, and a forward during a change.
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

from hf_posswap.compat.python_objects import can_be_suspended, self_of, stacks_of_threads
from hf_posswap.compat.torch_modules import computes
from hf_posswap.errors import ModelInUseError, UnsupportedSwapError
from hf_posswap.patching.edits.edit import Refusal
from hf_posswap.patching.plan.plan_swap import unwrap

F = TypeVar("F", bound=Callable[..., Any])
RESIZE = "resize_position_embeddings"
"""The method by which some stock classes (DistilBERT, Pegasus) give themselves a position table of another length."""
_RESIZES = (
    f"{RESIZE} of {{model}} would build a new position table, and the model carries a swap to {{why}}. What works: "
    "unpatch_model(model), and patch_model(model, ..., max_length=...) with the new length."
)


@dataclass(frozen=True)
class _Change:
    """A change by one thread: the function `operation` changes `model` and all its `modules`."""

    model: nn.Module
    modules: frozenset[nn.Module]
    operation: str


_changes: dict[threading.Thread, list[_Change]] = {}
"""The changes by each thread, the outermost first."""
_table = threading.Lock()
_MOST_LOOKS = 1000
"""How often a stack is read until it is whole: a thread that C code began may have a generator as first function."""


def alone(*, parameters: bool = True) -> Callable[[F], F]:
    """Return a decorator that runs a function of a model, its first argument, inside `changing`.

    Args:
        parameters: as in `changing`.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def guarded(model: nn.Module, *args: object, **kwargs: object) -> object:
            with changing(unwrap(model), function.__name__, parameters=parameters):
                return function(model, *args, **kwargs)

        return cast(F, guarded)

    return decorate


@contextmanager
def changing(model: nn.Module, operation: str, *, parameters: bool = True) -> Iterator[None]:
    """Change the positions of `model` exclusively in the block; forwards that other threads start are refused.

    It costs forwards nothing: the hooks exist only inside the block, and running calls are read from the stacks of all
    threads (without a GIL, only from the current thread). Blocks may be nested in one thread.

    Args:
        model: the transformers model, inside any adapters.
        operation: name of the function that changes it, for messages.
        parameters: whether it creates parameters, which could not be trained under inference mode.

    Raises:
        UnsupportedSwapError: inference mode is on and parameters are created, which could never be trained.
        ModelInUseError: a forward or `generate` of the model is running, in this thread or another, or another thread
            is changing its positions.
    """
    if parameters and torch.is_inference_mode_enabled():
        raise UnsupportedSwapError(
            f"{operation} under torch.inference_mode() would create parameters that can never be trained, even later. "
            "Call it outside of that block, or use torch.no_grad() for the block."
        )
    me = threading.current_thread()
    if any(change.model is model for change in _changes.get(me, ())):
        yield
        return
    with _locked(model, operation, me), _gated(model, operation, me):
        _refuse_forward(model, operation)
        yield


@contextmanager
def _locked(model: nn.Module, operation: str, me: threading.Thread) -> Iterator[None]:
    """Lock `model` and all its modules against changes by other threads until the block ends."""
    with _table:
        for thread, changes in _changes.items():
            other = next((change for change in changes if thread is not me and _share(model, change)), None)
            if other is not None:
                raise ModelInUseError(
                    f"{operation} overlaps {other.operation} of the same {type(other.model).__name__} in thread "
                    f"{thread.name!r}: change a model's positions in one thread, before others use it."
                )
        _changes.setdefault(me, []).append(_Change(model, frozenset(model.modules()), operation))
    try:
        yield
    finally:
        with _table:
            _changes[me].pop()
            if not _changes[me]:
                del _changes[me]


def _share(model: nn.Module, other: _Change) -> bool:
    """Return whether `model` is the model that `other` changes, a submodule of it, or a model around it."""
    if model in other.modules:
        return True
    try:
        return not other.modules.isdisjoint(model.modules())
    except RuntimeError:  # its modules change while they are walked
        return True


class _Gate:
    """A forward pre-hook that refuses calls from other threads."""

    def __init__(self, operation: str, owner: threading.Thread) -> None:
        self.operation, self.owner, self.is_active = operation, owner, True

    def __call__(self, module: nn.Module, arguments: tuple[object, ...]) -> None:
        if self.is_active and threading.current_thread() is not self.owner:
            raise ModelInUseError(
                f"{self.operation} in thread {self.owner.name!r} is changing the positions of this "
                f"{type(module).__name__}: a forward now would compute neither mechanism. Run it afterwards."
            )

    def __deepcopy__(self, memo: dict[int, object]) -> _Gate:
        return self  # a copy of the model that another thread makes meanwhile shares this gate


@contextmanager
def _gated(model: nn.Module, operation: str, me: threading.Thread) -> Iterator[None]:
    """Refuse forwards in other threads: of the model, and of each model in it, such as encoders and towers."""
    from transformers import PreTrainedModel

    gate = _Gate(operation, me)
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    handles = [inner.register_forward_pre_hook(gate, prepend=True) for inner in models]
    try:
        yield
    finally:
        gate.is_active = False
        for handle in handles:
            handle.remove()


def _refuse_forward(model: nn.Module, operation: str) -> None:
    """Refuse if a forward or `generate` of the model, or of a submodule, is on the stack of any thread."""
    module_ids = {id(module) for module in model.modules()}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, call in _calls_by_thread(module_ids).items():
        if call is None:
            continue
        here = ident == threading.get_ident()
        where = "this thread" if here else f"thread {names.get(ident, str(ident))!r}"
        raise ModelInUseError(
            f"{operation} inside {call} of the same {type(model).__name__}, which runs in {where}: it would continue "
            f"with neither mechanism. {'Change positions before or after it' if here else 'Wait for its end'}."
        )


def set_resizing(model: nn.Module, swap: str | None) -> None:
    """Make `model`, with a swap called `swap`, and the models in it refuse to resize their tables; None: allow it."""
    from transformers import PreTrainedModel

    stub = getattr(PreTrainedModel, RESIZE, None)  # raises, in all classes that do not have their own
    for module in model.modules():
        vars(module).pop(RESIZE, None)
        if swap is not None and getattr(type(module), RESIZE, stub) is not stub:
            vars(module)[RESIZE] = Refusal(type(model).__name__, swap, _RESIZES)


def _calls_by_thread(module_ids: set[int]) -> dict[int, str | None]:
    """Return the running call of one of these modules in each thread, by thread ident; None: there is none.

    The other threads go on while their stacks are read. A function's frame keeps its caller even after its end; a
    generator's has none once it is suspended, and what called it would be overlooked. Such a stack is read again.

    It keeps no reference to a frame: a reference to the current one would keep the model alive until garbage
    collection.
    """
    calls: dict[int, str | None] = {}
    unread: set[int] | None = None  # of all threads
    for _ in range(_MOST_LOOKS):
        stacks, cut = stacks_of_threads(), set()
        while stacks:
            ident, innermost = stacks.popitem()
            if unread is None or ident in unread:
                calls[ident], is_whole = _running_call(innermost, module_ids)
                if not is_whole:
                    cut.add(ident)
            del innermost
        unread = cut
        if not unread:
            break
    return calls


def _running_call(frame: FrameType | None, module_ids: set[int]) -> tuple[str | None, bool]:
    """Return the call of one of these modules on the stack from `frame` outwards, None if there is none.

    Also return whether the stack was seen down to the thread's first function, or to that call: of a thread that goes
    on, Python 3.11 has given something else for a frame's caller.
    """
    outermost = frame
    while isinstance(frame, FrameType):
        name = frame.f_code.co_name
        generates = name.startswith("generate")  # generate, generate_batch, ...
        if (generates or computes(name)) and id(self_of(frame)) in module_ids:
            return ("generate" if generates else "a forward"), True
        outermost, frame = frame, frame.f_back
    return None, frame is None and (outermost is None or not can_be_suspended(outermost))
