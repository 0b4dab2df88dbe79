"""Attention before and after a swap: each model is read as itself, on the same tokens, and what it says is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_posswap.comparison import AttentionComparison, Candidate, compare_attention, read_documents
from hf_posswap.errors import DataError, OptionError, PositionRangeError, UnknownNameError
from hf_posswap.evaluation import attention_by_distance
from hf_posswap.training import byte_tokenizer

TEXTS = ["to be or not to be, that is the question of all questions " * 4, "the dog chases the pig around a house " * 5]
WORDS = byte_tokenizer()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=257, n_positions=32)).eval()


def compared(folder: Path, *others: Any, **how: Any) -> AttentionComparison:
    models = [Candidate(gpt2(), name="base"), *others]
    return compare_attention(models, folder, documents=TEXTS, tokenizer=WORDS, **how)


def test_each_model_is_measured_as_itself_on_the_same_tokens(tmp_path: Path) -> None:
    base = gpt2()
    models = [Candidate(base, name="base"), Candidate(base, "alibi", name="alibi")]
    found = compare_attention(models, tmp_path, documents=TEXTS, tokenizer=WORDS, factor=2)
    tokens = read_documents(TEXTS, WORDS, length=64, limit=4).tokens
    assert {name: list(lengths) for name, lengths in found.paid.items()} == {"base": [32], "alibi": [32, 64]}
    expected = attention_by_distance(base, tokens[:, :32])
    torch.testing.assert_close(found.paid["base"][32].totals, expected.totals)
    assert not torch.allclose(found.paid["alibi"][32].totals, expected.totals, rtol=1e-2)
    assert getattr(base, "_posswap", None) is None
    assert (found.path.is_file(), found.path.with_suffix(".svg").is_file(), found.window) == (True, True, 32)


def test_what_is_said_is_what_was_measured(tmp_path: Path) -> None:
    found = compared(tmp_path, Candidate(gpt2(), "alibi", name="alibi"), factor=2)
    one = found.paid["alibi"][64]
    assert found.said[:2] == (
        f"base, 32 tokens: half of the attention lies within {found.paid['base'][32].half} tokens, "
        f"{float(found.paid['base'][32].first.mean()):.1%} on the first token",
        "base, 64 tokens: it ends at 32",
    )
    share = float((one.totals.mean(0)[32:]).sum() / (one.texts * 63))
    assert f"{share:.1%} beyond the original window" in found.said[3]


def test_a_trained_copy_stands_beside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    found = compared(tmp_path, Candidate(LlamaForCausalLM(config).eval(), name="other"), lengths=(16, 48))
    assert list(found.paid["other"]) == [16, 48]
    assert found.paid["other"][16].totals.shape == (1, 15)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"lengths": (1,)}, OptionError, "lengths are whole numbers of at least 2"),
        ({"lengths": (64,)}, PositionRangeError, "Limits: base at 32"),
        ({"factor": 0.5}, OptionError, "factor is a number of at least 1"),
        ({"factor": float("nan")}, OptionError, "got nan"),
        ({"limit": 1}, OptionError, "at least 2"),
        ({"lengths": (30,), "documents": ["short"]}, DataError, "short"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, how: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"documents": TEXTS, "tokenizer": WORDS} | how
    with pytest.raises(error, match=message if message != "short" else "documents have 30 tokens"):
        compare_attention([Candidate(gpt2(), name="base")], tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_an_unknown_scheme_is_refused_before_a_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'alibi'"):
        compared(tmp_path, Candidate(gpt2(), "alibbi"))


def test_long_windows_are_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_posswap.comparison.attention.MOST_TOKENS", 40)
    found = compared(tmp_path, Candidate(gpt2(), "nope", name="nope"))
    assert list(found.paid["nope"]) == [32, 40]
    assert np.isfinite(found.paid["nope"][40].means.numpy()).all()
