"""The walks on the page of hf_posswap/patching: files that are really visited, in that order, and never twice."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import ViTModel

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.testing.tiny import tiny_model

PATCHING = Path(hf_posswap.__file__).parent / "patching"
PAGE = (PATCHING / "README.md").read_text(encoding="utf-8")
SWAPS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "GPT-2 to RoPE": ("gpt2", "rope", {"max_length": 64}),
    "Llama to YaRN": ("llama", "yarn", {"factor": 2.0}),
    "ViT to 2-D RoPE": (ViTModel, "rope_2d", {}),
}


def walk(title: str) -> list[str]:
    """Return the files of the walk called `title`, below the folder of patching, in order."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/.]+)`", section, re.M)


def visited(title: str) -> list[str]:
    """Return the files of patching in the order in which the swap, and a forward after it, first come to them."""
    kind, scheme, options = SWAPS[title]
    model, found = tiny_model(kind, meta=False), dict[str, None]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PATCHING):
            found.setdefault(path.relative_to(PATCHING).as_posix())

    size = getattr(model.config, "image_size", None)
    given = {"pixel_values": torch.zeros(1, 3, size, size)} if size else {"input_ids": torch.zeros(1, 8).long()}
    sys.setprofile(note)
    try:
        patch_model(model, scheme, **options)
        model(**given)
    finally:
        sys.setprofile(None)
    return list(found)


def test_the_page_has_every_walk_and_every_folder() -> None:
    assert re.findall(r"^## (.*)$", PAGE, re.M) == list(SWAPS)
    folders = [path.parent.relative_to(PATCHING).as_posix() for path in sorted(PATCHING.rglob("__init__.py"))]
    assert {f"{folder}/" for folder in folders if folder not in (".", "sites")} == set(
        re.findall(r"^\| `([\w/]+)` \|", PAGE, re.M)
    )


@pytest.mark.parametrize("title", SWAPS)
def test_a_walk_is_the_way_that_the_swap_takes(title: str) -> None:
    rooms = walk(title)
    assert 5 <= len(rooms) <= 10
    order = visited(title)
    assert [room for room in order if room in rooms] == rooms


@pytest.mark.parametrize("title", SWAPS)
def test_no_file_of_a_walk_imports_one_that_was_left(title: str) -> None:
    rooms = walk(title)
    for number, room in enumerate(rooms):
        left = {f"hf_posswap.patching.{one.removesuffix('.py').replace('/', '.')}" for one in rooms[:number]}
        tree = ast.parse((PATCHING / room).read_text(encoding="utf-8"))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported & left == set(), room
