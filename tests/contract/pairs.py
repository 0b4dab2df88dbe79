"""Every pair of a registered scheme and a tiny model, found from the registries, and what a test asks of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posswap import SwapPlan, patch_model, plan_swap, swap_plan
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.sites import Stack
from hf_posswap.patching.inspect.describe import stand_ins
from hf_posswap.schemes import SCHEMES, schemes_for
from tests.contract.attending import attend
from tests.contract.models import FIRST_WORD, LENGTH, TINY, VOCABULARY, Tiny
from tests.contract.others import ALL, OTHERS
from tests.contract.paired import PAIRED
from tests.contract.rotary_kinds import KINDS_OF_ROTARY
from tests.contract.stacks import cache_of, given, named
from tests.stock import takes_cache
from tests.toys import registration

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
        return ALL[self.model]

    def native(self, **changes: Any) -> PreTrainedModel:
        """Return the tiny model as it was born; `changes` are of its config."""
        return self.tiny.build(**changes)

    def patch(self, model: Any, **changes: Any) -> SwapPlan:
        """Patch `model`, one of `native()`."""
        return swap_plan(patch_model(model, self.scheme, site=self.site, **options_for(self) | changes))

    def native_with(self, implementation: str) -> PreTrainedModel:
        """Return the tiny model with this attention, or with its only one."""
        known = implementation == "eager" or self.tiny.stock._supports_sdpa
        return self.native(attn_implementation=implementation if known else "eager")

    def swapped(self, **changes: Any) -> Any:
        """Return a patched model of its own, free to be changed; `changes` are of its config."""
        model = self.native(**changes)
        self.patch(model)
        return model

    def specimen(self, implementation: str | None = None) -> Any:
        """Return a patched model that is shared between tests, attending by default: to be run, never to be changed."""
        return _specimen_of(replace(self, stack=""), implementation)

    def given(self, **arguments: Any) -> dict[str, Any]:
        """Return what a forward is called with: `arguments` of the stack that reads, and what the other one reads."""
        return given(self.tiny, self.stack, arguments)

    def logits(self, model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
        """Return the logits, of `ids` or of what the decoder reads behind them, as the function `logits` does."""
        kwargs.setdefault("attention_mask", torch.ones_like(ids))
        taken = self.given(input_ids=ids, **{k: v for k, v in kwargs.items() if v is not None})
        floating = {k: v.to(model.dtype) for k, v in taken.items() if isinstance(v, Tensor) and v.is_floating_point()}
        with torch.no_grad():
            return model(**taken | floating).logits

    def cache(self, kind: str, config: Any, length: int = LONGER) -> Any:
        """Return an empty cache for the swapped model of `config`."""
        return cache_of(kind, config, self.tiny, length)

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
    def traits(self) -> Any:
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
def _options(pair: Pair) -> dict[str, Any]:
    geometry = locate(_untouched(pair.model)).geometry
    options = stand_ins(pair.scheme, geometry)
    if geometry.original_length != LENGTH and hasattr(SCHEMES.get(pair.scheme), "original_length"):
        options["original_length"] = LENGTH  # a config that does not say it
    if pair.scheme == "p_rope":  # the slowest pairs hardly turn in so few tokens
        options["p"] = 0.25
    if hasattr(SCHEMES.get(pair.scheme), "init_std"):  # at zero it would be no mechanism yet
        options["init_std"] = 1.0
    # a blend still uses the old table, and ends where that does
    faded = pair.scheme == "blend" and locate(_untouched(pair.model)).table_path is not None
    return {"max_length": LENGTH if faded else LONGER, **options}


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
def _specimen_of(pair: Pair, implementation: str | None) -> Any:
    if implementation is None:
        return pair.swapped()
    model: Any = pair.native_with(implementation)
    pair.patch(model)
    attend(model, implementation)
    return model


@functools.cache
def _untouched(model: str) -> PreTrainedModel:
    return ALL[model].build()  # plans never touch it


def pairs_that(wanted: Callable[[Pair], bool] = lambda pair: True) -> list[Pair]:
    """Return the pairs, the toys' too; natively expressible ones a second time, inside attention.

    The other families' models meet the schemes of each site alone.

    Args:
        wanted: is asked before a pair is planned, which takes long, and before it is of one stack.
    """
    with registration.registered():
        pairs = [Pair(model, scheme) for model in TINY for scheme in schemes_for("text")]
        pairs += [Pair(model, scheme) for model in ALL if model not in TINY for scheme in daily_schemes(model)]
        inside = [replace(pair, site="attention") for pair in pairs]
        return _by_stack([pair for pair in pairs + inside if wanted(pair) and _is_one(pair)])


def _is_one(pair: Pair) -> bool:
    """Return whether there is such a pair, refused or not; its plan is made, and kept, while the toys are there."""
    outside = replace(pair, site="auto")
    is_refused = refusal(outside) is not None
    if pair == outside:
        return True
    return not is_refused and outside.plan.route == "native" and refusal(pair) is None


def _by_stack(pairs: list[Pair]) -> list[Pair]:
    """Return the pairs, those of encoder-decoders once for each of their stacks that is swapped."""
    paired = {pair.model for pair in pairs} & {*PAIRED}
    stacks = {name: [stack.name for stack in locate(_untouched(name)).stacks] for name in paired}
    return [replace(pair, stack=stack) for pair in pairs for stack in stacks.get(pair.model, [""])]


@functools.cache
def all_pairs() -> list[Pair]:
    """Return every pair."""
    return pairs_that()


@functools.cache
def supported_pairs() -> list[Pair]:
    """Return the pairs that can be patched."""
    return [pair for pair in all_pairs() if refusal(pair) is None]


@functools.cache
def daily_pairs() -> list[Pair]:
    """Return the pairs that run points in every run, and those of these that are refused; no other is planned."""
    return pairs_that(is_daily)


KINDS = ("gpt2", "bert", "llama")
"""One model of each kind: every scheme runs every point on it."""
ONE_OF_EACH_SITE = ("sinusoidal", "yarn", "alibi")
"""One scheme of each site: a table's, one that stock rotary modules say, one inside attention."""
DAILY_PAIRED = ("bart",)
"""The encoder-decoder that every scheme runs every point on, the schemes of each site in every run."""
OF_EACH_SITE = ("sinusoidal", "yarn", "rope", "alibi", "self_extend")
"""Schemes that between them use every site and way of attending: they run every point on every model."""


FEW = (*OF_EACH_SITE, "t5", "dynamic")
"""Schemes that between them ask for the positions of keys in every way: by distance, by bucket, by length."""


def daily_schemes(model: str) -> tuple[str, ...]:
    """Return the schemes that run every point on a model outside TINY: of the same kind of model one has them all."""
    if model in DAILY_PAIRED:
        return tuple(
            name for name in schemes_for("text") if name != "longrope"
        )  # a number a pair: its stacks' heads differ
    alike = model in KINDS_OF_ROTARY or (model in PAIRED and model not in DAILY_PAIRED)
    return ONE_OF_EACH_SITE if alike else OF_EACH_SITE


def is_daily(pair: Pair) -> bool:
    """Return whether the pair runs every point in every run; the others do so where the whole contract is asked for."""
    if pair.model in DAILY_PAIRED:
        return pair.site == "auto" and pair.scheme in OF_EACH_SITE
    if pair.model in OTHERS or pair.model in PAIRED:
        return False
    if pair.model in KINDS:
        return True
    return pair.scheme in OF_EACH_SITE if pair.site == "auto" else pair.scheme == "rope"


def own_pairs() -> list[Pair]:
    """Return one pair for each scheme and model of the project's own: no toys, no second site, no other family."""
    toys = {registration.TOY_SCHEME, registration.TOY_MODEL}
    own = [pair for pair in all_pairs() if pair.model in TINY and not toys & {pair.model, pair.scheme}]
    return [pair for pair in own if pair.site == "auto"]


def words(batch: int, length: int, seed: int = 1) -> Tensor:
    """Return random token ids [batch, length] without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, VOCABULARY, (batch, length), generator=generator)


def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """Return the logits [B, Q, V] without gradients, unmasked unless an attention_mask is given (None: none at all)."""
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        return model(input_ids=ids, **{k: v for k, v in kwargs.items() if v is not None}).logits


def gap(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference; NaN counts as infinite."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a.float() - b.float()).abs().nan_to_num(nan=torch.inf).max())


NOISE = 5e-5
"""The largest difference that float32 rounding makes of logits near 5."""
once = pytest.mark.pairs(lambda pair: pair.first)
"""Marks a point that asks nothing of the words: it runs once on an encoder-decoder, not for each of its stacks."""
placed = pytest.mark.pairs(lambda pair: pair.placed)
"""Marks a point that says where words stand: it runs on the stacks that are told."""
CHANGE = 1e-2
"""The smallest difference that counts as a change of mechanism."""
