"""Fitting the logit scale: against a plain grid, on models whose best scale is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posswap
from hf_posswap import NoPE, RNoPE, fit_logit_scale, patch_model, set_logit_scale, verify_swap
from hf_posswap.errors import DataError, NotPatchedError, SchemeError
from hf_posswap.training.search.logit_scale import _least
from tests.contract.models import LENGTH, build
from tests.contract.pairs import gap, logits, words

IDS = words(3, 3 * LENGTH)


def swapped(scheme: Any, name: str = "gpt2") -> Any:
    model = build(name)
    patch_model(model, scheme)
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_scale_of_zero_is_plain_nope(name: str) -> None:
    assert gap(logits(swapped(NoPE(logit_scale=0.0), name), IDS), logits(swapped(NoPE(), name), IDS)) == 0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("make", [NoPE, lambda logit_scale: RNoPE(layers=[1], logit_scale=logit_scale)])
def test_set_logit_scale_equals_patching_with_it(name: str, make: Any, tmp_path: Path) -> None:
    model = swapped(make(logit_scale=0.0), name)
    set_logit_scale(model, 0.4)
    expected = logits(swapped(make(logit_scale=0.4), name), IDS)
    assert gap(logits(model, IDS), expected) == 0
    assert gap(logits(swapped(make(logit_scale=0.0), name), IDS), expected) > 1e-2
    verify_swap(model)
    model.save_pretrained(tmp_path)
    assert gap(logits(hf_posswap.load(tmp_path), IDS), expected) == 0


def test_the_best_scale_is_found() -> None:
    """Texts that a scaled model drew from its own predictions are read best with about that scale."""
    model = swapped(NoPE(logit_scale=0.0))
    set_logit_scale(model, 0.6)
    with torch.no_grad():
        texts = model.generate(words(24, 4), max_new_tokens=3 * LENGTH - 4, do_sample=True, top_k=0, pad_token_id=1)
    set_logit_scale(model, 0.1)
    before = logits(model, IDS)
    fit = fit_logit_scale(model, texts, 3 * LENGTH, tolerance=0.02)
    assert gap(logits(model, IDS), before) == 0, "the model is left as it was"
    assert fit.losses[fit.logit_scale] == min(fit.losses.values()) <= fit.losses[0.0]
    set_logit_scale(model, fit.logit_scale)
    labels = texts.clone()
    with torch.no_grad():
        whole = model(texts, labels=labels, attention_mask=torch.ones_like(texts)).loss
    assert fit.losses[fit.logit_scale] == pytest.approx(float(whole), rel=1e-5)
    assert fit.logit_scale == pytest.approx(0.6, abs=0.25)


@pytest.mark.parametrize("least", [0.0, 0.013, 0.7, 1.3, 2.0])
def test_golden_section_finds_the_minimum(least: float) -> None:
    assert _least(lambda c: (c - least) ** 2, 2.0, 0.001) == pytest.approx(least, abs=0.001)
    assert _least(lambda c: -math.exp(-((c - least) ** 2)), 2.0, 0.001) == pytest.approx(least, abs=0.001)


def test_what_cannot_be_fitted_is_refused() -> None:
    for scheme in ("alibi", "nope", "rnope", "rope + nope:logit_scale=0.1"):
        model = swapped(RNoPE(layers=[0]) if scheme == "rnope" else scheme)
        with pytest.raises(NotPatchedError, match=r"no logit scale of it can be set. Patch it with NoPE\(logit_sc"):
            fit_logit_scale(model, IDS, 3 * LENGTH)
        with pytest.raises(NotPatchedError, match="no logit scale of it can be set"):
            set_logit_scale(model, 0.1)
    with pytest.raises(NotPatchedError, match="carries no swap"):
        set_logit_scale(build("gpt2"), 0.1)
    model = swapped(NoPE(logit_scale=0.0))
    with pytest.raises(SchemeError, match=f"length must exceed the original {LENGTH} tokens"):
        fit_logit_scale(model, IDS, LENGTH)
    with pytest.raises(SchemeError, match="maximum must be a finite number > 0"):
        fit_logit_scale(model, IDS, 3 * LENGTH, maximum=0)
    with pytest.raises(SchemeError, match="tolerance must be a finite number > 0"):
        fit_logit_scale(model, IDS, 3 * LENGTH, tolerance=0)
    with pytest.raises(SchemeError, match="logit_scale must be a finite number >= 0"):
        set_logit_scale(model, -1.0)
    with pytest.raises(DataError, match="has 96 tokens"):
        fit_logit_scale(model, IDS, 4 * LENGTH)
