"""Short texts joined to documents: whole texts, in their order, each once."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from recipes.studies import joined
from tests.training.engine_runs import write_texts


@given(st.lists(st.text("ab", max_size=6)), st.integers(1, 15))
def test_documents_are_whole_texts_in_order_and_none_could_end_before(texts: list[str], least: int) -> None:
    documents = list(joined.joined(texts, least, "|"))
    held = "|".join(documents)
    assert "|".join(texts).startswith(held)
    for document in documents:
        assert len(document) >= least
        assert len(document.rpartition("|")[0]) < least
    rest = texts[sum(document.count("|") + 1 for document in documents) :]
    assert len("|".join(rest)) < least or not rest


def test_the_first_third_is_to_measure_on(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", count=9, words=40)
    words = [str(tmp_path / "texts"), "--out", str(tmp_path / "out"), "--characters", "150", "--between", "<s>"]
    found = CliRunner().invoke(joined.app, words)
    assert found.exit_code == 0, found.output
    parts = {
        name: [json.loads(line)["text"] for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("valid", "train")
    }
    texts = [(tmp_path / "texts" / f"{number}.txt").read_text() for number in range(9)]
    assert parts["valid"] + parts["train"] == texts
    assert len(parts["valid"]) == 3


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", count=2, words=40)
    words = [str(tmp_path / "texts"), "--out", str(tmp_path / "out"), "--characters", "99999"]
    found = CliRunner().invoke(joined.app, words)
    assert found.exit_code != 0
    assert "gives 0 documents of 99999 characters" in " ".join(found.output.split())
    assert not (tmp_path / "out").exists()
