"""The rooms of the patching folder and the walks through them, from the page next to the code."""

from __future__ import annotations

from repository import ROOT


def render() -> str:
    """Return the page of `hf_posswap/patching` without its title, its headings a level down."""
    text = (ROOT / "hf_posswap" / "patching" / "README.md").read_text(encoding="utf-8")
    _, _, body = text.partition("\n")
    return body.replace("\n## ", "\n### ").strip()
