"""`posswap advise`: what to use for a model, a length, a budget and a serving program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.cli.arguments import Json, source_of
from hf_posswap.cli.export import Target
from hf_posswap.cli.output import quiet_library, show_command, show_indented, show_json, show_pairs, show_text
from hf_posswap.errors import OptionError

if TYPE_CHECKING:
    from hf_posswap.advice.advise import Advice
    from hf_posswap.advice.figures import Figure
    from hf_posswap.advice.weighing import Option


def advise(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a config.json, a Hub id, or the name of a class of transformers.",
            show_default=False,
        ),
    ],
    length: Annotated[
        int, typer.Option("--length", metavar="N", help="Tokens that it is to read.", show_default=False)
    ],
    budget: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Tokens that may be trained on: 1e8; without it none.", show_default=False),
    ] = None,
    serve: Annotated[
        Target | None, typer.Option("--serve", help="The program that is to serve it.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Advise what to use so that a model reads a length: a swap, a training, or a sliding window and no swap.

    Every advice is a figure that this project has measured, named with its file; what was not measured is said. The
    commands to go on with can be typed as they stand: books/ and other-books/ are folders of your texts, to train on
    and to measure on. The config alone is read, and no code that a checkpoint brings is run.

    Example: posswap advise my-gpt2 --length 8192 --budget 2e7 --serve vllm
    """
    tokens = _tokens(budget)
    source = model if model[:1].isupper() and model.isidentifier() else source_of(model)
    with quiet_library():
        import hf_posswap

        found = hf_posswap.advise(source, length, budget=tokens, serve=None if serve is None else serve.value)
    return show_json(found.to_dict()) if json else _show(found)


def _tokens(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise OptionError(f"--budget {text}: give a number of tokens, such as 1e8.") from None


def _show(found: Advice) -> None:
    show_pairs(
        [
            ("model", f"{found.model}, {found.parameters / 1e6:,.1f} M parameters"),
            ("length", f"{found.length:,} tokens, {found.windows:.3g} of its windows"),
            ("budget", f"{found.budget:,} tokens" if found.budget else "none"),
            *([("served by", found.serve)] if found.serve else []),
        ]
    )
    show_text("", f"use: {found.use.title}")
    _show_reasons(found.use.reasons)
    said = [("not known", one) for one in (*found.use.unknown, *found.unknown)]
    if found.use.serving is not None:
        said = [("served", str(found.use.serving)), *said]
    if found.use.route:
        said = [("route", found.use.route), *said]
    if said:
        show_text("")
        show_pairs(said)
    if found.use.commands:
        show_text("", "Go on with:", "")
        for command in found.use.commands:
            show_command(command)
    if found.others:
        show_text("", "What else was weighed:")
        for option in found.others:
            _show_other(option)


def _show_reasons(reasons: Sequence[Figure]) -> None:
    """Print figures, those of one model and training together."""
    if reasons:
        show_text("", "Because:")
    findings: dict[str, list[str]] = {}
    for one in reasons:
        findings.setdefault(f"{one.trained}, {one.where} [{one.source}]", []).append(one.finding)
    for measured, found in findings.items():
        show_text("")
        show_indented(measured, 2)
        for finding in found:
            show_indented(f"- {finding}", 4)


def _show_other(option: Option) -> None:
    from hf_posswap.advice.advise import why_not

    show_text("")
    show_indented(option.title, 2)
    for reason in why_not(option):
        show_indented(reason, 4)
