"""The light contract: what every scheme does in every language model class that transformers has, in a moment each.

One tiny random model of the class is patched with one scheme after another. Each cell is refused with a reason, or
proved: the swap is in force and positions matter (`verify_swap`, identities included), a cached forward equals the
full one where the plan says so and the native class does it, what was saved comes back, and unpatching is bit-exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hf_posswap
from hf_posswap import patch_model, swap_plan, unpatch_model, verify_swap
from hf_posswap.compat.transformers_calls import find_cache
from hf_posswap.errors import SchemeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.sites import Sites
from hf_posswap.patching.inspect.describe import stand_ins
from hf_posswap.schemes import SCHEMES, schemes_for
from hf_posswap.testing.tiny import TINY_VOCABULARY, tiny_model
from tests.contract.pairs import NOISE, OF_EACH_SITE
from tests.stock import RELEASE, TOKENS_ARE_NOT_ENOUGH, UNBUILT, cache_in, takes_cache, with_cache

LENGTH = 12
"""Tokens of the input."""
STEPS_RAISE = {"SwitchTransformersForConditionalGeneration": "`use_cache` can only be set to `True` if"}
"""Decoders whose stock class does not run with its own cache, and what it says; any other has to."""
STEPS_DIFFER = ("BambaForCausalLM", "DoryForCausalLM", "Qwen3_5MoeForCausalLM", "Zamba2ForCausalLM")
"""Decoders whose stock class says something else in steps than at once: by recurrent layers between, or by rounding."""
if RELEASE < (5, 18):  # stock defects of 5.14
    STEPS_RAISE |= {"Zamba2ForCausalLM": "The size of tensor"}
    STEPS_DIFFER += (
        "BigBirdForCausalLM",
        "DeepseekV32ForCausalLM",
        "DogeForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Lfm2MoeForCausalLM",
        "MegatronBertForCausalLM",
        "RemBertForCausalLM",
        "RoFormerForCausalLM",
    )


@dataclass(frozen=True)
class Cell:
    """What became of one scheme in one class.

    Attributes:
        outcome: "native", "attention", or "no" (refused).
        reason: why it is refused, or "".
    """

    outcome: str
    reason: str = ""


class Unproved(Exception):
    """Nothing can be proved of a class here; says why."""


def built(name: str) -> Any:
    """Return a tiny model of the class called `name`.

    Raises:
        Unproved: transformers cannot build one.
    """
    try:
        return tiny_model(name, meta=False)
    except Exception as error:
        if not _is_known(UNBUILT, name, error):
            raise
        raise Unproved(f"not proved: no tiny model of it can be built ({_first_line(error)})") from error


def _is_known(known: dict[str, str], name: str, error: Exception) -> bool:
    """Return whether `error` is what the class called `name` is `known` to raise: anything else is a failure."""
    return name in known and known[name] in str(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].strip()


class Subject:
    """A tiny model of one class, and what it does unswapped.

    Args:
        name: of the class.
        folder: for its own checkpoint.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.model = built(name)
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, TINY_VOCABULARY, (2, LENGTH), generator=generator)
        self.sites: Sites = locate(self.model)
        try:
            self.before = self.run(self.ids)
        except Exception as error:
            if not _is_known(TOKENS_ARE_NOT_ENOUGH, name, error):
                raise
            raise Unproved(f"not proved: it does not run on tokens alone ({_first_line(error)})") from error
        self.keeps = self._comes_back(folder)
        self.state = {name: (held, held._version) for name, held in self.model.state_dict(keep_vars=True).items()}
        self.config = self.model.config.to_dict()
        self.consistent = self._consistency()

    @property
    def paired(self) -> bool:
        """Whether the model has an encoder that feeds its decoder."""
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    def run(self, ids: Tensor, model: Any = None, **kwargs: Any) -> Tensor:
        """Return the logits [B, Q, V] of `ids`, behind the same source text where there is an encoder."""
        given = {"decoder_input_ids": ids, "input_ids": self.ids} if self.paired else {"input_ids": ids}
        if not self.paired:
            found = find_cache((), kwargs)
            seen = 0 if found is None else found[1].get_seq_length()
            given["attention_mask"] = torch.ones(len(ids), seen + ids.shape[1], dtype=torch.long)
        with torch.no_grad():
            out = (self.model if model is None else model)(**given, **kwargs)
        return out.logits if kwargs.get("use_cache") is None else out

    def cached(self) -> Tensor:
        """Return the logits of the ids fed in three parts through the model's own cache."""
        parts, cache = [], None
        for start, stop in ((0, 5), (5, 6), (6, LENGTH)):
            out: Any = self.run(self.ids[:, start:stop], use_cache=True, **with_cache(self.model, cache))
            cache = cache_in(out)
            assert cache is not None, f"{type(self.model).__name__} was asked for a cache and gave none"
            parts.append(out.logits)
        return torch.cat(parts, dim=1)

    def _consistency(self) -> bool:
        """Return whether the native class is a decoder with a cache, which has to agree with its full forward.

        Whether it is one, its signature says; a class that takes a cache and fails with it is a failure, unless it is
        known to.
        """
        name = type(self.model).__name__
        if not (self.sites.geometry.causal and takes_cache(type(self.model))):
            return False
        try:
            apart = gap(self.cached(), self.before)
        except Exception as error:
            if _is_known(STEPS_RAISE, name, error):
                return False
            raise
        assert apart < NOISE or name in STEPS_DIFFER, f"the stock class itself is {apart:.2g} apart in steps"
        return apart < NOISE

    def _comes_back(self, folder: Path) -> bool:
        """Return whether the native class itself comes back from its checkpoint."""
        self.model.save_pretrained(folder)
        return gap(self.run(self.ids, type(self.model).from_pretrained(folder).eval()), self.before) < NOISE

    def assert_untouched(self) -> None:
        """Assert that the model is what it was, bit for bit."""
        state = self.model.state_dict(keep_vars=True)
        assert {name: (id(held), held._version) for name, held in state.items()} == {
            name: (id(held), version) for name, (held, version) in self.state.items()
        }, "unpatching left other tensors"
        assert self.model.config.to_dict() == self.config, "unpatching left another config"
        assert torch.equal(self.run(self.ids), self.before), "unpatching left other logits"


def gap(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference over the size of `a`; NaN counts as infinite."""
    scale = max(1.0, float(a.abs().max()))
    return float((a - b).abs().nan_to_num(nan=torch.inf).max()) / scale


def cells(name: str, folder: Path) -> Iterator[tuple[str, Cell | Exception]]:
    """Yield every registered scheme with what became of it in the class called `name`.

    Args:
        name: of a model class of transformers.
        folder: for checkpoints.
    """
    try:
        subject = Subject(name, folder / "native")
    except (UnsupportedModelError, Unproved) as error:
        yield from ((scheme, Cell("no", str(error))) for scheme in schemes_for("text"))
        return
    for scheme in schemes_for("text"):
        try:
            yield scheme, prove(subject, scheme, folder / scheme)
        except Exception as error:  # collected, so that one class shows all that fails
            yield scheme, error
            subject = Subject(name, folder / "native")


def prove(subject: Subject, scheme: str, folder: Path) -> Cell:
    """Return what became of `scheme`, each claim asserted.

    Raises:
        AssertionError, PosswapError: a claim does not hold.
    """
    options = stand_ins(scheme, subject.sites.geometry)
    if hasattr(SCHEMES.get(scheme), "init_std"):  # at zero it would be no mechanism yet
        options["init_std"] = 1.0
    try:
        plan = swap_plan(patch_model(subject.model, scheme, **options))
    except (UnsupportedSwapError, SchemeError) as error:
        return Cell("no", str(error))
    verify_swap(subject.model, tokens=LENGTH)
    swapped = subject.run(subject.ids)
    assert torch.isfinite(swapped).all()
    if subject.consistent and plan.cached_equals_full:
        assert gap(subject.cached(), swapped) < NOISE, "cached and full forward differ"
    if scheme in OF_EACH_SITE and subject.keeps:
        _comes_back(subject, swapped, folder)
    unpatch_model(subject.model)
    subject.assert_untouched()
    return Cell({"native": "native", "plugin": "attention"}[plan.route])


def _comes_back(subject: Subject, swapped: Tensor, folder: Path) -> None:
    hf_posswap.save(subject.model, folder)
    loaded = hf_posswap.load(folder)
    assert gap(subject.run(subject.ids, loaded), swapped) < NOISE, "the loaded model has other logits"
