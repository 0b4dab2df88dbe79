"""Short documents are joined where too few are long enough, and the results say so; nothing is dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hf_posswap.comparison import EvalSettings, evaluate, read_documents
from hf_posswap.comparison.documents import JOINED, WHOLE, cut_documents
from hf_posswap.errors import DataError
from hf_posswap.text.stdlib import Document
from hf_posswap.training import byte_tokenizer
from tests.comparison.test_names import gpt2

TOKENIZER = byte_tokenizer()
SHORT = [f"short text number {number}" for number in range(20)]
LONG = [f"{number} " * 60 for number in range(9)]


def tokens(text: str) -> list[int]:
    return [256, *text.encode()]


def documents(texts: list[str]) -> list[Document]:
    return [Document(text[:24], text) for text in texts]


def test_rows_are_documents_one_after_another() -> None:
    cut = cut_documents(documents(SHORT), TOKENIZER, length=50, limit=48)
    rows, row = [], []
    for text in SHORT:
        row += tokens(text)
        if len(row) >= 50:
            rows.append(row[:50])
            row = []
    assert cut.tokens.tolist() == rows
    assert cut.protocol == JOINED
    assert cut.names[0] == "short text number 0 and 2 more"
    assert "far context is other documents' text" in cut.said


def test_long_documents_stay_whole_and_short_ones_are_joined_to_themselves() -> None:
    mixed = [SHORT[0], LONG[0], *SHORT[1:4], LONG[1], *SHORT[4:]]
    cut = cut_documents(documents(mixed), TOKENIZER, length=50, limit=48)
    alone = cut_documents(documents(SHORT), TOKENIZER, length=50, limit=48)
    assert cut.tokens[:2].tolist() == [tokens(text)[:50] for text in LONG[:2]]
    np.testing.assert_array_equal(cut.tokens[2:], alone.tokens)
    assert len(cut_documents(documents(mixed), TOKENIZER, length=50, limit=4).tokens) == 4


def test_enough_long_documents_are_measured_alone_and_the_others_counted() -> None:
    cut = cut_documents(documents([*SHORT[:3], *LONG]), TOKENIZER, length=50, limit=48)
    assert cut.tokens.tolist() == [tokens(text)[:50] for text in LONG]
    assert (cut.protocol, cut.said) == (WHOLE, "each is the beginning of one document; 3 shorter ones are left out")


def test_too_little_text_is_refused_with_both_counts() -> None:
    with pytest.raises(
        DataError, match=r"0 of 2 held-out .* have 50 tokens, at least 2 .* joining the others gives 0: giv"
    ):
        read_documents(SHORT[:2], TOKENIZER, length=50, limit=9)


def test_results_and_tables_name_the_protocol(tmp_path: Path) -> None:
    settings = EvalSettings(lengths=(32, 64), metrics=("ppl_prefix",))
    run = evaluate(
        gpt2(), "rope", documents=SHORT * 2, tokenizer=TOKENIZER, settings=settings, out=tmp_path, pictures=False
    )
    protocol = run.results["data"]["protocol"]
    assert protocol["id"] == "concatenated"
    note = f"Concatenating protocol: {protocol['said']}."
    for file in ("table.md", "report.html"):
        text = (tmp_path / file).read_text()
        assert note.replace("'", "&#x27;" if file == "report.html" else "'") in text, file
    whole = evaluate(gpt2(), documents=LONG, tokenizer=TOKENIZER, settings=EvalSettings((32,), ("ppl_prefix",))).results
    assert whole["data"]["protocol"] == {"id": "whole_documents", "said": "each is the beginning of one document"}
    assert whole["notes"] == []
    assert json.loads((tmp_path / "results.json").read_text())["data"]["protocol"] == protocol
