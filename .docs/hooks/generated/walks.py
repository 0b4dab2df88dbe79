"""The rooms of the package, and the folders of patching with walks through them, from the pages next to the code."""

from __future__ import annotations

from repository import ROOT


def rooms() -> str:
    """Return the table of the page of `hf_posswap`, and the sentences before it."""
    _, _, body = (ROOT / "hf_posswap" / "README.md").read_text(encoding="utf-8").partition("how a call works. ")
    return body.strip()


def render() -> str:
    """Return the page of `hf_posswap/patching` without its title, its headings a level down."""
    text = (ROOT / "hf_posswap" / "patching" / "README.md").read_text(encoding="utf-8")
    _, _, body = text.partition("\n")
    return body.replace("\n## ", "\n### ").strip()
