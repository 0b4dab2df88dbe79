"""`posswap push`: a saved checkpoint to the Hub, in one commit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.cli.arguments import Json, TrustRemoteCode
from hf_posswap.cli.output import quiet_library, show_json, show_lines, show_text


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with a saved model.", show_default=False)],
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="OWNER/NAME on the Hub; made if missing.", show_default=False)
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing: show the files and their sizes.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Commit to this branch instead of main.", show_default=False)
    ] = None,
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="Of the commit.", show_default=False)] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="For all of it; else as long as the Hub answers.", show_default=False),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The model before the swap, for the model card.", show_default=False),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For the card; else the base model's own.", show_default=False),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Folder of eval, compare or a quickstart, or a JSON of metrics: goes on the card."
        ),
    ] = None,
    card: Annotated[bool, typer.Option(help="Write a model card, unless DIR holds a README.md.")] = True,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Push a saved model to the Hub, in one commit, with a model card.

    Weights, config, tokenizer, and the code that trust_remote_code=True needs, if the model has any. A trainer's state
    stays behind. The card has the recipe and the losses of posswap train's folder around DIR, and the results of this
    model in the folder results beside DIR or that folder; --dry-run shows it. A push that fails says what is there, and
    can be repeated. Log in first with: hf auth login

    Example: posswap push gpt2-rope me/gpt2-rope --base-model openai-community/gpt2 --dry-run
    """
    with quiet_library():
        import hf_posswap

        report = hf_posswap.push(
            folder,
            repo_id,
            dry_run=dry_run,
            private=private,
            revision=revision,
            message=message,
            timeout=timeout,
            base_model=base_model,
            license=license,
            results=results,
            card=card,
            trust_remote_code=trust_remote_code,
        )
    if json:
        show_json(report.to_dict())
    else:
        show_text(*str(replace(report, card=None)).splitlines())
        if dry_run and report.card is not None:
            show_text("", "README.md would be:", "")
            show_lines(report.card.rstrip())
