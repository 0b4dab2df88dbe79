"""Bars of the fits: quiet unless asked for or on a terminal, over candidates or layers, and the same results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_posswap import NoPE, fit_bias, fit_logit_scale, fit_rotation, patch_model, search_longrope
from hf_posswap.errors import OptionError
from tests.contract.models import LENGTH
from tests.contract.models import build as build_model
from tests.contract.pairs import words


def bias(**how: Any) -> Any:
    return fit_bias(build_model("gpt2"), "alibi", words(2, LENGTH), **how)


def rotation(**how: Any) -> Any:
    return fit_rotation(patch_model(build_model("gpt2"), "rope", partial=0.5), words(2, LENGTH), **how)


def logit_scale(**how: Any) -> Any:
    return fit_logit_scale(
        patch_model(build_model("gpt2"), NoPE(logit_scale=0.0)), words(2, 2 * LENGTH), 2 * LENGTH, **how
    )


FITS: dict[str, tuple[Callable[..., Any], str]] = {
    "fit_bias": (bias, r"fit_bias: layers: 100%\|.*\| 2/2 "),
    "fit_rotation": (rotation, r"fit_rotation: layers: 100%\|.*\| 2/2 "),
    "fit_logit_scale": (logit_scale, r"fit_logit_scale: candidates: .*\| 1[0-9]/1[0-9] .*loss"),
}


@pytest.mark.parametrize("name", FITS)
def test_a_fit_is_quiet_unless_asked_to_show_its_progress(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit, shown = FITS[name]
    expected = fit()
    captured = capsys.readouterr()
    assert "%|" not in captured.err + captured.out
    assert fit(progress=True) == expected
    captured = capsys.readouterr()
    assert re.search(shown, captured.err), captured.err
    assert captured.out == ""
    with pytest.raises(OptionError, match="progress is True, False or None, got 2"):
        fit(progress=2)


def test_a_search_shows_its_candidates_and_native_leaves_n_hat_out(
    build: Callable[..., Any], documents: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    how: dict[str, Any] = {"population": 8, "iterations": 1}
    found = search_longrope(build("llama"), documents, 2.0, native=True, **how)
    assert capsys.readouterr().err == ""
    assert found.original_positions == (0,)
    assert search_longrope(build("llama"), documents, 2.0, original_positions=[0], progress=True, **how) == found
    assert re.search(rf"searching LongRoPE: +\d+%\|.*\| {found.evaluations[-1]}/12 .*loss", capsys.readouterr().err)
    with pytest.raises(OptionError, match="native=True is original_positions"):
        search_longrope(build("llama"), documents, 2.0, native=True, original_positions=[0, 1])
