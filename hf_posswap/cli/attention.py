"""`posswap show --picture attention`: what models pay attention to, before and after a swap."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.arguments import make_scheme, source_of
from hf_posswap.cli.evaluating import placing, whole_numbers
from hf_posswap.errors import OptionError
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from hf_posswap.comparison import Candidate
    from hf_posswap.plotting import Drawn

Beside = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODEL",
        help="Attention: draw this one too, such as a copy that was trained after its swap, as often as needed; "
        "NAME=MODEL says what it is called.",
        show_default=False,
    ),
]
Layers = Annotated[bool, typer.Option("--layers", help="Attention: a row a layer, six at most.")]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="N,N",
        help="Attention: tokens to read; without it the model's window and FACTOR times it, up to 8192.",
        show_default=False,
    ),
]
Documents = Annotated[int, typer.Option(metavar="N", help="Attention: most texts to read.")]
ATTENTION = "attention"
_SUMMARY = "the attention that keys get by their distance"


def check_asked(reads: bool, model: str | None, options: dict[str, Any]) -> None:
    """Refuse options of the picture of attention without it, and the picture without a model.

    Args:
        reads: whether the picture was asked for.
        model: that was named, or None.
        options: of that picture alone, with what was given.

    Raises:
        OptionError: one of these.
    """
    if reads and model is None:
        raise OptionError("the picture attention is of a model as it reads: name it by --model.")
    given = [name for name, value in options.items() if value]
    if given and not reads:
        raise OptionError(f"{', '.join(given)}: of the picture of attention alone; ask for it by --picture attention.")


def draw_attention_of(
    model: str, schemes: list[str], beside: list[str], out: Path, *, lengths: str | None, device: str, **how: Any
) -> list[Drawn]:
    """Draw the attention of a model as it is, with each of `schemes` put in, and of others.

    Args:
        model: a folder or Hub id.
        schemes: as they were typed.
        beside: other models, "MODEL" or "NAME=MODEL".
        out: the folder for the picture.
        lengths: tokens to read, "512,2048"; None: by the model.
        device: as it was typed.
        how: as in `hf_posswap.comparison.compare_attention`.
    """
    from hf_posswap.comparison import Candidate, compare_attention
    from hf_posswap.plotting import Drawn

    source = source_of(model)
    candidates = [Candidate(source), *(Candidate(source, make_scheme(one), name=one) for one in schemes)]
    candidates += [_named(one) for one in beside]
    found = compare_attention(
        candidates, out, lengths=whole_numbers(lengths), device=placing(device, None)["device"], **how
    )
    return [Drawn(ATTENTION, found.path, _SUMMARY, found.said)]


def _named(text: str) -> Candidate:
    from hf_posswap.comparison import Candidate

    name, equals, rest = text.partition("=")
    if not equals or expand_home(text).exists() or "/" in name:
        return Candidate(source_of(text))
    return Candidate(source_of(rest), name=name)
