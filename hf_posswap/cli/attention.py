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

AlsoDraw = Annotated[
    list[str] | None,
    typer.Option(
        "--also",
        "--beside",
        metavar="MODEL",
        help="Attention: also draw this model, such as a copy that was trained after its swap. Repeatable. NAME=MODEL "
        "sets its label.",
        show_default=False,
    ),
]
Layers = Annotated[bool, typer.Option("--layers", help="Attention: one row per layer, at most six.")]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="N,N",
        help="Attention: tokens to read. Default: the model's window and FACTOR times it, up to 8192.",
        show_default=False,
    ),
]
Documents = Annotated[int, typer.Option(metavar="N", help="Attention: most texts to read.")]
ATTENTION = "attention"
_SUMMARY = "the attention that keys get by their distance"


def check_attention_options(is_requested: bool, model: str | None, options: dict[str, Any]) -> None:
    """Refuse options of the attention picture without that picture, and the picture without a model.

    Args:
        is_requested: whether the attention picture is requested.
        model: the value of --model, or None.
        options: option names that only this picture takes, with their values.

    Raises:
        OptionError: --model is missing, or one of `options` is given without the picture.
    """
    if is_requested and model is None:
        raise OptionError("the picture attention needs a model to run: give --model.")
    given = [name for name, value in options.items() if value]
    if given and not is_requested:
        raise OptionError(f"{', '.join(given)}: only for the attention picture; add --picture attention.")


def draw_attention_of(
    model: str, schemes: list[str], others: list[str], out: Path, *, lengths: str | None, device: str, **how: Any
) -> list[Drawn]:
    """Draw the attention of a model unchanged, with each of `schemes` put in, and of other models.

    Args:
        model: a folder or Hub id.
        schemes: as typed on the command line.
        others: further models, "MODEL" or "NAME=MODEL".
        out: the folder for the picture.
        lengths: tokens to read, "512,2048"; None: by the model.
        device: as typed on the command line.
        how: further arguments of `hf_posswap.comparison.compare_attention`.
    """
    from hf_posswap.comparison import Candidate, compare_attention
    from hf_posswap.plotting import Drawn

    source = source_of(model)
    candidates = [Candidate(source), *(Candidate(source, make_scheme(text), name=text) for text in schemes)]
    candidates += [_candidate_of(text) for text in others]
    picture = compare_attention(
        candidates, out, lengths=whole_numbers(lengths), device=placing(device, None)["device"], **how
    )
    return [Drawn(ATTENTION, picture.path, _SUMMARY, picture.said)]


def _candidate_of(text: str) -> Candidate:
    from hf_posswap.comparison import Candidate

    name, equals, rest = text.partition("=")
    if not equals or expand_home(text).exists() or "/" in name:
        return Candidate(source_of(text))
    return Candidate(source_of(rest), name=name)
