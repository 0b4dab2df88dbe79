"""Position ids: passed on to a stack, checked, or counted as its stock class does; where queries and keys stand.

Some classes take any argument and pass few of them on: BLOOM's, MPT's and T5's whole models, Falcon's task heads. What
is inside attention after a swap can go by position ids, so they are brought there; a table that its model counts by
itself cannot, nor can a checkpoint that stock transformers is to run alike: then they are refused.

Queries stand at the `position_ids` that the model made or was given, or are counted on from the cache's offset. Keys
carry no position of their own once they are cached: `cached_keys` keeps them with the cache.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.compat.torch_tensors import assert_when_run
from hf_posswap.compat.transformers_calls import PagedArguments, keys_of_call, paged_keys, tokens_before
from hf_posswap.errors import PositionShapeError, PosswapError, UnsupportedSwapError
from hf_posswap.families.base import PositionSource
from hf_posswap.families.modules import by_name, entry_signature
from hf_posswap.families.sites import Stack
from hf_posswap.patching.edits.edit import AppliedAgain, PlanDraft, Saved, SwapContext, TouchesNothing
from hf_posswap.patching.edits.restore import keep_hooks, remove_hooks
from hf_posswap.patching.sites.attention.cached_keys import record, watch
from hf_posswap.patching.sites.attention.forward_memo import ForwardMemo, Span, identity_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import Cache, PreTrainedModel

SEE_EACH_OTHER = (
    "position_ids that begin anew were given to {name} without an attention_mask. transformers takes such ids for "
    "packed documents, but this class makes its mask without them, so the documents would see each other. What works: "
    "one document in each row, padded; for one text whose ids begin anew attention_mask=torch.ones_like(input_ids)."
)
ENTRY_ARGUMENT = "position_ids"
"""What the module that takes a stack's input calls them."""


class PendingIds:
    """Holds the position ids [B or 1, Q] that an outer module was given, until the stack takes them.

    Each thread that runs the model has its own. Compiled code cannot ask which thread it runs in: it has one place
    for all threads, filled too, because a compiled stack may be in a model that is not compiled.
    """

    def __init__(self) -> None:
        self.traced: Tensor | None = None
        self.put_traced = False
        self.own = threading.local()

    def put(self, position_ids: Tensor | None) -> None:
        """Keep `position_ids`; None: no more."""
        self.traced, self.put_traced = position_ids, torch.compiler.is_compiling()
        if not self.put_traced:
            self.own.position_ids = position_ids

    def take(self) -> Tensor | None:
        """Return them, and keep them no more."""
        if torch.compiler.is_compiling() or self.put_traced:
            position_ids = self.traced
        else:
            position_ids = getattr(self.own, "position_ids", None)
        self.put(None)
        return position_ids

    def __reduce__(self) -> tuple[object, ...]:
        return PendingIds, ()

    def __deepcopy__(self, memo: dict[int, object]) -> PendingIds:
        return PendingIds()


class OuterHook:
    """Pre-hook and hook of a module around a stack: keeps the position ids that it may drop.

    Args:
        pending: holds them.
        argument: what the module's callers call them.
        takes: whether they are taken from its arguments: of two stacks each has its own.
        refusal: why they cannot be obeyed; "": they can.
    """

    def __init__(self, pending: PendingIds, argument: str, *, takes: bool, refusal: str) -> None:
        self.pending, self.argument, self.takes, self.refusal = pending, argument, takes, refusal

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        given = kwargs.get(self.argument)
        if given is None:
            return None
        if self.refusal:
            raise UnsupportedSwapError(self.refusal)
        self.pending.put(given)
        return (args, {name: value for name, value in kwargs.items() if name != self.argument}) if self.takes else None

    def forget(self, *_: object) -> None:
        """End a forward, whether it came to its end or not."""
        self.pending.put(None)


class ArrivalHook:
    """Pre-hook of the module that takes a stack's input: gives it the position ids that were dropped on the way.

    Args:
        pending: holds them.
        signature: names of the module's positional arguments.
        refusal: why they cannot be given to it; "": they can.
    """

    def __init__(self, pending: PendingIds, signature: list[str], refusal: str) -> None:
        self.pending, self.signature, self.refusal = pending, signature, refusal

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Any, Any] | None:
        waiting = self.pending.take()
        given = by_name(self.signature, args, kwargs)
        if waiting is None or given.get(ENTRY_ARGUMENT) is not None:
            return None
        if self.refusal:
            raise UnsupportedSwapError(self.refusal)
        return args, {**kwargs, ENTRY_ARGUMENT: waiting}


@dataclass(frozen=True, kw_only=True)
class PassPositionIds(AppliedAgain, TouchesNothing):
    """Makes a model pass the position ids that it is given to one of its stacks, or refuse them.

    Attributes:
        entry: path of the module that takes the stack's input; None: no stack is known that they could be of.
        outer: paths of the modules around it that take position ids and may drop them.
        argument: what those call them.
        takes: whether they are taken from the arguments: of two stacks each has its own.
        refusal_text: why they cannot be obeyed; "": they can.
    """

    entry: str | None
    outer: tuple[str, ...]
    argument: str
    takes: bool
    refusal_text: str

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        pending, entry = PendingIds(), None if self.entry is None else model.get_submodule(self.entry)
        names = [] if entry is None else entry_signature(entry)
        # an outer module may pass them on after all, to one that knows them: that shows where they arrive
        early = "" if ENTRY_ARGUMENT in names else self.refusal_text
        for path in self.outer:
            outer = OuterHook(pending, self.argument, takes=self.takes, refusal=early)
            module = model.get_submodule(path)
            keep_hooks(saved, module.register_forward_pre_hook(outer, with_kwargs=True))
            keep_hooks(saved, module.register_forward_hook(outer.forget, always_call=True))
        if entry is None:
            return
        hook: Any = ArrivalHook(pending, names, self.refusal_text)
        if early:
            hook = OuterHook(pending, ENTRY_ARGUMENT, takes=False, refusal=early)
        keep_hooks(saved, entry.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        remove_hooks(saved)

    def check(self, model: PreTrainedModel) -> str | None:
        hooks = [hook for path in self.outer for hook in pre_hooks(model.get_submodule(path))]
        outer = sum(isinstance(hook, OuterHook) and hook.argument == self.argument for hook in hooks)
        arrival = () if self.entry is None else pre_hooks(model.get_submodule(self.entry))
        arrives = self.entry is None or any(isinstance(hook, ArrivalHook | OuterHook) for hook in arrival)
        return None if arrives and outer == len(self.outer) else "the hooks that pass position ids on are gone"


def plan_position_ids(context: SwapContext, *, counts: bool, native: bool) -> PlanDraft:
    """Return the edit after which position ids for a stack are obeyed or refused; none: they are already.

    Args:
        context: of the stack.
        counts: whether the model counts positions by itself, after the swap: for a table, or where none was made.
        native: whether stock transformers is to run the saved checkpoint, and would drop them.
    """
    model, stack = context.model, context.stack
    of_decoder = model.config.is_encoder_decoder and stack.name == "decoder"
    argument = "decoder_position_ids" if of_decoder else ENTRY_ARGUMENT
    outer, deaf = _around(model, stack, argument), _swallows(model.get_submodule(stack.entry), ENTRY_ARGUMENT)
    if stack.inputs == "images" or not (outer or deaf):
        return PlanDraft()  # whoever gives them is heard, or python says that nobody takes them
    why = ""
    if native:
        why = "so would stock transformers, which is to run this swap alike"
    elif counts and deaf:
        of = f"the positions of its {stack.name}" if stack.name else "its positions"
        why = f"it counts {of} by itself, and only a scheme inside attention (rope, alibi) would go by others"
    takes = bool(model.config.is_encoder_decoder)
    return _pass(context, stack.entry, outer, argument, takes=takes, why=why)


def plan_unclaimed_ids(context: SwapContext) -> PlanDraft:
    """Return the edit after which position ids for an encoder that no swap reaches are refused; none: none are."""
    model, sites = context.model, context.sites
    if not model.config.is_encoder_decoder or any(stack.name == "encoder" for stack in sites.stacks):
        return PlanDraft()
    why = "no swap reaches its encoder, whose positions it counts by itself"
    outer = _around(model, sites.main, ENTRY_ARGUMENT)
    return _pass(replace(context, stack=sites.main), None, outer, ENTRY_ARGUMENT, takes=True, why=why)


def _pass(
    context: SwapContext, entry: str | None, outer: tuple[str, ...], argument: str, *, takes: bool, why: str
) -> PlanDraft:
    refusal = f"{context.model_name} was given {argument}, which its own code drops: {why}. Leave them out."
    edit = PassPositionIds(
        site="attention",
        path=entry or "(model)",
        before="drops position ids",
        after="refused" if why else "passed on",
        stack=context.stack.name,
        entry=entry,
        outer=outer,
        argument=argument,
        takes=takes,
        refusal_text=refusal if why else "",
    )
    return PlanDraft(edits=[edit])


def _around(model: PreTrainedModel, stack: Stack, argument: str) -> tuple[str, ...]:
    """Return the paths of the modules around `stack` that take `argument` and may drop it."""
    names = stack.entry.split(".") if stack.entry else []
    paths = (".".join(names[:depth]) for depth in range(len(names)))
    return tuple(path for path in paths if _swallows(model.get_submodule(path), argument))


def _swallows(module: nn.Module, argument: str) -> bool:
    """Return whether `module` takes any argument, and not this one by its name."""
    parameters = inspect.signature(type(module).forward).parameters
    return argument not in parameters and any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def check_fits(position_ids: Tensor, given: dict[str, object], *, heard: bool) -> None:
    """Check that `position_ids` are as many as the tokens among the arguments `given` by name.

    Args:
        position_ids: that a caller gave.
        given: arguments of the module that takes the input.
        heard: whether its own code takes them, in rows that it may know alone, such as [3, B, L] of images and text.

    Raises:
        PositionShapeError: they are not.
    """
    tokens = _tokens(given)
    if not isinstance(tokens, Tensor) or not isinstance(position_ids, Tensor) or torch.jit.is_tracing():
        return
    shape = tuple(tokens.shape[:-1] if given.get("input_ids") is None else tokens.shape)  # [B, L]
    ids = tuple(position_ids.shape)
    if ids in (shape, (1, shape[-1])) or (heard and len(ids) > 1 and ids[-1] == shape[-1]):
        return
    raise PositionShapeError(
        f"position_ids of shape {list(ids)} were given for tokens of shape {list(shape)}: give one for each token of "
        "this call, or one row for all rows; with a cache, only those of the new tokens."
    )


def on_one_axis(position_ids: Tensor, *, turns: bool, name: str) -> Tensor | None:
    """Return the positions [B, Q] of tokens whose ids tell time, height and width; None: every token follows the last.

    A bias goes by the place of a token in the sequence, which the first of four rows holds. A rotation goes by the one
    number that the three axes of a text token share.

    Args:
        position_ids: of M-RoPE, [3, B, Q], or [4, B, Q] with the places first.
        turns: whether the scheme rotates queries and keys.
        name: of the class that they were given to.

    Raises:
        UnsupportedSwapError: the scheme rotates, and a token, of an image, has different numbers.
    """
    if not turns:
        return position_ids[0] if len(position_ids) == 4 else None
    axes = position_ids[-3:]
    refusal = (
        f"{name} was given images or videos, whose tokens have three positions (time, height, width), and its scheme "
        "rotates queries and keys by one. What works: text alone; a bias (alibi, t5, kerple, fire), added to "
        "'native' by sum where the stock rotation stays; or a rotary scheme that stock transformers runs (yarn, "
        "linear, rope with another base)."
    )
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        assert_when_run((axes[:1] == axes).all(), refusal)
    elif axes.shape[-1] > 1 and not bool((axes[:1] == axes).all()):
        raise UnsupportedSwapError(refusal)
    return axes[0]


def looks_packed(position_ids: Tensor, given: Mapping[str, object]) -> bool:
    """Return whether transformers takes `position_ids` for those of packed documents, which do not see each other.

    It does where they begin anew and no mask is among the arguments `given`; while a graph is traced nothing is known.
    """
    tells = isinstance(given.get("attention_mask"), Tensor) or torch.compiler.is_compiling()
    if tells or torch.jit.is_tracing() or position_ids.shape[1] == 1:
        return False
    return bool((position_ids.diff() <= 0).any())


def refuse_packed(memo: ForwardMemo, implementation: str | None, mask: Tensor | BlockMask | None) -> None:
    """Refuse packed documents whose class masks them without their ids, so that they see each other.

    Args:
        memo: of the forward; it is asked once.
        implementation: of attention. Flash attention is given the ids of packed documents, where there are any.
        mask: that the class made for its attention, [B or 1, H or 1, L, L], or a BlockMask; None: a causal one.

    Raises:
        UnsupportedSwapError: a token sees another document.
    """
    name, position_ids = memo.packed_for, memo.given
    if not name or position_ids is None:
        return
    memo.packed_for = ""
    if memo.standing is not None or implementation not in ("eager", "sdpa", "flex_attention"):
        return  # with a cache transformers does not look for documents
    rows, last = (position_ids.diff() <= 0).nonzero(as_tuple=True)  # the last token of each document but the final one
    seen: Tensor | None = None  # by the first token of the next document
    if isinstance(mask, Tensor):
        if mask.dim() != 4 or mask.shape[-1] != position_ids.shape[1]:
            return
        seen = mask[rows.clamp(max=len(mask) - 1), 0, last + 1, last]
        seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
    elif mask is not None:
        seen = mask.mask_mod(rows, torch.zeros_like(rows), last + 1, last)
    if seen is None or bool(seen.any()):
        raise UnsupportedSwapError(SEE_EACH_OTHER.format(name=name))


def counted(
    source: PositionSource, padding_id: int | None, given: dict[str, Any], cache: Cache | None
) -> Tensor | None:
    """Return the positions [B, Q], from 0, that a stock class counts; -1 is a token that it does not count.

    None: every token stands right behind the last one, padding too.

    Args:
        source: what the class counts.
        padding_id: the token id that it does not count, where it counts input ids.
        given: arguments of the module that takes the input, by name.
        cache: that is among them, or None.
    """
    tokens = _tokens(given)
    if source == "arange" or tokens is None:
        return None
    length, past = tokens.shape[1], 0 if cache is None else cache.get_seq_length()
    index = torch.arange(length, device=tokens.device) + past  # [Q]
    if source == "input_ids":
        if given.get("input_ids") is None:  # embeddings have no padding id
            return None
        shown = tokens.ne(-1 if padding_id is None else padding_id)  # [B, Q]
        positions = shown.cumsum(dim=1) - 1 + past
    else:
        keys = _shown_keys(given.get("attention_mask"))  # [B, K]
        if keys is None or keys.shape[1] < length + (past if isinstance(past, int) else 0):
            return None
        shown = keys.index_select(1, index)
        behind_padding = torch.arange(keys.shape[1], device=keys.device) - (keys.cumsum(dim=1) == 0).sum(dim=1)[:, None]
        positions = keys.cumsum(dim=1) - 1 if source == "mask" else behind_padding
        positions = positions.index_select(1, index)
    positions = positions.masked_fill(~shown, -1)
    return None if _is_plain(positions, index) else positions


def _tokens(given: dict[str, Any]) -> Tensor | None:
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def _shown_keys(mask: Tensor | None) -> Tensor | None:
    """Return which keys a mask shows to any query, bool [B, K]; None: it does not say.

    Args:
        mask: [B, K], or [B, 1, Q, K] as `generate` makes it for a static cache, bool or added to the scores.
    """
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return None
    if mask.dim() == 2:
        return mask.bool()
    shown = mask if mask.dtype == torch.bool else mask == 0
    return shown.any(dim=2)[:, 0]


def _is_plain(positions: Tensor, index: Tensor) -> bool:
    """Return whether all rows of a text may share one row of positions: its real tokens stand at `index` [Q].

    Steps of decoding are not looked at: to ask a GPU costs more than rows of their own.
    """
    if positions.shape[1] == 1 or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return bool(((positions == index) | (positions < 0)).all())


def find_span(
    hidden: Tensor,
    position_ids: Tensor | None,
    cache: Cache | None,
    layer_idx: int,
    memo: ForwardMemo,
    first: int = 0,
    *,
    keeps_keys: bool = True,
) -> Span:
    """Return where queries and keys stand: for layers that stand alike, the very same span.

    Args:
        hidden: input of the attention module, [B, Q, E].
        position_ids: [B or 1, Q] as the model made them or the caller gave them; None: counted from the cache.
        cache: the self-attention cache, not yet updated, or None.
        layer_idx: of the attention module.
        memo: shared by the layers.
        first: what `position_ids` call position 0.
        keeps_keys: whether it will be asked where the keys stand, now or later.

    Raises:
        PosswapError: where cached keys stand cannot be known, or another hand replaced them; or the cache counts the
            new tokens otherwise as queries than as keys.
    """
    length = hidden.shape[1]
    past: int | Tensor = 0
    key_length, key_offset = length, 0
    if cache is not None:
        past = tokens_before(cache, layer_idx)
        key_length, key_offset = keys_of_call(cache, length, layer_idx)
        if isinstance(past, Tensor):
            past = past.to(hidden.device)
        elif not torch.compiler.is_compiling():
            _check_agrees(cache, past + length, key_offset + key_length)

    def make(shared_cache: dict[object, object] | None) -> Span:
        query = torch.arange(length, device=hidden.device)[None] + past if position_ids is None else position_ids
        query = query - first if first and position_ids is not None else query
        kept = record(cache, layer_idx, query, key_length) if cache is not None and keeps_keys else None
        is_prefill = not isinstance(past, Tensor) and past == 0 and key_length == length
        return Span(query, key_length, is_prefill, kept, shared_cache)

    if cache is not None and keeps_keys:
        watch(cache, layer_idx)
    if isinstance(past, Tensor):
        return make(None)
    key = (*identity_of(position_ids), cache, length, hidden.device, past, key_length, key_offset, keeps_keys)
    return memo.shared(key, make) if memo.knows(cache, position_ids) else make(None)


def paged_span(span: Span, cache: object, layer: int, arguments: PagedArguments, memo: ForwardMemo) -> Span:
    """Return `span` with the keys that a cache of many requests gives, one request's behind the other's.

    The last key of a request is that of its last query. Keys behind the last request pad, and no query sees them.

    Args:
        span: of the queries of all requests, [1, Q].
        cache: of continuous batching.
        layer: of the attention module.
        arguments: of its call.
        memo: shared by the layers.
    """
    given, read = paged_keys(cache, layer, arguments)
    ends, query_ends = given[1:].long(), arguments["cu_seq_lens_q"][1:].long()
    key = torch.arange(read or span.query.shape[1], device=ends.device)
    request = torch.searchsorted(ends, key, right=True).clamp(max=len(ends) - 1)
    at = (span.query[0, query_ends - 1] - ends + 1)[request] + key
    return memo.shared((span.query, given, read), lambda shared: Span(span.query, len(key), False, at[None], shared))


def _check_agrees(cache: Cache, queries_end: int, keys_end: int) -> None:
    """Refuse a cache by which the last of the new tokens stands behind the last key, which is its own."""
    if queries_end > keys_end:
        raise PosswapError(
            f"a cache of class {type(cache).__name__} says that the new tokens end at {queries_end} as queries and at "
            f"{keys_end} as keys: what its offsets mean is not understood. Use use_cache=False, a DynamicCache, or a "
            "release of transformers that hf_posswap was tested with."
        )
