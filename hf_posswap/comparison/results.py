"""results.json: all results and everything that they depend on, with a schema version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_posswap.comparison.csv_files import curves_csv, needle_csv, wide_csv
from hf_posswap.comparison.environment import date_now, environment, same_but_for_the_date
from hf_posswap.comparison.joining import JOINED
from hf_posswap.comparison.tables import latex, markdown
from hf_posswap.comparison.work import Work
from hf_posswap.errors import PosswapError
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.patching.record.training import training_of
from hf_posswap.report import PAGE, write_html
from hf_posswap.report.conclusion import conclude, control_warnings
from hf_posswap.utils.atomic_io import read_json, write_json, write_text

SCHEMA = 2
RESULTS, CURVES, NEEDLES, TABLE = "results.json", "curves.csv", "needle.csv", "table.md"
WIDE, LATEX = "results.csv", "table.tex"


def collect_results(
    works: Sequence[Work],
    base: Work,
    measured: Mapping[str, dict[str, Any]],
    comparisons: Mapping[str, dict[str, Any]],
    sliding: dict[str, Any] | None,
    lengths: Sequence[int],
    command: str | None,
) -> dict[str, Any]:
    """Return the results as JSON data.

    Args:
        works: one per subject, in order.
        base: the work on the baseline.
        measured: the results by subject and metric.
        comparisons: the differences from the baseline by subject, without the baseline itself.
        sliding: the sliding-window control, or None.
        lengths: the requested lengths.
        command: the command line, or None.
    """
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "hf_posswap evaluation",
        "base": base.subject.name,
        "window": base.window,
        "lengths": list(lengths),
        "metrics": list(base.metrics),
        "settings": base.settings.to_dict(),
        "data": base.documents.to_dict() | {"tokenizer": _tokenizer(base.tokenizer)},
        "made": {"command": command, "date": date_now()},
        "environment": environment([work.subject.model.device for work in works]),
        "notes": _notes(base),
        "models": {work.subject.name: _model(work, lengths) | measured[work.subject.name] for work in works},
        "comparisons": dict(comparisons),
        "sliding": sliding,
    }
    for name, model in results["models"].items():
        conclusion = conclude(results, name)
        model["conclusion"] = None if conclusion is None else conclusion.to_dict()
    results["notes"] += control_warnings(results)
    return results


def keep_date(results: dict[str, Any], folder: Path) -> None:
    """Keep the date of the results in `folder` if nothing else differs."""
    try:
        earlier = read_json(folder / RESULTS)
    except PosswapError:  # missing or unreadable: they are overwritten
        return
    if same_but_for_the_date(results, earlier):
        results["made"]["date"] = earlier["made"]["date"]


def write_results(results: dict[str, Any], folder: Path) -> None:
    """Write results.json, the tables (three .csv, .md and .tex) and report.html to `folder`, each atomically.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    write_text(folder / CURVES, curves_csv(results))
    write_text(folder / NEEDLES, needle_csv(results))
    write_text(folder / WIDE, wide_csv(results))
    write_text(folder / TABLE, markdown(results))
    write_text(folder / LATEX, latex(results))
    write_html(results, folder / PAGE)
    write_json(folder / RESULTS, results)


def _model(work: Work, lengths: Sequence[int]) -> dict[str, Any]:
    subject, reach, training = work.subject, work.subject.reach, training_of(work.subject.model.config)
    of_this_swap = training is not None and training.is_of(None if subject.plan is None else subject.plan.record)
    return {
        "class": type(subject.model).__name__,
        "parameters": sum(parameter.numel() for parameter in subject.model.parameters()),
        "identity": subject.identity,
        "plan": None if subject.plan is None else subject.plan.to_dict(),
        "trained": None if training is None else str(training),
        "training": {"recipe": training.recipe, "tokens": training.tokens} if training and of_this_swap else None,
        "one_pass": reach.prefix_consistent,
        "one_pass_because": reach.why,
        "cannot_run": {str(n): f"ends at {reach.limit} tokens" for n in lengths if n not in work.lengths},
    }


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    return {"class": type(tokenizer).__name__, "vocabulary": len(tokenizer), "bos": tokenizer.bos_token_id}


def _notes(work: Work) -> list[str]:
    count, notes = len(work.documents.names), []
    if count < LEAST_DOCUMENTS:
        notes = [f"Only {count} documents: with fewer than {LEAST_DOCUMENTS} there is no verdict and no ranking."]
    if work.documents.protocol == JOINED:
        notes.append(f"Concatenating protocol: {work.documents.said}.")
    return notes
