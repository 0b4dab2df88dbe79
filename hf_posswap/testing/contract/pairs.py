"""A pair: a registered scheme in a tiny model, how one is called, and what a point asks of one."""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from hf_posswap import SwapPlan, patch_model, plan_swap, swap_plan
from hf_posswap.compat.transformers_attention import IMPLEMENTATION, can_choose_attention, supports_sdpa
from hf_posswap.compat.transformers_calls import CACHE_NAMES, cache_argument, forward_parameters
from hf_posswap.errors import SchemeError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.sites import Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.inspect.describe import stand_ins
from hf_posswap.schemes import SCHEMES, make_scheme
from hf_posswap.schemes.base import is_sum
from hf_posswap.testing.contract.checks import NOISE
from hf_posswap.testing.contract.models import FIRST_WORD, LENGTH, MODELS, VOCABULARY, Limits, Tiny

if TYPE_CHECKING:
    from torch import nn
    from transformers import Cache, PreTrainedConfig

    from hf_posswap.schemes.base import Traits

EAGER_MASKS = ("mpt", "mvp")
"""Model types whose own code runs on the masks of eager attention alone."""


def attend(model: PreTrainedModel, implementation: str) -> bool:
    """Have a patched model attend by `implementation`, and return whether it can be had.

    Where the stock attention lacks the interface, transformers refuses to choose, with a warning: the config alone
    says, where the swap has given it the interface; elsewhere the model attends as it was built.
    """
    if can_choose_attention(model):
        if implementation == "sdpa" and not supports_sdpa(model):
            return False
        model.set_attn_implementation(implementation)
        return True
    plan = swap_plan(model)
    interface = any("AttentionInterface" in edit.after for edit in plan.edits)
    if not interface or plan.record.base_type in EAGER_MASKS:
        return False
    setattr(model.config, IMPLEMENTATION, implementation)
    return True


def with_cache(module: nn.Module, cache: Cache | None) -> dict[str, object]:
    """Return the argument by which the forward of `module`, a model or a layer of one, is given `cache`."""
    return {cache_argument(module): cache}


def takes_cache(cls: type) -> bool:
    """Return whether the forward of the class takes a cache: an annotation says so, or one of the names it has had."""
    parameters = forward_parameters(cls).items()
    return any(
        name in CACHE_NAMES or "Cache" in inspect.formatannotation(parameter.annotation)
        for name, parameter in parameters
    )


def _fixed(length: int, seed: int) -> Tensor:
    return torch.randint(FIRST_WORD, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


SOURCE = _fixed(12, seed=7)
"""What the encoder reads while a point is about the decoder: [1, 12]."""
TARGET = _fixed(9, seed=8)
"""What the decoder reads while a point is about the encoder: [1, 9]."""
HEARD = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(9))
"""What an encoder that hears takes in place of tokens, two frames for a state of it: [1, mel bins, frames]."""

_DECODERS_OWN = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")
"""Arguments that have a name of their own where they are the decoder's."""


def named(stack: str, argument: str) -> str:
    """Return what a model calls the `argument` of this stack."""
    return f"decoder_{argument}" if stack == "decoder" and argument in _DECODERS_OWN else argument


def given(tiny: Tiny, stack: str, arguments: dict[str, Any]) -> dict[str, object]:
    """Return what a forward is called with.

    Args:
        tiny: of the model.
        stack: which reads the words; "": the only one.
        arguments: as a model of one stack calls them. Position ids that an encoder-decoder does not take are left out,
            and the labels of an encoder are what the decoder reads.
    """
    if not stack:
        return arguments
    rows = len(next(value for name in ("input_ids", "inputs_embeds") if (value := arguments.get(name)) is not None))
    taken = {named(stack, name): value for name, value in arguments.items()}
    if not tiny.takes(named(stack, "position_ids")):
        taken.pop(named(stack, "position_ids"), None)
    if stack == "encoder":
        target = TARGET.expand(rows, -1)
        return taken | {"decoder_input_ids": target} | ({"labels": target} if "labels" in taken else {})
    if tiny.hears:
        return taken | {"input_features": HEARD.expand(rows, -1, -1)}
    source = SOURCE.expand(rows, -1)
    return taken | {"input_ids": source, "attention_mask": torch.ones_like(source)}


def _cache(kind: str, config: PreTrainedConfig, length: int) -> Cache:
    return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=length)


LONGER = 2 * LENGTH
"""What every pair is patched for, in tokens."""


@dataclass(frozen=True)
class Pair:
    """One scheme in one tiny model at one choice of site; of two stacks, one that reads the words of a point.

    Whichever reads them, the scheme is in both stacks.
    """

    model: str
    scheme: str
    site: Literal["auto", "attention"] = "auto"
    stack: str = ""

    def __str__(self) -> str:
        read = f" ({self.stack})" if self.stack else ""
        return f"{self.model}{read}-{self.scheme}" + ("" if self.site == "auto" else "-at-attention")

    @property
    def tiny(self) -> Tiny:
        """How its model is built."""
        return MODELS[self.model]

    @property
    def limits(self) -> Limits:
        """What its stock class does not do itself."""
        return self.tiny.limits

    def native(self, **changes: Any) -> Any:
        """Return the tiny model as it was born; `changes` are of its config."""
        return self.tiny.build(**changes)

    def patch(self, model: PreTrainedModel, **changes: object) -> SwapPlan:
        """Patch `model`, one of `native()`."""
        return swap_plan(patch_model(model, self.scheme, site=self.site, **options_for(self) | changes))

    def native_with(self, implementation: str) -> PreTrainedModel:
        """Return the tiny model with this attention, or with its only one."""
        known = implementation == "eager" or supports_sdpa(self.tiny.stock)
        return self.native(attn_implementation=implementation if known else "eager")

    def swapped(self, **changes: object) -> Any:
        """Return a patched model of its own, free to be changed; `changes` are of its config."""
        model = self.native(**changes)
        self.patch(model)
        return model

    def specimen(self, implementation: str | None = None) -> Any:
        """Return a patched model that is shared between tests, attending by default: to be run, never to be changed."""
        return _specimen_of(replace(self, stack=""), implementation)

    def given(self, **arguments: object) -> dict[str, object]:
        """Return what a forward is called with: `arguments` of the stack that reads, and what the other one reads."""
        return given(self.tiny, self.stack, arguments)

    def logits(self, model: PreTrainedModel, ids: Tensor, **kwargs: object) -> Tensor:
        """Return the logits, of `ids` or of what the decoder reads behind them, as the function `logits` does."""
        kwargs.setdefault("attention_mask", torch.ones_like(ids))
        taken = self.given(input_ids=ids, **{k: v for k, v in kwargs.items() if v is not None})
        floating = {k: v.to(model.dtype) for k, v in taken.items() if isinstance(v, Tensor) and v.is_floating_point()}
        with torch.no_grad():
            return model(**taken | floating).logits

    def cache(self, kind: str, config: PreTrainedConfig, length: int = LONGER) -> Cache:
        """Return an empty cache for `length` tokens; behind an encoder it has a part for what that one says."""
        stock_cache = _cache(kind, config, length)
        if not self.tiny.paired:
            return stock_cache
        seen = copy.deepcopy(config.get_text_config(decoder=True))  # by cross-attention, which has no sliding window
        seen.sliding_window, seen.layer_types = None, None
        return EncoderDecoderCache(
            stock_cache, _cache(kind, seen, HEARD.shape[2] // 2 if self.tiny.hears else SOURCE.shape[1])
        )

    def takes(self, argument: str) -> bool:
        """Return whether the stack that reads takes the argument that a model of one stack calls so."""
        return self.tiny.takes(named(self.stack, argument))

    def rows(self, logits: Tensor, start: int | None, stop: int | None = None) -> Tensor:
        """Return the rows of `logits` [Q, V] about words `start` to `stop`: all, where the encoder has read those."""
        return logits if self.stack == "encoder" else logits[start:stop]

    @property
    def placed(self) -> bool:
        """Whether the words may be given positions: of one stack all may, whether or not it listens, or none."""
        refused = any(edit.after == "refused" for edit in self.plan.edits if edit.stack == self.at.name)
        return self.takes("position_ids") or not (self.stack or refused)

    @property
    def counts_padding_out(self) -> bool:
        """Whether `generate` tells the model where the tokens of a padded batch stand, or its stock class finds it."""
        return self.takes("position_ids") or (self.placed and self.at.position_source != "arange")

    @property
    def first(self) -> bool:
        """Whether it stands for its model in points that are about no stack of its own."""
        return self.stack in ("", "decoder")

    @property
    def plan(self) -> SwapPlan:
        """The plan of the swap."""
        return _plan(replace(self, stack=""))

    @property
    def at(self) -> Stack:
        """Where positions live in the stack that reads the words."""
        return self.plan.sites.stack(self.stack) if self.stack else self.plan.sites.main

    @property
    def traits(self) -> Traits:
        """What the scheme promises."""
        return self.plan.scheme.traits

    @property
    def relative(self) -> bool:
        """Whether only differences of the words' positions matter: nowhere, where they stand beside other words'."""
        return self.traits.relative and not (self.tiny.merged and self.stack == "decoder")

    @property
    def causal(self) -> bool:
        """Whether the model sees only the past."""
        return self.at.geometry.causal

    @property
    def cached(self) -> bool:
        """Whether the model sees only the past and keeps it: the first GPT takes no cache."""
        return self.causal and self.tiny.steps and takes_cache(self.tiny.stock)

    @property
    def identity(self) -> bool:
        """Whether the scheme is what the model has, within its original length."""
        if self.scheme in ("rope", "dynamic") and self.plan.sites.rotary:
            return True  # angles that only differ past the original length
        return self.scheme in ("learned", self.tiny.inside)  # a kept table, or what is native inside attention

    @property
    def may_act_late(self) -> bool:
        """Whether the scheme may begin to act past the original length alone: a term of a sum, or another package's."""
        return is_sum(self.scheme) or not type(self.plan.scheme).__module__.startswith("hf_posswap.")

    @property
    def noise(self) -> float:
        """The largest difference that two ways to compute the same make."""
        return NOISE + self.tiny.rounding

    @property
    def learns(self) -> bool:
        """Whether the scheme brings parameters of its own."""
        return any(".posswap." in f".{name}" for name in self.plan.added)

    @property
    def tabled(self) -> bool:
        """Whether the swapped model has a position table for the words, which ends somewhere."""
        edits = [edit for edit in self.plan.edits if edit.stack == self.at.name]
        return any(edit.site == "embedding" and "raises PositionRangeError beyond" in edit.after for edit in edits)

    @property
    def consistent_length(self) -> int:
        """A length at which every way of running must agree: beyond the original only where the plan says so."""
        return min(LENGTH + 8, self.plan.max_length) if self.plan.cached_equals_full else LENGTH - 2


def options_for(pair: Pair) -> dict[str, Any]:
    """Return what `patch_model` is called with: a longer length, and what the scheme cannot do without."""
    return _options(replace(pair, stack=""))


@functools.cache
def _options(pair: Pair) -> dict[str, object]:
    geometry = locate(_untouched(pair.model)).geometry
    options = stand_ins(pair.scheme, geometry)
    if is_sum(pair.scheme):
        return {"max_length": LONGER}
    if geometry.original_length != LENGTH and hasattr(SCHEMES.get(pair.scheme), "original_length"):
        options["original_length"] = LENGTH  # a config that does not say it
    if pair.scheme == "p_rope":  # the slowest pairs hardly turn in so few tokens
        options["p"] = 0.25
    if pair.scheme == "cope":  # so do its few; of a model that does not rotate, four do
        options["faded"] = sum(angle > 0 for angle in geometry.frequencies or (1.0,) * 4)
    if hasattr(SCHEMES.get(pair.scheme), "init_std"):  # at zero it would be no mechanism yet
        options["init_std"] = 1.0
    if not _reaches_longer(pair.scheme, geometry, options):  # as STRING, which reaches less than twice its length
        options["original_length"] = LONGER
    # a blend still uses the old table, and ends where that does
    faded = pair.scheme == "blend" and locate(_untouched(pair.model)).table_path is not None
    return {"max_length": LENGTH if faded else LONGER, **options}


def _reaches_longer(scheme: str, geometry: Geometry, options: dict[str, object]) -> bool:
    """Return whether a scheme reaches `LONGER` tokens by itself, or cannot be given another original length."""
    if not hasattr(SCHEMES.get(scheme), "original_length"):
        return True
    try:
        reach = make_scheme(scheme, **options).resolve(geometry, None).reach(geometry)
    except SchemeError:  # the pair is refused, with this reason
        return True
    return reach is None or reach >= LONGER


def refusal(pair: Pair) -> str | None:
    """Return why the pair is refused; None: it is not."""
    return _refusal(replace(pair, stack=""))


@functools.cache
def _refusal(pair: Pair) -> str | None:
    try:
        _plan(pair)
    except UnsupportedSwapError as error:
        return str(error)
    return None


@functools.cache
def _plan(pair: Pair) -> SwapPlan:
    return plan_swap(_untouched(pair.model), pair.scheme, site=pair.site, **options_for(pair))


@functools.cache
def _specimen_of(pair: Pair, implementation: str | None) -> PreTrainedModel:
    if implementation is None:
        return pair.swapped()
    model = pair.native_with(implementation)
    pair.patch(model)
    attend(model, implementation)
    return model


@functools.cache
def _untouched(model: str) -> PreTrainedModel:
    return MODELS[model].build()  # plans never touch it


def is_one(pair: Pair) -> bool:
    """Return whether there is such a pair, refused or not: inside attention only what the model itself can express.

    Its plan is made, and kept, so that the scheme may be gone from the registry later.
    """
    outside = replace(pair, site="auto")
    is_refused = refusal(outside) is not None
    if pair == outside:
        return True
    return not is_refused and outside.plan.route == "native" and refusal(pair) is None


def by_stack(pairs: list[Pair]) -> list[Pair]:
    """Return the pairs, those of encoder-decoders once for each of their stacks that is swapped."""
    paired = {pair.model for pair in pairs if pair.tiny.paired}
    stacks = {name: [stack.name for stack in locate(_untouched(name)).stacks] for name in paired}
    return [replace(pair, stack=stack) for pair in pairs for stack in stacks.get(pair.model, [""])]


def words(batch: int, length: int, seed: int = 1) -> Tensor:
    """Return random token ids [batch, length] without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, VOCABULARY, (batch, length), generator=generator)


def logits(model: PreTrainedModel, ids: Tensor, **kwargs: object) -> Tensor:
    """Return the logits [B, Q, V] without gradients, unmasked unless an attention_mask is given (None: none at all)."""
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        return model(input_ids=ids, **{k: v for k, v in kwargs.items() if v is not None}).logits
