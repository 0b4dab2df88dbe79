"""`posswap report`: rebuilds the HTML page of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.cli.output import show_text
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from hf_posswap.comparison.report.results import HarnessTable, Results


def report(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="The folder that posswap eval or compare wrote, or its results.json.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="The page. Default: report.html in the folder.", show_default=False
        ),
    ] = None,
    lm_eval: Annotated[
        list[str] | None,
        typer.Option(
            "--lm-eval",
            metavar="NAME=FILE",
            help="Scores of a model of the page: the --out file of posswap lm-eval. Once for each model.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Rebuild the HTML page of an evaluation from its results.json.

    posswap eval and compare write the page themselves; use this for results that were moved or changed. The page is one
    file and needs no network.

    Example: posswap report results

    Example: posswap report results --lm-eval llama=base.json --lm-eval rope=rope.json
    """
    from hf_posswap.comparison.report import PAGE, check_results, write_html
    from hf_posswap.errors import CheckpointError, OptionError
    from hf_posswap.utils.atomic_io import read_json

    source = expand_home(results)
    source = source / "results.json" if source.is_dir() else source
    if not source.is_file():
        raise CheckpointError(
            f"{source} does not exist; give the folder that posswap eval or compare wrote with --out."
        )
    page = source.with_name(PAGE) if out is None else expand_home(out)
    if page.is_dir() or page == source:
        raise OptionError(f"--out {page}: expected a file for the page, such as {PAGE}.")
    content = read_json(source)
    if lm_eval:
        check_results(content)
        content["lm_eval"] = _tables(lm_eval, content)
    write_html(content, page)
    show_text(f"The page is {page}.")


def _tables(texts: list[str], results: Results) -> dict[str, HarnessTable]:
    """Return the table of the harness for each model, with what is kept of the base's scores if the base has some."""
    from hf_posswap.errors import CheckpointError, OptionError
    from hf_posswap.harness import retention
    from hf_posswap.utils.atomic_io import read_json

    outputs = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or name not in results["models"]:
            known = ", ".join(results["models"])
            raise OptionError(f"--lm-eval {text}: expected NAME=FILE with the name of a model of the page: {known}.")
        path = expand_home(file)
        if not path.is_file():
            raise CheckpointError(
                f"--lm-eval {text}: {path} does not exist; give what posswap lm-eval wrote with --out."
            )
        outputs[name] = read_json(path)
    base = outputs.get(results["base"])
    return {
        name: retention(output, output if base is None else base) | {"kept": base is not None and output is not base}
        for name, output in outputs.items()
    }
