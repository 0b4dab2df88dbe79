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
        str, typer.Argument(metavar="REPO_ID", help="OWNER/NAME on the Hub; created if missing.", show_default=False)
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing: show the files and their sizes.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Commit to this branch instead of main.", show_default=False)
    ] = None,
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="Commit message.", show_default=False)] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="In total. Default: as long as the Hub responds.", show_default=False),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The model before the swap, for the model card.", show_default=False),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For the card. Default: the base model's license.", show_default=False),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="For the card: a folder of eval, compare or a quickstart, or a JSON file of metrics."
        ),
    ] = None,
    card: Annotated[bool, typer.Option(help="Write a model card, unless DIR holds a README.md.")] = True,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Push a saved model to the Hub, in one commit, with a model card.

    It pushes weights, config, tokenizer, and any code that trust_remote_code=True needs, but no trainer state. The card
    shows the recipe and the losses if DIR is in a folder of posswap train, and this model's results if a folder results
    is next to DIR or to that folder; --dry-run shows it. A failed push reports what is on the Hub, and can be repeated.
    Log in first with: hf auth login

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
