"""Pictures of the schemes, drawn by `hf_posswap.plotting` when the site is built, for light pages and dark ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

import hf_posswap
from hf_posswap.cli.output import quiet_library
from hf_posswap.comparison import Candidate, compare_attention
from hf_posswap.plotting import PICTURES, draw_positions

ATTENTION = "attention"
MODEL = Path(hf_posswap.__file__).parent / "quickstart" / "model"
"""The small GPT-2 of 128 learned positions that comes with the package."""


@dataclass(frozen=True)
class Sheet:
    """One picture.

    Attributes:
        picture: its kind, a name in `hf_posswap.plotting.PICTURES`, or attention.
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
        "table",
        ("sinusoidal",),
        "A position table",
        "What is added to the embeddings, a row a position. Columns on the left change at each position, those on the "
        "right hardly within a text: together they are the digits of a counter.",
    ),
    Sheet(
        "waves",
        ("sinusoidal",),
        "Single dimensions by position",
        "Each column of the table is a wave: fast ones distinguish neighbours, slow ones distinguish parts of a text.",
    ),
    Sheet(
        "similarity",
        ("sinusoidal", "learned:extend=tile", "learned:extend=interpolate"),
        "Similarity of rows",
        "In a sinusoidal table, near positions are similar. A tiled learned table repeats: the bands parallel to the "
        "diagonal are positions that the model cannot distinguish. A stretched one has only the diagonal. Its rows are "
        "random here, as before training; `--model` draws a model's rows.",
    ),
    Sheet(
        "similarity-by-distance",
        ("sinusoidal", "learned:extend=tile", "learned:extend=interpolate"),
        "Similarity by distance",
        "The product of two sinusoidal rows depends only on their distance. The peaks of the tiled table are at "
        "multiples of the window.",
    ),
    Sheet(
        "token",
        ("sinusoidal", "rope"),
        "One token at three places",
        "A table is added, and changes every dimension of the token wherever it stands. A rotation leaves the token at "
        "place 0 as it is and turns its pairs elsewhere: the fast ones at once, the slow ones hardly.",
    ),
    Sheet(
        "turning",
        ("rope", "yarn:factor=4"),
        "Pairs that turn",
        "The fastest pair has been everywhere on the circle after six tokens, the slowest on a hundredth of it in the "
        "whole window. YaRN leaves the fast one and slows the others; it lies beyond the circle, because it makes "
        "queries and keys longer, which sharpens attention.",
    ),
    Sheet(
        "wavelengths",
        ("rope", "linear:factor=4", "ntk:factor=4", "yarn:factor=4"),
        "Wavelengths against the window",
        "Pairs above the lower dashed line never completed a turn in training: beyond the window they meet angles that "
        "are new to the model. `linear` slows all pairs, `ntk` the slow ones more, `yarn` the slow ones alone.",
    ),
    Sheet(
        "scores",
        ("rope", "alibi", "t5", "kerple", "fire", "xpos", "nope"),
        "Attention scores by distance",
        "Alike queries and keys. RoPE oscillates around a slow decay, xPos damps it, ALiBi falls in a line, KERPLE "
        "with the logarithm, NoPE knows no distance. T5's bias, KERPLE and FIRE are learned, and drawn as they begin: "
        "T5's at 0, as NoPE.",
    ),
    Sheet(
        "bias",
        ("alibi", "kerple", "fire", "t5:init_std=1"),
        "Biases by query and key",
        "ALiBi's first head sees a few neighbours, its last one everything. KERPLE and FIRE are drawn as they begin. "
        "T5's buckets, with random numbers in them to be seen: one a distance at first, then wider and wider, and one "
        "for all that is far.",
    ),
    Sheet(
        "relative",
        ("rope", "self_extend", "rerope", "dual_chunk"),
        "The distance that attention sees",
        "Query down, key across. Left of the line RoPE comes to distances that were never trained. Far keys are "
        "grouped (`self_extend`), held at a window (`rerope`), or counted anew in each chunk (`dual_chunk`), so that "
        "none is.",
    ),
    Sheet(
        ATTENTION,
        ("rope", "alibi"),
        "Attention paid",
        "The small GPT-2 that comes with the package reads texts, as it is and with each scheme put in, untrained. "
        "Above the dotted line a key gets more than its equal share. Its learned table ends at the window, so that the "
        "right panel has no line of it; ALiBi puts most attention on near keys.",
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
                _draw(sheet, file.parent, dark=tone == "dark")
            out[f"pictures/{tone}/{file.name}"] = file
    return out


def _draw(sheet: Sheet, folder: Path, *, dark: bool) -> None:
    if sheet.picture != ATTENTION:
        draw_positions(sheet.schemes, folder, pictures=[sheet.picture], dark=dark)
        return
    models = [Candidate(MODEL, name="learned"), *(Candidate(MODEL, scheme, name=scheme) for scheme in sheet.schemes)]
    with quiet_library():
        compare_attention(models, folder, text="python", documents=2, dark=dark)


def render() -> str:
    """Return the sheets with their words, as they come in light and in dark."""
    return "\n\n".join(map(_section, SHEETS))


def _section(sheet: Sheet) -> str:
    shown = PICTURES[sheet.picture].summary if sheet.picture in PICTURES else "attention by distance"
    alt = f"{shown}: {', '.join(sheet.schemes)}"
    files = [f"![{alt}](pictures/{tone}/{sheet.picture}.svg#only-{tone})" for tone in ("light", "dark")]
    model = " --model my-gpt2" if sheet.picture == ATTENTION else ""
    typed = f"`posswap show {' '.join(sheet.schemes)}{model} --picture {sheet.picture}`"
    return f"### {sheet.title}\n\n{sheet.words}\n\n{''.join(files)}\n\nMade by {typed}."
