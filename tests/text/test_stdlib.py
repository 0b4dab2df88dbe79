"""The corpus is real text of this Python, split by name alone."""

from __future__ import annotations

import json.decoder
from pathlib import Path

import pytest

from hf_posswap.errors import DataError
from hf_posswap.text.stdlib import Corpus, Document, python_corpus, split


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return python_corpus()


def test_it_holds_the_files_of_this_python(corpus: Corpus) -> None:
    texts = {d.name: d.text for d in (*corpus.train, *corpus.held_out)}
    assert texts["stdlib/json/decoder.py"] == Path(json.decoder.__file__).read_text(encoding="utf-8")
    assert any(name.startswith("topics/") for name in texts)
    assert not any("/test/" in name or "site-packages" in name for name in texts)


def test_the_parts_share_no_text(corpus: Corpus) -> None:
    train, held_out = ({d.text for d in part} for part in (corpus.train, corpus.held_out))
    assert train.isdisjoint(held_out)
    assert len(train) == len(corpus.train)
    assert 0.05 < len(held_out) / (len(train) + len(held_out)) < 0.15


def test_it_is_the_same_every_time(corpus: Corpus) -> None:
    assert python_corpus() == corpus
    assert python_corpus().digest == corpus.digest


def test_one_more_document_moves_no_other() -> None:
    documents = [Document(f"name{i}", f"text {i}") for i in range(200)]
    before, after = split(documents, 0.2), split([*reversed(documents), Document("new", "new")], 0.2)
    for part in ("train", "held_out"):
        assert [d for d in getattr(after, part) if d.name != "new"] == list(getattr(before, part))
    assert before.digest != after.digest


def test_the_same_text_counts_once_under_its_first_name() -> None:
    documents = [
        Document(name, text) for name, text in (("b", "same"), ("a", "same"), *((f"n{i}", str(i)) for i in range(50)))
    ]
    names = {d.name for part in (split(documents, 0.3).train, split(documents, 0.3).held_out) for d in part}
    assert "a" in names
    assert "b" not in names


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(DataError, match=r"only 6 characters .*Use another Python"):
        python_corpus(tmp_path)


@pytest.mark.parametrize(("share", "count"), [(0.0, 9), (1.0, 9), (0.5, 1)])
def test_a_split_without_two_parts_is_refused(share: float, count: int) -> None:
    with pytest.raises(DataError, match="held_out is a share|one part is empty"):
        split([Document(f"n{i}", str(i)) for i in range(count)], share)
