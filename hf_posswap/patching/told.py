"""Position ids on their way to a stack whose model would drop them without a word: handed on, or refused.

Some classes take any argument and pass few of them on: BLOOM's, MPT's and T5's whole models, Falcon's task heads. What
is inside attention after a swap can go by position ids, so they are brought there; a table that its model counts by
itself cannot, nor can a checkpoint that stock transformers is to run alike: then they are refused.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.patching.actions import RemoveHook, Undo
from hf_posswap.patching.embedding import entry_signature

ENTRY_ARGUMENT = "position_ids"
"""What the module that takes a stack's input calls them."""


class Told:
    """Holds the position ids [B or 1, Q] that an outer module was given, until the stack takes them."""

    def __init__(self) -> None:
        self.position_ids: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"position_ids": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Told:
        return Told()


class OuterHook:
    """Pre-hook and hook of a module around a stack: keeps the position ids that it may drop.

    Args:
        told: holds them.
        argument: what the module's callers call them.
        takes: whether they are taken from its arguments: of two stacks each has its own.
        refusal: why they cannot be obeyed; "": they can.
    """

    def __init__(self, told: Told, argument: str, *, takes: bool, refusal: str) -> None:
        self.told, self.argument, self.takes, self.refusal = told, argument, takes, refusal

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        given = kwargs.get(self.argument)
        if given is None:
            return None
        if self.refusal:
            raise UnsupportedSwapError(self.refusal)
        self.told.position_ids = given
        return (args, {name: value for name, value in kwargs.items() if name != self.argument}) if self.takes else None

    def forget(self, *_: Any) -> None:
        """End a forward, whether it came to its end or not."""
        self.told.position_ids = None


class ArrivalHook:
    """Pre-hook of the module that takes a stack's input: gives it the position ids that were dropped on the way.

    Args:
        told: holds them.
        signature: names of the module's positional arguments.
        refusal: why they cannot be given to it; "": they can.
    """

    def __init__(self, told: Told, signature: list[str], refusal: str) -> None:
        self.told, self.signature, self.refusal = told, signature, refusal

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        waiting, self.told.position_ids = self.told.position_ids, None
        given = dict(zip(self.signature, args, strict=False)) | kwargs
        if waiting is None or given.get(ENTRY_ARGUMENT) is not None:
            return None
        if self.refusal:
            raise UnsupportedSwapError(self.refusal)
        return args, {**kwargs, ENTRY_ARGUMENT: waiting}


@dataclass(frozen=True)
class HandOn:
    """Makes a model hand the position ids that it is given to one of its stacks, or refuse them.

    Attributes:
        entry: path of the module that takes the stack's input; None: no stack is known that they could be of.
        outer: paths of the modules around it that take position ids and may drop them.
        argument: what those call them.
        takes: whether they are taken from the arguments: of two stacks each has its own.
        refusal: why they cannot be obeyed; "": they can.
    """

    entry: str | None
    outer: tuple[str, ...]
    argument: str
    takes: bool
    refusal: str

    def apply(self, model: Any, undo: list[Undo]) -> None:
        told, entry = Told(), None if self.entry is None else model.get_submodule(self.entry)
        names = [] if entry is None else entry_signature(entry)
        # an outer module may pass them on after all, to one that knows them: that shows where they arrive
        early = "" if ENTRY_ARGUMENT in names else self.refusal
        for path in self.outer:
            outer = OuterHook(told, self.argument, takes=self.takes, refusal=early)
            module = model.get_submodule(path)
            undo.insert(0, RemoveHook(module.register_forward_pre_hook(outer, with_kwargs=True)))
            undo.insert(0, RemoveHook(module.register_forward_hook(outer.forget, always_call=True)))
        if entry is None:
            return
        hook: Any = ArrivalHook(told, names, self.refusal)
        if early:
            hook = OuterHook(told, ENTRY_ARGUMENT, takes=False, refusal=early)
        undo.insert(0, RemoveHook(entry.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)))

    def dress(self, model: Any) -> None:
        """Give a natively loaded model the hooks that no checkpoint holds."""
        self.apply(model, [])

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        hooks = [hook for path in self.outer for hook in model.get_submodule(path)._forward_pre_hooks.values()]
        heard = sum(isinstance(hook, OuterHook) and hook.argument == self.argument for hook in hooks)
        arrival = () if self.entry is None else model.get_submodule(self.entry)._forward_pre_hooks.values()
        arrives = self.entry is None or any(isinstance(hook, ArrivalHook | OuterHook) for hook in arrival)
        return None if arrives and heard == len(self.outer) else "the hooks that hand position ids on are gone"


def hand_on(model: Any, stack: Stack, *, counts: bool, native: bool) -> HandOn | None:
    """Return the action after which position ids for `stack` are obeyed or refused; None: they are already.

    Args:
        model: the transformers model.
        stack: one of its stacks.
        counts: whether the model counts positions by itself, after the swap: for a table, or where none was made.
        native: whether stock transformers is to run the saved checkpoint, and would drop them.
    """
    argument, name = _argument(model, stack), type(model).__name__
    outer, deaf = _around(model, stack, argument), _swallows(model.get_submodule(stack.entry), ENTRY_ARGUMENT)
    if stack.image is not None or not (outer or deaf):
        return None  # whoever gives them is heard, or python says that nobody takes them
    why = ""
    if native:
        why = "so would stock transformers, which is to run this swap alike"
    elif counts and deaf:
        of = f"the positions of its {stack.name}" if stack.name else "its positions"
        why = f"it counts {of} by itself, and only a scheme inside attention (rope, alibi) would go by others"
    takes = bool(model.config.is_encoder_decoder)
    return HandOn(stack.entry, outer, argument, takes, _refusal(name, argument, why) if why else "")


def refuse_unclaimed(model: Any, sites: Sites) -> HandOn | None:
    """Return the action after which position ids for an encoder that no swap reaches are refused; None: none are."""
    if not model.config.is_encoder_decoder or any(stack.name == "encoder" for stack in sites.stacks):
        return None
    outer = _around(model, sites.main, ENTRY_ARGUMENT)
    why = "no swap reaches its encoder, whose positions it counts by itself"
    return HandOn(None, outer, ENTRY_ARGUMENT, True, _refusal(type(model).__name__, ENTRY_ARGUMENT, why))


def _refusal(name: str, argument: str, why: str) -> str:
    return f"{name} was given {argument}, which its own code drops: {why}. Leave them out."


def _argument(model: Any, stack: Stack) -> str:
    """Return what the forward of `model` calls the position ids of `stack`."""
    of_decoder = model.config.is_encoder_decoder and stack.name == "decoder"
    return "decoder_position_ids" if of_decoder else ENTRY_ARGUMENT


def _around(model: Any, stack: Stack, argument: str) -> tuple[str, ...]:
    """Return the paths of the modules around `stack` that take `argument` and may drop it."""
    parts = stack.entry.split(".") if stack.entry else []
    paths = (".".join(parts[:depth]) for depth in range(len(parts)))
    return tuple(path for path in paths if _swallows(model.get_submodule(path), argument))


def _swallows(module: nn.Module, argument: str) -> bool:
    """Return whether `module` takes any argument, and not this one by its name."""
    parameters = inspect.signature(type(module).forward).parameters
    return argument not in parameters and any(one.kind is one.VAR_KEYWORD for one in parameters.values())
