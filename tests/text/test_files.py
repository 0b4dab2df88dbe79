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


def test_what_is_hidden_in_a_folder_is_no_document(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "texts"  # a hidden folder around the one that is given hides nothing
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", "more/.git/x/b.md", ".draft.txt", "more/c.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the text of {name}")
    assert files_below(folder) == [folder / "a.txt", folder / "more" / "c.txt"]
    assert files_below(folder / ".draft.txt") == [folder / ".draft.txt"]
    assert files_below(folder / "more" / ".git") == [folder / "more" / ".git" / "x" / "b.md"]
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / ".a.txt").write_text("hidden")
    with pytest.raises(DataError, match=r"no file in or below it ends in .* \(hidden ones and READMEs do not count\)"):
        files_below(tmp_path / "none")


def test_blank_lines_between_rows_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n  \r\n{"text": "two"}\n\n')
    assert [document.text for document in file_documents(path, "text")] == ["one", "two"]
    path.write_text('{"text": "one"}\n\nno row\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 3 is not valid JSON"):
        list(file_documents(path, "text"))


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
