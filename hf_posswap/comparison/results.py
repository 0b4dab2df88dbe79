"""results.json: all that was found and all that it depends on, with a version of its form."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_posswap.comparison.tables import curves_csv, markdown, needle_csv
from hf_posswap.comparison.work import Work
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.patching.record.training import training_of
from hf_posswap.report import PAGE, write_html
from hf_posswap.utils.atomic_io import write_json, write_text

SCHEMA = 1
RESULTS, CURVES, NEEDLES, TABLE = "results.json", "curves.csv", "needle.csv", "table.md"


def collect_results(
    works: Sequence[Work],
    measured: Mapping[str, dict[str, Any]],
    against: Mapping[str, dict[str, Any]],
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Return the results as JSON.

    Args:
        works: of all subjects, the base first.
        measured: by subject: by metric.
        against: by subject but the base: how it differs from the base.
        lengths: that were asked for.
    """
    first = works[0]
    return {
        "schema": SCHEMA,
        "kind": "hf_posswap evaluation",
        "base": first.subject.name,
        "window": first.window,
        "lengths": list(lengths),
        "metrics": list(first.metrics),
        "settings": first.settings.to_dict(),
        "data": first.documents.to_dict() | {"tokenizer": _tokenizer(first.tokenizer)},
        "environment": _environment(),
        "notes": _notes(first),
        "models": {work.subject.name: _model(work, lengths) | measured[work.subject.name] for work in works},
        "comparisons": dict(against),
    }


def write_results(results: dict[str, Any], folder: Path) -> None:
    """Write results.json, curves.csv, needle.csv, table.md and report.html to `folder`, each whole or not at all.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    write_text(folder / CURVES, curves_csv(results))
    write_text(folder / NEEDLES, needle_csv(results))
    write_text(folder / TABLE, markdown(results))
    write_html(results, folder / PAGE)
    write_json(folder / RESULTS, results)


def _model(work: Work, lengths: Sequence[int]) -> dict[str, Any]:
    subject, reach = work.subject, work.subject.reach
    return {
        "class": type(subject.model).__name__,
        "parameters": sum(parameter.numel() for parameter in subject.model.parameters()),
        "identity": subject.identity,
        "plan": None if subject.plan is None else subject.plan.to_dict(),
        "trained": None if (training := training_of(subject.model.config)) is None else str(training),
        "one_pass": reach.prefix_consistent,
        "one_pass_because": reach.why,
        "cannot_run": {str(n): f"ends at {reach.limit} tokens" for n in lengths if n not in work.lengths},
    }


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    return {"class": type(tokenizer).__name__, "vocabulary": len(tokenizer), "bos": tokenizer.bos_token_id}


def _environment() -> dict[str, Any]:
    from transformers import __version__ as transformers_version

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }


def _notes(work: Work) -> list[str]:
    count = len(work.documents.names)
    if count >= LEAST_DOCUMENTS:
        return []
    return [f"Only {count} documents: no verdict is given under {LEAST_DOCUMENTS}, and no order should be read."]
