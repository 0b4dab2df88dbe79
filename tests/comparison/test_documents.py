"""Documents from every kind of source are the same tokens; a source that cannot be read is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from hf_posswap.comparison import read_documents
from hf_posswap.comparison.documents import check_paths
from hf_posswap.errors import DataError
from hf_posswap.training import byte_tokenizer

TEXTS = [f"document {number} is long enough" for number in range(4)]
TOKENIZER = byte_tokenizer()


def read(source: Any, **more: Any) -> np.ndarray:
    return read_documents(source, TOKENIZER, length=20, limit=9, **more).tokens


def test_every_kind_of_source_gives_the_same_tokens(tmp_path: Path) -> None:
    wanted = np.array([[256, *text.encode()][:20] for text in TEXTS])
    rows = [{"text": text} for text in TEXTS]
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "folder" / f"{number}.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    renamed = [{"body": text} for text in TEXTS]
    for source in (TEXTS, iter(TEXTS), rows, Dataset.from_list(rows), tmp_path / "folder", str(tmp_path / "a.jsonl"),
                   tmp_path / "a.parquet", sorted((tmp_path / "folder").iterdir())):  # fmt: skip
        np.testing.assert_array_equal(read(source), wanted)
    np.testing.assert_array_equal(read(renamed, column="body"), wanted)


def test_the_default_is_this_pythons_own_text() -> None:
    found = read_documents(None, TOKENIZER, length=4000, limit=5)
    assert found.tokens.shape == (5, 4000)
    assert all(name.startswith(("stdlib/", "topics/")) for name in found.names)
    assert len(set(found.digests)) == 5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "none.txt does not exist; give text files"),
        ("a.txt", "", "a.txt is empty: there is no document in it"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.jsonl", "{no json}\n", "a.jsonl, line 1 is not valid JSON"),
        ("a.jsonl", '{"body": 1}\n', r"a.jsonl 0 has no text under 'text', it has columns \['body'\]"),
        ("a.jsonl", '{"text": "half of one: \\ud83d"}\n', r"a.jsonl 0 has half a surrogate pair, '\\ud83d'"),
        ("a.bin", "x", "a.bin is of an unknown kind; known: .txt"),
        ("a.txt", "short", "0 of 1 held-out documents have 20 tokens, at least 2 are .* give more or longer documents"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"a.txt cannot be read as UTF-8 text"):
        read(tmp_path / "a.txt")


def test_missing_paths_are_found_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no document: no file in or below it ends in .txt"):
        check_paths(tmp_path)
    (tmp_path / "a.txt").write_text("a text")
    for source in (tmp_path / "none", str(tmp_path / "none"), [tmp_path, tmp_path / "none"]):
        with pytest.raises(DataError, match="none does not exist"):
            check_paths(source)
    for source in (None, TEXTS, tmp_path, iter(TEXTS)):
        check_paths(source)


def test_names_of_files_and_of_splits_are_not_taken_for_texts(tmp_path: Path) -> None:
    """As of glob.glob and of a DatasetDict: joined to documents, they were measured on."""
    names = [str(tmp_path / f"{number}.txt") for number in range(4)]
    for name, text in zip(names, TEXTS, strict=True):
        Path(name).write_text(text)
    split = Dataset.from_dict({"text": TEXTS})
    for source, message in (
        (names, r"the text is 4 strings that name files, from '.*0.txt' on, and strings .*: give Path\(...\) of each"),
        (DatasetDict(train=split, test=split), "the text is a DatasetDict of 'train', 'test': give what is under one"),
        ({"text": TEXTS}, "the text is a dict of 'text': give what is under one of these names"),
    ):
        for refusing in (check_paths, read):
            with pytest.raises(DataError, match=message):
                refusing(source)
    np.testing.assert_array_equal(read([*map(Path, names)]), read(TEXTS))


def test_results_name_no_folder_above_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home-of-a-user"
    for name in ("books/deep/a.txt", "books/b.txt", "c.txt"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(TEXTS[0])
    (home / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def named(source: Any) -> dict[str, Any]:
        said = read_documents(source, TOKENIZER, length=20, limit=9).to_dict()
        assert str(tmp_path) not in json.dumps(said)
        assert home.name not in json.dumps(said)
        return {"source": said["source"], "names": said["names"]}

    below = ["books/b.txt", "books/deep/a.txt"]
    assert named(home / "books") == {"source": "books", "names": below}
    assert named([home / "books", home / "c.txt"]) == {"source": "books, c.txt", "names": [*below, "c.txt"]}
    assert named(str(home / "rows.jsonl")) == {"source": "rows.jsonl", "names": [f"rows.jsonl {n}" for n in range(4)]}
    monkeypatch.setenv("HOME", str(home))
    assert named("~/books") == {"source": "books", "names": below}
    monkeypatch.chdir(home)
    assert named("books") == {"source": "books", "names": below}
    monkeypatch.chdir(home / "books")
    assert named(".") == {"source": ".", "names": below}


def test_a_stream_is_read_no_further_than_needed() -> None:
    taken = 0

    def stream() -> Iterator[dict[str, str]]:
        nonlocal taken
        while True:
            text = TEXTS[taken % len(TEXTS)] if taken % 3 else "short"
            taken += 1
            yield {"text": text}

    endless = IterableDataset.from_generator(stream)
    found = read_documents(endless, TOKENIZER, length=20, limit=3)
    assert found.names == ("text 1", "text 2", "text 4")
    assert found.source == "the first 5 texts"
    assert taken == 5
    rows = [*islice(stream(), 9)]
    for source in (rows, Dataset.from_list(rows), iter(rows)):
        same = read_documents(source, TOKENIZER, length=20, limit=3)
        np.testing.assert_array_equal(same.tokens, read_documents(iter(rows), TOKENIZER, length=20, limit=3).tokens)
    assert read_documents(rows, TOKENIZER, length=20, limit=3).source == "9 texts"
    with pytest.raises(DataError, match="0 of 100000 held-out documents have 20 tokens"):
        read_documents(repeat(""), TOKENIZER, length=20, limit=3, begin=False)
