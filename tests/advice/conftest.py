"""Tiny models on disk, of which advice is asked, and texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.engine_runs import write_model, write_texts


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny gpt2, llama and bert, and the folders of texts that commands name."""
    folder = tmp_path_factory.mktemp("advice")
    for kind in ("gpt2", "llama", "bert"):
        write_model(folder / kind, kind)
    write_texts(folder / "books", count=12, words=400)
    write_texts(folder / "other-books", count=10, words=400)
    return folder
