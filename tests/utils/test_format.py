"""What other libraries' errors say is passed on whole, in one line, and an error that says nothing is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hf_posswap.errors import DataError, OptionError
from hf_posswap.text import tokens
from hf_posswap.utils.devices import resolve_device
from hf_posswap.utils.format import said_by

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("error", [RuntimeError(), RuntimeError(""), RuntimeError(" \n ")], ids=repr)
def test_an_error_without_a_message_is_named(error: Exception) -> None:
    assert said_by(error) == "RuntimeError"


def test_the_lines_of_a_message_are_all_told() -> None:
    error = ValueError("Cannot do it:\n\n  - because of this\n  - and of that\n")
    assert said_by(error) == "Cannot do it: - because of this - and of that"


def test_a_message_of_pages_is_cut_and_says_so() -> None:
    said = said_by(ValueError("word " * 4000))
    assert said.startswith("word word")
    assert said.endswith(" ...")
    assert len(said) < 1100


@pytest.mark.parametrize("said", ["", "no driver:\n  install one"], ids=["nothing", "lines"])
def test_a_device_that_fails_is_refused_whatever_torch_says(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(said)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OptionError, match="install one" if said else "AssertionError"):
        resolve_device("cuda")


@pytest.mark.parametrize("said", ["", "no vocabulary:\n  it is elsewhere"], ids=["nothing", "lines"])
def test_a_tokenizer_that_fails_is_refused_whatever_it_says(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(tokens, "auto_tokenizer", refuse)
    with pytest.raises(DataError, match="it is elsewhere" if said else "RuntimeError"):
        tokens.load_tokenizer("any", instead="give one")


def test_no_code_tells_the_first_line_of_an_error_alone() -> None:
    """An error of transformers, torch or pydantic begins with a heading, and its message may be empty."""
    lines = [line for path in (ROOT / "hf_posswap").rglob("*.py") for line in path.read_text("utf-8").splitlines()]
    assert [line for line in lines if re.search(r"(error|problem|reason)\b.*\.splitlines\(\)\[0\]", line)] == []
