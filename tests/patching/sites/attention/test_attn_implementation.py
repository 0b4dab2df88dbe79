"""`set_attn_implementation` does what it says on swapped models, where stock classes ignore it too."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from hf_posswap import patch_model, swap_plan, unpatch_model
from hf_posswap.patching.sites.attention.native import AllowAttnImplementation
from hf_posswap.testing.tiny import tiny_model
from tests.contract.pairs import CHANGE, NOISE, gap
from tests.families.single import words
from tests.stock import RELEASE

IDS = words(2, 10)
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
CLOSED = [
    "bloom",
    "gpt_neo",
    "openai-gpt",
    "gptj",
    "codegen",
    "xglm",
    "mpnet",
    "RoFormerForMaskedLM",
    "deberta",
    "convbert",
]
if RELEASE >= (5, 24):
    CLOSED = [kind for kind in CLOSED if kind not in ("gptj", "codegen")]
"""Model types whose stock attention lacks the interface, and whose masks are for eager code and sdpa."""


def swapped(kind: str, scheme: str = "alibi") -> Any:
    model = tiny_model(kind, meta=False)
    patch_model(model, scheme)
    return model


def logits(model: Any) -> torch.Tensor:
    """Return the logits of what is no padding."""
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=MASK).logits[MASK.bool()]


class Counted:
    """Counts the calls of torch's scaled_dot_product_attention."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, own = 0, torch.nn.functional.scaled_dot_product_attention

        def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)


@pytest.mark.parametrize("kind", CLOSED)
def test_a_swapped_model_attends_as_is_chosen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, count = swapped(kind), Counted(monkeypatch)
    assert not type(model)._can_set_attn_implementation()
    model.set_attn_implementation("eager")
    eager, before = logits(model), count.calls
    assert before == 0
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"
    assert gap(logits(model), eager) < NOISE
    assert count.calls > 0, "sdpa was chosen and something else ran"
    for other in ("flex_attention", "flash_attention_2"):
        with pytest.raises(ValueError, match="does not support"):
            model.set_attn_implementation(other)
    assert model.config._attn_implementation == "sdpa"
    assert gap(logits(model), eager) < NOISE


def test_masks_for_eager_code_alone_are_not_given_to_sdpa() -> None:
    model = swapped("mpt")
    expected = logits(model)
    for other in ("sdpa", "flex_attention", "flash_attention_2"):
        with pytest.raises(ValueError, match="does not support"):
            model.set_attn_implementation(other)
    model.set_attn_implementation("eager")
    assert gap(logits(model), expected) == 0


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_taken_back_it_is_as_stock_has_it(kind: str) -> None:
    model = tiny_model(kind, meta=False)
    before, expected = model.config._attn_implementation, logits(model)
    patch_model(model, "alibi" if kind == "falcon" else "rope")
    assert gap(logits(model), expected) > CHANGE
    model.set_attn_implementation("sdpa" if before == "eager" else "eager")
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    unpatch_model(model)
    assert model.config._attn_implementation == before
    assert gap(logits(model), expected) == 0
    other = "sdpa" if before == "eager" else "eager"
    model.set_attn_implementation(other)  # stock warns and does nothing
    assert model.config._attn_implementation == before
    for twin in twins:
        assert twin.config._attn_implementation == other
        twin.set_attn_implementation(before)
        assert twin.config._attn_implementation == before


@pytest.mark.parametrize(("kind", "ways"), [("bloom", "eager or sdpa"), ("mpt", "only eager")])
def test_the_plan_says_so(kind: str, ways: str) -> None:
    plan = swap_plan(patch_model(tiny_model(kind), "rope"))
    assert any(note.startswith(f"set_attn_implementation: {ways}.") for note in plan.notes)
    assert any(isinstance(edit, AllowAttnImplementation) for edit in plan.edits)
    others = swap_plan(patch_model(tiny_model("llama"), "alibi")).edits
    assert not any(isinstance(edit, AllowAttnImplementation) for edit in others)
