"""The files that are documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_posswap.comparison.documents import read_documents
from hf_posswap.errors import DataError
from hf_posswap.text.documents import file_documents, files_below
from hf_posswap.training import byte_tokenizer
from hf_posswap.utils.untrusted import read_bounded


def test_a_folders_readme_is_no_document_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("README.md", "a.txt", "more/readme.txt", "more/Readme.rst", "more/readme-first.txt", "more/b.md"):
        (tmp_path / name).write_text(f"the text of {name}, long enough to be read")
    assert [path.relative_to(tmp_path).as_posix() for path in files_below(tmp_path)] == [
        "a.txt",
        "more/b.md",
        "more/readme-first.txt",
    ]
    assert files_below(tmp_path / "README.md") == [tmp_path / "README.md"]
    read = read_documents(tmp_path, byte_tokenizer(), length=8, limit=9)
    assert [Path(name).name for name in read.names] == ["a.txt", "b.md", "readme-first.txt"]


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"nope")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read as parquet: "):
        list(file_documents(path, "text"))


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    """Editors on Windows begin UTF-8 files with one; it was a token of the text and broke a first JSON line."""
    (tmp_path / "a.txt").write_text("a text", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "of a row"}\n', encoding="utf-8-sig")
    (tmp_path / "recipe.yaml").write_text("include: base.yaml\n", encoding="utf-8-sig")
    texts = [document.text for name in ("a.txt", "b.jsonl") for document in file_documents(tmp_path / name, "text")]
    assert texts == ["a text", "of a row"]
    assert read_bounded(tmp_path / "recipe.yaml") == "include: base.yaml\n"
