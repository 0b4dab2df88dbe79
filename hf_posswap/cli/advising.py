"""`posswap advise`: what to use for a model, a length, a budget and a serving program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.cli.arguments import GGUFFile, Json, source_of
from hf_posswap.cli.output import quiet_library, show_command, show_indented, show_json, show_pairs, show_text
from hf_posswap.cli.shipping import Target
from hf_posswap.errors import OptionError

if TYPE_CHECKING:
    from hf_posswap.inspection.advice.advise import Advice
    from hf_posswap.inspection.advice.figures import Figure, Literature


def advise(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a config.json, a GGUF file, a Hub id, or the name of a class of transformers.",
            show_default=False,
        ),
    ],
    max_length: Annotated[
        int,
        typer.Option(
            "--max-length", "--length", metavar="N", help="Tokens that the model should read.", show_default=False
        ),
    ],
    budget: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Training tokens, such as 1e8. Default: none.", show_default=False),
    ] = None,
    target: Annotated[
        Target | None,
        typer.Option("--target", "--serve", help="The program that will serve the model.", show_default=False),
    ] = None,
    gguf_file: GGUFFile = None,
    json: Json = False,
) -> None:
    """Advise how to make a model read a given length: a swap, a training, or a sliding window without a swap.

    Each recommendation cites its measurement and flags what was not measured. The commands can be copied as printed:
    books/ and other-books/ are folders of your texts, to train on and to measure on. Only the config is read, and no
    code from the checkpoint is run.

    Example: posswap advise my-gpt2 --max-length 8192 --budget 2e7 --target vllm
    """
    try:
        tokens = None if budget is None else float(budget.replace(",", "").replace("_", ""))
    except ValueError:
        raise OptionError(f"--budget {budget}: give a number of tokens, such as 1e8.") from None
    source = model if model[:1].isupper() and model.isidentifier() else source_of(model, gguf_file)
    with quiet_library():
        import hf_posswap

        advice = hf_posswap.advise(source, max_length, budget=tokens, target=None if target is None else target.value)
    return show_json(advice.to_dict()) if json else _show(advice)


def _show(advice: Advice) -> None:
    show_pairs(
        [
            ("model", f"{advice.model}, {advice.parameters / 1e6:,.1f} M parameters"),
            ("length", f"{advice.length:,} tokens, {advice.windows:.3g} of its windows"),
            ("budget", f"{advice.budget:,} tokens" if advice.budget else "none"),
            *([("served by", advice.serve)] if advice.serve else []),
            *([("caution", advice.caution)] if advice.caution else []),
        ]
    )
    show_text("", f"use: {advice.use.title}")
    _show_reasons(advice.use.literature, advice.use.reasons)
    rows = [("not known", note) for note in (*advice.use.unknown, *advice.unknown)]
    if advice.use.serving is not None:
        rows = [("served", str(advice.use.serving)), *rows]
    if advice.by_config:
        rows = [("no copy", advice.by_config), *rows]
    if advice.use.route:
        rows = [("route", advice.use.route), *rows]
    if advice.baseline:
        rows = [("to beat", advice.baseline), *rows]
    if rows:
        show_text("")
        show_pairs(rows)
    if advice.use.commands:
        show_text("", "Next commands:", "")
        for command in advice.use.commands:
            show_command(command)
    _show_alternatives(advice)


def _show_alternatives(advice: Advice) -> None:
    from hf_posswap.inspection.advice.advise import why_not

    if advice.others:
        show_text("", "Alternatives:")
        for option in advice.others:
            show_text("")
            show_indented(option.title, 2)
            for reason in why_not(option):
                show_indented(reason, 4)
    if advice.further:
        show_text("", "Other published methods:")
        for row in advice.further:
            show_text("")
            show_indented(f"{row} [{row.source}]", 2)


def _show_reasons(literature: Sequence[Literature], reasons: Sequence[Figure]) -> None:
    """Print the published results, and the figures grouped by model and training."""
    if literature or reasons:
        show_text("", "Because:")
    for row in literature:
        show_text("")
        show_indented(f"{row} [{row.source}]", 2)
    findings: dict[str, list[str]] = {}
    for figure in reasons:
        findings.setdefault(f"{figure.trained}, {figure.where} [{figure.source}]", []).append(figure.finding)
    for setup, group in findings.items():
        show_text("")
        show_indented(setup, 2)
        for finding in group:
            show_indented(f"- {finding}", 4)
