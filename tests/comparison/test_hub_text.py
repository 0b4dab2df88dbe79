"""A data set is streamed, only as far as it is needed; one that cannot be reached is one clear line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from hf_posswap.comparison import documents as module
from hf_posswap.comparison import read_documents
from hf_posswap.comparison.documents import check_paths, stream_documents
from hf_posswap.errors import DataError, MissingDependencyError
from hf_posswap.text import documents as reading
from hf_posswap.text.documents import HubText, hub_text
from hf_posswap.training import byte_tokenizer

TEXTS = [f"document {number} is long enough" if number % 2 else "short" for number in range(9)]
TOKENIZER = byte_tokenizer()


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a data set with the splits test and train, which datasets finds in the working folder."""
    folder = tmp_path / "org" / "books"
    folder.mkdir(parents=True)
    for split, texts in (("test", TEXTS), ("train", ["of the other split " * 9] * 3)):
        Dataset.from_list([{"text": text, "title": "t"} for text in texts]).to_parquet(folder / f"{split}.parquet")
    monkeypatch.chdir(tmp_path)
    return "org/books"


def stream(source: HubText, length: int = 20, limit: int = 3, column: str = "text") -> list[Any]:
    return stream_documents(source, TOKENIZER, length=length, limit=limit, column=column)


@pytest.mark.parametrize("wrap", [str, Path, lambda name: [Path(name)]])
def test_the_first_long_rows_of_a_split_are_taken(data_set: str, wrap: Any) -> None:
    source = wrap(f"{data_set}:test")
    check_paths(source)
    found = read_documents(source, TOKENIZER, length=20, limit=3)
    assert found.names == tuple(f"org/books:test {number}" for number in (1, 3, 5))
    wanted = [[256, *TEXTS[number].encode()][:20] for number in (1, 3, 5)]
    np.testing.assert_array_equal(found.tokens, wanted)


def test_without_a_split_it_is_the_test_part(data_set: str) -> None:
    assert [document.text for document in stream(HubText(data_set))] == TEXTS[1:6:2]
    (Path(data_set) / "test.parquet").unlink()
    assert stream(HubText(data_set))[0].text.startswith("of the other split")


def test_no_more_rows_are_read_than_are_needed(data_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(source: HubText, splits: tuple[str, ...], streaming: bool) -> Any:
        for number in range(10**9):
            read.append(number)
            yield {"text": TEXTS[number % 9]}

    monkeypatch.setattr(reading, "_rows", counted)
    assert len(stream(HubText(data_set))) == 3
    assert read[-1] == 5
    monkeypatch.setattr(module, "_MOST_ROWS", 50)
    assert len(stream(HubText(data_set), length=99)) < 50  # short ones, to be joined: no more text than is asked for
    with pytest.raises(DataError, match="0 of the first 50 rows of org/books have 9999 tokens, at least 2 are needed"):
        stream(HubText(data_set), length=9999)


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        (HubText("org/absent", "test"), {}, r"the data set org/absent:test cannot be read: .*Give org/name:split of"),
        (HubText("org/books", "dev"), {}, r"the data set org/books:dev cannot be read: Bad split: dev. Avail.*'test'"),
        (HubText("org/books"), {"column": "body"}, r"row 0 of org/books has no text under 'body', it has .*'title'\]"),
        (HubText("org/books"), {"length": 999}, "0 of the first 9 rows of org/books have 999 tokens"),
    ],
)
def test_what_cannot_be_read_is_one_line(data_set: str, source: HubText, more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        stream(source, **more)
    assert "\n" not in str(caught.value)


def test_what_exists_or_ends_like_text_is_a_path(data_set: str, tmp_path: Path) -> None:
    assert hub_text(data_set) is None  # a folder of that name is here
    assert hub_text("org/other") == HubText("org/other")
    for path in ("org/other.txt", "/org/other", "~/other", "./org", "other", "a/b/c", tmp_path / "none"):
        assert hub_text(path) is None


def test_a_missing_package_is_said_before_models_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"datasets is needed here .* 'hf-posswap\[train\]'"):
        check_paths("org/books:test")
