"""The whole page: one HTML file that needs no network, from the results of an evaluation."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from hf_posswap.errors import DataError, PosswapError
from hf_posswap.report.document import document
from hf_posswap.report.extras import cost, method, needles, protocols, tasks
from hf_posswap.report.markup import Markup, json_script, tag
from hf_posswap.report.sections import gain, offsets, perplexity, positions, retrieval
from hf_posswap.report.verdicts import findings, overview, short_context
from hf_posswap.report.words import common_gaps
from hf_posswap.utils.atomic_io import write_text

KIND, SCHEMAS = "hf_posswap evaluation", (1, 2)
PAGE = "report.html"
"""The name of the page beside results.json."""
_SECTIONS = (
    findings,
    perplexity,
    overview,
    positions,
    gain,
    needles,
    short_context,
    tasks,
    retrieval,
    offsets,
    protocols,
    cost,
    method,
)


def write_html(results: dict[str, Any], path: Path) -> None:
    """Write the page of `results` to `path`, whole or not at all.

    Args:
        results: what results.json holds.
        path: of the .html file.

    Raises:
        DataError: these are no results of an evaluation, or of a form that this version does not know.
        CheckpointError: the file cannot be written.
    """
    write_text(path, render_html(results))


def render_html(results: dict[str, Any]) -> str:
    """Return the page of `results`: styles, script and data inside, nothing loaded from elsewhere.

    Sections of metrics that were not measured are left out.

    Args:
        results: what results.json holds.

    Raises:
        DataError: as `write_html`, or what they hold cannot be shown: they were edited, or are not whole.

    Example:
        >>> render_html({"kind": "else"})
        Traceback (most recent call last):
        hf_posswap.errors.DataError: a report needs the results.json of posswap eval or compare, got kind 'else'.
    """
    check_results(results)
    try:
        return _page(results)
    except PosswapError:
        raise
    except Exception as error:  # of what anyone may have edited, anything may be missing or of another kind
        raise DataError(
            f"these results cannot be shown ({type(error).__name__}: {str(error)[:200] or 'no more is known'}): they "
            "were edited, or are not whole. Undo that, or make them again."
        ) from error


def _page(results: dict[str, Any]) -> str:
    shown = [made for make in _SECTIONS if (made := make(results)) is not None]
    models, data = results["models"], results["data"]
    title = f"{len(models)} models by length" if len(models) > 1 else f"{results['base']} by length"
    below = (
        f"Held against {results['base']}; original window {results['window']:,} tokens; "
        f"{data['documents']} documents of {data['source']}, up to {max(results['lengths']):,} tokens."
    )
    gaps = [f"{metric} was not measured: {why}" for metric, why in common_gaps(results)]
    notes = [tag("p", note, class_="warning") for note in [*results["notes"], *gaps]]
    return document(
        title,
        tag("header", tag("h1", title), tag("p", below, class_="lead"), *notes),
        tag("main", *shown),
        tag("div", id="tip", role="status", hidden=True),
        json_script(results, "results"),
        tag("script", _asset("page.js")),
    )


def check_results(results: Any) -> None:
    """Check that these are results which a report can be made of.

    Raises:
        DataError: they are not.
    """
    kind = results.get("kind") if isinstance(results, dict) else None
    if kind != KIND:
        raise DataError(f"a report needs the results.json of posswap eval or compare, got kind {kind!r}.")
    if results.get("schema") not in SCHEMAS:
        raise DataError(
            f"these results have schema {results.get('schema')!r}, and this version of hf_posswap reads "
            f"{' and '.join(map(str, SCHEMAS))}: "
            "make them again, or use the version that made them."
        )
    missing = sorted({"base", "window", "lengths", "models", "comparisons", "data", "settings"} - set(results))
    if missing or not results["models"]:
        raise DataError(f"these results are not whole: {', '.join(missing) or 'models'} is missing. Make them again.")


def _asset(name: str) -> Markup:
    return Markup(files("hf_posswap.report").joinpath(name).read_text(encoding="utf-8"))
