"""The metadata of the model card in a folder: licence, languages, base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_posswap.utils.untrusted import read_bounded

CARD = "README.md"
KEPT = ("license", "license_name", "license_link", "language")
"""What stays true of a model whose positions are swapped."""


def card_data(folder: str | Path) -> dict[str, Any]:
    """Return the metadata of the card in `folder`; {} where there is none that can be read."""
    from huggingface_hub import ModelCard

    path = Path(folder) / CARD
    if not path.is_file():
        return {}
    try:
        text = read_bounded(path)
        if not text.startswith("---"):
            return {}
        return dict(ModelCard(text, ignore_metadata_errors=True).data.to_dict())
    except Exception:  # yaml and the Hub's classes may raise anything
        return {}


def kept_header(folder: str | Path) -> str:
    """Return the head of a card with what is kept of the one in `folder`; "": nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / CARD).write_text("---\\nlicense: mit\\ntags: [a]\\n---\\n# A\\n")
        ...     kept_header(folder)
        '---\\nlicense: mit\\n---\\n\\n'
    """
    data = card_data(folder)
    return header({name: data[name] for name in KEPT if data.get(name)})


def header(data: dict[str, Any]) -> str:
    """Return the head of a card; "" for no data."""
    from huggingface_hub import ModelCardData

    return f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n" if data else ""
