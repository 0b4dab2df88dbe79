"""Pictures of the schemes, drawn by `hf_posswap.plotting` when the site is built, for light pages and dark ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

from hf_posswap.plotting import PICTURES, draw_positions


@dataclass(frozen=True)
class Sheet:
    """One picture.

    Attributes:
        picture: its kind, a name in `hf_posswap.plotting.PICTURES`.
        schemes: that are drawn in it.
        title: above it.
        words: what to look for.
    """

    picture: str
    schemes: tuple[str, ...]
    title: str
    words: str


SHEETS = (
    Sheet(
        "wavelengths",
        ("rope", "linear:factor=4", "ntk:factor=4", "yarn:factor=4"),
        "Wavelengths against the window",
        "Pairs above the lower dashed line never completed a turn in training: beyond the window they meet angles that "
        "are new to the model. `linear` slows all pairs, `ntk` the slow ones more, `yarn` the slow ones alone.",
    ),
    Sheet(
        "scores",
        ("rope", "alibi", "xpos", "nope"),
        "Attention scores by distance",
        "Alike queries and keys. RoPE oscillates around a slow decay, ALiBi falls in a line, NoPE knows no distance.",
    ),
    Sheet(
        "relative",
        ("self_extend", "rerope", "dual_chunk"),
        "The distance that attention sees",
        "Query down, key across. Far keys are grouped (`self_extend`), held at a window (`rerope`), or counted anew in "
        "each chunk (`dual_chunk`), so that no distance is beyond those of training.",
    ),
    Sheet(
        "similarity-by-distance",
        ("sinusoidal",),
        "Likeness of a sinusoidal table's rows",
        "The product of two rows depends on their distance alone, and near rows are alike.",
    ),
)  # fmt: skip


def drawn(folder: Path) -> dict[str, Path]:
    """Draw all sheets below `folder`; return the place of each in the site, and its file.

    What was drawn since the last change of the code stays.
    """
    code = max(path.stat().st_mtime for path in [*(ROOT / "hf_posswap").rglob("*.py"), Path(__file__)])
    out = {}
    for sheet in SHEETS:
        for tone in ("light", "dark"):
            file = folder / tone / f"{sheet.picture}.svg"
            if not file.exists() or file.stat().st_mtime < code:
                draw_positions(sheet.schemes, file.parent, pictures=[sheet.picture], dark=tone == "dark")
            out[f"pictures/{tone}/{file.name}"] = file
    return out


def render() -> str:
    """Return the sheets with their words, as they come in light and in dark."""
    parts = []
    for sheet in SHEETS:
        alt = f"{PICTURES[sheet.picture].summary}: {', '.join(sheet.schemes)}"
        files = [f"![{alt}](pictures/{tone}/{sheet.picture}.svg#only-{tone})" for tone in ("light", "dark")]
        typed = f"`posswap show {' '.join(sheet.schemes)} --picture {sheet.picture}`"
        parts.append(f"### {sheet.title}\n\n{sheet.words}\n\n{''.join(files)}\n\nMade by {typed}.")
    return "\n\n".join(parts)
