"""`posswap show`: pictures of position mechanisms themselves, and of what models pay attention to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.arguments import SCHEME_HELP, Json, TrustRemoteCode, make_scheme, scheme_names, source_of
from hf_posswap.cli.evaluating import Device, Text, placing, requested_text, whole_numbers
from hf_posswap.cli.output import quiet_library, show_json, show_pairs, show_text
from hf_posswap.errors import OptionError
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from hf_posswap.comparison import Candidate
    from hf_posswap.plotting import Drawn

Schemes = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCHEME...", help=SCHEME_HELP, show_default=False, autocompletion=scheme_names),
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder for the pictures.")]
Pictures = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Draw this picture: wavelengths, scores, relative, turning, bias, table, waves, similarity, "
        "similarity-by-distance, token. Repeatable. Default: all of these that apply to the schemes. Or attention, "
        "which runs --model.",
        show_default=False,
    ),
]
OfModel = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Use the shape of this model, and draw its position table next to its replacements. Default: the shape "
        "given by the options below.",
        show_default=False,
    ),
]
Factor = Annotated[float, typer.Option(metavar="X", help="Target length over original length.")]
Dark = Annotated[bool, typer.Option("--dark", help="Draw for a dark page.")]
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


def show(
    schemes: Schemes = None,
    out: Out = Path("posswap-pictures"),
    picture: Pictures = None,
    model: OfModel = None,
    heads: Annotated[int, typer.Option(metavar="N", help="Attention heads.")] = 8,
    dim: Annotated[int, typer.Option(metavar="N", help="Dimensions of a head.")] = 64,
    window: Annotated[int, typer.Option("--window", "--length", metavar="N", help="Original window in tokens.")] = 512,
    factor: Factor = 4.0,
    dark: Dark = False,
    also: AlsoDraw = None,
    layers: Layers = False,
    lengths: Lengths = None,
    text: Text = None,
    documents: Documents = 4,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Draw what position schemes do. No model is needed, and none is run except for the picture attention.

    Wavelengths against the window, scores by distance, the distances that attention sees, pairs rotating in the plane,
    biases, tables and their similarities, one token at three positions. Several schemes share a sheet if they can be
    compared. Each picture is written as PNG and SVG. It needs the extra "plot".

    --picture attention runs --model on texts, unchanged and with each scheme put in, and draws the attention that keys
    get by their distance.

    Example: posswap show rope yarn:factor=4 alibi --out pictures

    Example: posswap show rope alibi --model gpt2 --picture attention --text books/
    """
    chosen, pictures, folder = schemes or [], list(picture or ()), expand_home(out)
    parsed = [make_scheme(scheme) for scheme in chosen]
    draws_attention, other_pictures = ATTENTION in pictures, [name for name in pictures if name != ATTENTION]
    check_attention_options(
        draws_attention, model, {"--also": also, "--layers": layers, "--lengths": lengths, "--text": text}
    )
    documents_source = requested_text(text) if draws_attention else None
    drawn: list[Drawn] = []
    with quiet_library():
        from hf_posswap.plotting import draw_positions

        if other_pictures or not draws_attention:
            shape: dict[str, Any] = {"heads": heads, "dim": dim, "window": window}
            if model is not None:  # it has its own
                from hf_posswap.checkpoints.load import load

                shape = {"model": load(source_of(model), trust_remote_code=trust_remote_code)}
            drawn += draw_positions(parsed, folder, pictures=other_pictures, factor=factor, dark=dark, **shape)
        if draws_attention and model is not None:
            drawn += draw_attention_of(
                model, chosen, also or [], folder, lengths=lengths, documents=documents_source, limit=documents,
                factor=factor, by_layer=layers, dark=dark, device=device, trust_remote_code=trust_remote_code,
            )  # fmt: skip
    if json:
        return show_json(
            [
                {"picture": sheet.name, "file": str(sheet.path), "summary": sheet.summary, "said": list(sheet.said)}
                for sheet in drawn
            ]
        )
    for sheet in drawn:
        show_pairs([(str(sheet.path), sheet.summary)])
        show_text(*(f"  {line}" for line in sheet.said), "")


def check_attention_options(is_requested: bool, model: str | None, options: dict[str, object]) -> None:
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
