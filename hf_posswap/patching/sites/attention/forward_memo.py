"""What the layers of one forward share: their positions, and position ids that the model does not pass on.

Several threads may run one model at once, each on other tokens, and a hook may run it inside a forward: each forward
has its own memo.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from hf_posswap.compat.python_objects import self_of
from hf_posswap.compat.torch_tensors import in_backward, version_of
from hf_posswap.families.base import PositionSource
from hf_posswap.patching.sites.attention.cached_keys import is_as_left
from hf_posswap.schemes.common.piece import Keys
from hf_posswap.schemes.mechanism import Mechanism

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

    from hf_posswap.compat.transformers_attention import Attention

T = TypeVar("T")


@dataclass
class Span:
    """The queries and keys of one attention call.

    Attributes:
        query: positions of the queries, [B or 1, Q].
        key_length: K, keys after this call.
        is_prefill: whether the keys are exactly the tokens of the queries.
        cached: positions of all keys, [B or 1, K], where a cache keeps them; None: it keeps none.
        shared_cache: what was made of these positions for the layers that stand like this; None: nothing may be shared.
    """

    query: Tensor
    key_length: int
    is_prefill: bool
    cached: Tensor | None = None
    shared_cache: dict[object, object] | None = None

    @property
    def key(self) -> Tensor:
        """Positions of the keys, [B or 1, K]."""
        if self.is_prefill:
            return self.query
        assert self.cached is not None, "the cache was not asked to keep the positions of its keys"
        return self.cached

    @property
    def length(self) -> Tensor:
        """Tokens seen so far in each row, [B or 1, 1, 1, 1]."""
        return self.query.amax(dim=-1)[:, None, None, None] + 1


@dataclass
class Standing:
    """How an attention layer was called, and the positions of its tokens: layers called alike share the positions.

    Attributes:
        mechanism: of the layer.
        span: the positions of queries and keys.
        keys: the form in which cached keys come.
        slot: place or name of the cache among the arguments; None: there is no cache.
        cache: as the layer was given it.
        paged: whether it holds many requests side by side.
        inputs: position ids, and what is compared by value: how often they were written into, shape and device of its
            input, arguments without a name.
        layers: of the cache, all of which grow; None: each layer has to be looked at.
        layer_state: class of the cache's layer, and shape of the keys in it, [B, G, K, D].
        view: of the cache, by which keys are written with the scheme's rotation; None: none was needed yet.
    """

    mechanism: Mechanism
    span: Span
    keys: Keys
    slot: int | str | None
    cache: Cache | None
    paged: bool
    inputs: tuple[object, ...]
    layers: Sequence[object] | None = None
    layer_state: tuple[type, torch.Size] | None = None
    view: Cache | None = None

    def matches(
        self, module: nn.Module, mechanism: Mechanism, kwargs: Mapping[str, object], inputs: tuple[object, ...]
    ) -> bool:
        """Return whether a layer of the same forward is called alike, and its keys are as the cache left them.

        Args:
            module: of attention.
            mechanism: of the layer.
            kwargs: of its call.
            inputs: as the attribute.
        """
        if self.layers is None or mechanism is not self.mechanism or not isinstance(self.slot, str):
            return False
        if kwargs.get(self.slot) is not self.cache or inputs[0] is not self.inputs[0] or inputs[1:] != self.inputs[1:]:
            return False
        layer = vars(module).get("layer_idx")
        cache_layer = None if layer is None or layer >= len(self.layers) else self.layers[layer]
        keys = getattr(cache_layer, "keys", None)
        state = None if keys is None else (type(cache_layer), keys.shape)
        return state is not None and state == self.layer_state and is_as_left(cache_layer)


def identity_of(position_ids: Tensor | None) -> tuple[Tensor | None, int | None]:
    """Return a tensor and its version, by which it is known again if nothing was written into it since."""
    if position_ids is None or torch.compiler.is_compiling():  # a traced tensor has no version
        return position_ids, None
    return position_ids, version_of(position_ids)


@dataclass
class ForwardMemo:
    """What the layers of one forward share: where they stand, and what the first of them made of it, as cos and sin.

    A span is found again only by the very cache, tensor and numbers it was made from, so a stale one cannot be used;
    `clear` at the start and end of each forward frees it. Where user code calls layers, or layers run again in
    the backward, only values that surely did not change are reused. While a graph is being traced nothing is kept: the
    compiler merges equal work by itself.
    """

    entries: list[tuple[tuple[object, ...], Span]] = field(default_factory=list)
    masks: list[tuple[weakref.ref[Tensor], int | None, str, Any]] = field(default_factory=list)
    """What was read from the masks of this forward, by its name."""
    in_forward: bool = False
    """Whether the model's own forward runs: none of its code writes into what its layers are given."""
    given: Tensor | None = None
    """Position ids [B or 1, Q] that the model was given: not all models tell their attention of them."""
    given_by_caller: bool = False
    """Whether a caller gave them, in the model's own count; otherwise they count from 0."""
    runs_again: bool = False
    """Whether layers run again in the backward."""
    packed_for: str = ""
    """The class that was given position ids of packed documents, until its mask is seen to keep them apart."""
    wrote_keys: bool = False
    """Whether a layer wrote changed keys into a cache, which other layers may read."""
    calls: int = 0
    """How often attention modules asked for it in a forward."""
    callers: set[int] = field(default_factory=set)
    """The ids of the attention modules that asked outside of one, since all was forgotten."""
    standing: Standing | None = None
    """How the layer before was called, where a layer that is called alike surely stands alike."""
    attends: tuple[PreTrainedConfig, str | None, Attention | None] | None = None
    """The config that the layer before went by, its implementation's name, and what stands under that name."""
    drops_bias: bool = False
    """Whether the bias that the model itself makes was taken away: what is left of it is zeros."""
    source: PositionSource = "arange"
    """What the stock class counts where it is given no position ids."""
    padding_id: int | None = None
    """The token id that is not counted, where it counts input ids."""

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()
        self.masks.clear()
        self.callers.clear()
        self.standing = None
        self.wrote_keys = False

    def knows(self, cache: object, *tensors: Tensor | None) -> bool:
        """Return whether these are known again: outside of a forward a cache, or what counts no writes, may change."""
        counted = (tensor is None or version_of(tensor) is not None for tensor in tensors)
        return self.in_forward or torch.compiler.is_compiling() or (cache is None and all(counted))

    def of_mask(self, mask: Tensor, name: str, read: Callable[[], T]) -> T:
        """Return `read()`, which gives `name`, computed once in a forward as long as `mask` is not written to."""
        if not self.knows(None, mask):
            return read()
        version = version_of(mask)
        for known, at, named, value in self.masks:
            if known() is mask and (at, named) == (version, name):
                return value
        value = read()
        self.masks.append((weakref.ref(mask), version, name, value))
        return value

    def shared(self, key: tuple[object, ...], make: Callable[[dict[object, object] | None], Span]) -> Span:
        """Return the span that was kept under `key`, compared by identity for tensors, or what `make` gives.

        Args:
            key: what the span is made from.
            make: takes what `Span.shared_cache` begins as.
        """
        if torch.compiler.is_compiling():
            return make(None)
        for known, span in self.entries:
            if len(known) == len(key) and all(map(_same, known, key)):
                return span
        span = make({})
        self.entries.append((key, span))
        return span

    def take(self, given: Tensor | None, *, by_caller: bool, runs_again: bool) -> None:
        """Take what a forward begins with."""
        self.given, self.given_by_caller, self.runs_again = given, by_caller, runs_again


class ForwardMemos:
    """The memos of all forwards that run through a stack: of several threads, or nested.

    Compiled code cannot ask which forward it belongs to: it has one memo, `traced`, which is set like the memo of the
    last forward, because single compiled layers run in a forward that is not compiled.

    Args:
        drops_bias, source, padding_id: as in `ForwardMemo`, for all forwards.
    """

    def __init__(
        self, *, drops_bias: bool = False, source: PositionSource = "arange", padding_id: int | None = None
    ) -> None:
        self.make = partial(ForwardMemo, drops_bias=drops_bias, source=source, padding_id=padding_id)
        self.traced, self.begun_traced, self.own = self.make(), False, threading.local()
        self.untold = False
        """Whether a forward that has a backward was ever given position ids of which layers may not be told."""

    def now(self, module: nn.Module) -> ForwardMemo:
        """Return the memo of the current forward, for the attention module `module`.

        Where no hook saw a forward begin, a module that asks a second time has begun another one: sentence-transformers
        calls its model's `forward` directly, without hooks.
        """
        if torch.compiler.is_compiling():
            return self.traced
        memo = self._running()[-1][1]
        if self.begun_traced and not memo.in_forward:  # an uncompiled part of a compiled forward
            return replace(self.traced, entries=[], masks=[])
        if memo.in_forward:
            memo.calls += 1
            return memo
        if id(module) in memo.callers:
            memo.clear()
        memo.callers.add(id(module))
        return memo

    def of_thread(self) -> ForwardMemo:
        """Return the memo of this thread's innermost forward; outside of any, that of layers that user code calls."""
        return self._running()[-1][1]

    def begin(self, module: nn.Module, given: Tensor | None, *, by_caller: bool, runs_again: bool) -> None:
        """Begin a forward of `module` whose layers may not be told of the position ids `given`.

        Args:
            module: that takes the stack's input.
            given: position ids [B or 1, Q]; None: there are none, or the model tells its layers.
            by_caller: whether a caller gave them.
            runs_again: whether layers run again in the backward.
        """
        self.begun_traced = torch.compiler.is_compiling()
        self.untold = self.untold or (given is not None and torch.is_grad_enabled() and not runs_again)
        self.traced.take(given, by_caller=by_caller, runs_again=runs_again)
        if not self.begun_traced:
            memo, depth = self.make(in_forward=True), _depth(module)
            memo.take(given, by_caller=by_caller, runs_again=runs_again)
            self._leave(depth).append((depth, memo))

    def end(self, module: nn.Module) -> None:
        """End a forward of `module`, or what a failed one left."""
        self.traced.given, self.begun_traced = None, False
        if torch.compiler.is_compiling():
            return
        _, outer = self._leave(_depth(module))[-1]
        if outer.in_forward:
            self.traced.take(outer.given, by_caller=outer.given_by_caller, runs_again=outer.runs_again)

    def lost(self) -> bool:
        """Return whether a layer runs again in a backward, and position ids that it was not told of may be gone.

        Of the layers that transformers itself runs again the first call says so.
        """
        if torch.compiler.is_compiling() or not self.untold or self.traced.runs_again:
            return False
        return not self.of_thread().in_forward and in_backward()

    def _running(self) -> list[tuple[int, ForwardMemo]]:
        """Return the memos of this thread, the innermost last, each with the forwards around it."""
        memos: list[tuple[int, ForwardMemo]] | None = getattr(self.own, "running", None)
        if memos is None:
            memos = self.own.running = [(-1, self.make())]
        return memos

    def _leave(self, depth: int) -> list[tuple[int, ForwardMemo]]:
        """Forget the forwards of this thread except the `depth` outermost, and what directly called layers left."""
        running = self._running()
        while running[-1][0] >= depth:
            running.pop()[1].standing = None  # its view of the cache holds the memo
        running[0][1].clear()
        return running

    def __deepcopy__(self, memo: dict[int, object]) -> ForwardMemos:
        return ForwardMemos(**self.make.keywords)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(ForwardMemos, **self.make.keywords), ()


def _depth(module: nn.Module) -> int:
    """Return how many forwards of `module` run in this thread."""
    frame, depth = inspect.currentframe(), 0
    while frame is not None:
        depth += frame.f_code.co_name == "forward" and self_of(frame) is module
        frame = frame.f_back
    return depth


def _same(a: object, b: object) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return bool(a == b)
