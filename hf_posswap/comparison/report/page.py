"""The whole page: one HTML file from the results of an evaluation, without external resources."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from hf_posswap.comparison.report.looks import document
from hf_posswap.comparison.report.markup import Markup, json_script, tag
from hf_posswap.comparison.report.results import Results
from hf_posswap.comparison.report.sections import (
    cost,
    difference,
    gain,
    harness,
    method,
    needles,
    offsets,
    perplexity,
    positions,
    protocols,
    retrieval,
    tasks,
)
from hf_posswap.comparison.report.verdicts import findings, overview, short_context
from hf_posswap.comparison.report.words import common_gaps
from hf_posswap.errors import DataError, PosswapError
from hf_posswap.utils.atomic_io import write_text

KIND, SCHEMAS = "hf_posswap evaluation", (1, 2)
PAGE = "report.html"
"""The file name of the page, next to results.json."""
_SECTIONS = (
    findings,
    difference,
    perplexity,
    overview,
    positions,
    gain,
    needles,
    short_context,
    tasks,
    harness,
    retrieval,
    offsets,
    protocols,
    cost,
    method,
)


def write_html(results: Results, path: Path) -> None:
    """Write the page of `results` to `path` atomically.

    Args:
        results: what results.json holds.
        path: the .html file.

    Raises:
        DataError: these are not results of an evaluation, or have a schema that this version does not support.
        CheckpointError: the file cannot be written.
    """
    write_text(path, render_html(results))


def render_html(results: Results) -> str:
    """Return the page of `results` with inline styles, script and data.

    Metrics that were not measured have no section.

    Args:
        results: what results.json holds.

    Raises:
        DataError: as `write_html`, or the results cannot be shown because they were edited or are incomplete.

    Example:
        >>> render_html({"kind": "else"})
        Traceback (most recent call last):
        hf_posswap.errors.DataError: a report needs the results.json of posswap eval or compare, got kind 'else'.
    """
    check_results(results)
    try:
        shown = [section for make in _SECTIONS if (section := make(results)) is not None]
        models, data = results["models"], results["data"]
        title = f"{len(models)} models by length" if len(models) > 1 else f"{results['base']} by length"
        lead = (
            f"Baseline: {results['base']}; original window {results['window']:,} tokens; "
            f"{data['documents']} documents of {data['source']}, up to {max(results['lengths']):,} tokens."
        )
        gaps = [f"{metric} was not measured: {why}" for metric, why in common_gaps(results)]
        notes = [tag("p", note, class_="warning") for note in [*results["notes"], *gaps]]
        script = files("hf_posswap.comparison.report").joinpath("page.js").read_text(encoding="utf-8")
        return document(
            title,
            tag("header", tag("h1", title), tag("p", lead, class_="lead"), *notes),
            tag("main", *shown),
            tag("div", id="tip", role="status", hidden=True),
            json_script(results, "results"),
            tag("script", Markup(script)),
        )
    except PosswapError:
        raise
    except Exception as error:  # in edited results, anything may be missing or have another type
        raise DataError(
            f"these results cannot be shown ({type(error).__name__}: {str(error)[:200] or 'no details'}): they were "
            "edited or are incomplete. Restore them, or run the evaluation again."
        ) from error


def check_results(results: object) -> None:
    """Check that a report can be made from these results.

    Raises:
        DataError: the kind or schema is wrong, or entries are missing.
    """
    file_kind = results.get("kind") if isinstance(results, dict) else None
    if not isinstance(results, dict) or file_kind != KIND:
        raise DataError(f"a report needs the results.json of posswap eval or compare, got kind {file_kind!r}.")
    if results.get("schema") not in SCHEMAS:
        raise DataError(
            f"these results have schema {results.get('schema')!r}, and this version of hf_posswap reads "
            f"{' and '.join(map(str, SCHEMAS))}: "
            "run the evaluation again, or use the version that wrote them."
        )
    missing = sorted({"base", "window", "lengths", "models", "comparisons", "data", "settings"} - set(results))
    if missing or not results["models"]:
        raise DataError(
            f"these results are incomplete: {', '.join(missing) or 'models'} is missing. Run the evaluation again."
        )
