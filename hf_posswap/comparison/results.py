"""results.json: all results and everything that they depend on, with a schema version.

The date, versions and hardware come without paths of the machine. As CSV, results are one line per value, or one line
per model.
"""

from __future__ import annotations

import csv
import io
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import torch

from hf_posswap.comparison.documents import JOINED
from hf_posswap.comparison.report import PAGE, write_html
from hf_posswap.comparison.report.conclusion import conclude, control_warnings
from hf_posswap.comparison.report.results import ModelEntry, Results
from hf_posswap.comparison.report.words import losses_by_position, scores_by_length, task_scores
from hf_posswap.comparison.tables import latex, markdown
from hf_posswap.comparison.work import Work, window_reader
from hf_posswap.errors import PosswapError
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.patching.record.training import training_of
from hf_posswap.utils.atomic_io import read_json, write_json, write_text

_PROCESSORS = Path("/proc/cpuinfo")
_CHANGE = (("difference", ()), ("low", ("low",)), ("high", ("high",)), ("p_holm", ("p",)))
SCHEMA = 2
RESULTS, CURVES, NEEDLES, TABLE = "results.json", "curves.csv", "needle.csv", "table.md"
WIDE, LATEX = "results.csv", "table.tex"


def environment(devices: Sequence[torch.device]) -> dict[str, object]:
    """Return the versions and the hardware behind the results.

    Args:
        devices: the models' devices.

    Example:
        >>> sorted(environment([torch.device("cpu")]))[:3]
        ['cores', 'hf_posswap', 'processor']
    """
    from transformers import __version__ as transformers_version

    package = sys.modules[__name__.partition(".")[0]]
    gpus = sorted({torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"})
    try:
        lines = _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    processors = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "hf_posswap": package.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": next(filter(None, processors), platform.processor() or platform.machine()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    } | ({"gpu": ", ".join(gpus)} if gpus else {})


def date_now() -> str:
    """Return the UTC date and time, taken from SOURCE_DATE_EPOCH if a reproducible build sets it.

    Source: https://reproducible-builds.org/docs/source-date-epoch/
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdigit() else datetime.now(UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def same_but_for_the_date(results: Results, earlier: object) -> bool:
    """Return whether the untrusted `earlier` equals `results` except for the date.

    Example:
        >>> same_but_for_the_date({"made": {"date": "b"}, "x": 1}, {"made": {"date": "a"}, "x": 1})
        True
    """
    if not isinstance(earlier, dict):
        return False
    provenance = earlier.get("made")
    if not isinstance(provenance, dict) or not isinstance(provenance.get("date"), str):
        return False
    return earlier | {"made": provenance | {"date": results["made"]["date"]}} == results


def curves_csv(results: Results) -> str:
    """Return perplexity by length, loss by position and context gain of all models, one line per value."""
    rows = []
    for name, model in results["models"].items():
        rows += [
            (name, "perplexity", 0, r["length"], r["perplexity"], r["low"], r["high"]) for r in scores_by_length(model)
        ]
        rows += [
            (name, "loss", r["start"], r["stop"], r["loss"], r["low"], r["high"]) for r in losses_by_position(model)
        ]
        rows += [
            (name, "context_gain", 0, r["context"], r["gain"], r["low"], r["high"]) for r in model.get("ctx_gain", [])
        ]
    sliding = results["sliding"] or {"name": "", "ppl_prefix": [], "nll_pos": []}
    for r in sliding["ppl_prefix"]:
        rows.append((sliding["name"], "perplexity", 0, r["length"], r["perplexity"], r["low"], r["high"]))
    for part in sliding["nll_pos"]:
        rows.append((sliding["name"], "loss", part["start"], part["stop"], part["loss"], part["low"], part["high"]))
    return _csv(["model", "metric", "from_token", "to_token", "value", "low", "high"], rows)


def needle_csv(results: Results) -> str:
    """Return the needle grids of all models, one line per cell."""
    fields = ["length", "depth", "share", "low", "high", "answer_nll"]
    cells: dict[str, Sequence[Mapping[str, object]]] = {
        name: passkey["cells"] for name, model in results["models"].items() if (passkey := model.get("passkey"))
    }
    rows = [(name, *(cell[field] for field in fields)) for name, grid in cells.items() for cell in grid]
    return _csv(["model", *fields], rows)


def wide_csv(results: Results) -> str:
    """Return the main numbers, one line per model and one column per number; missing numbers are empty.

    The columns are perplexities by length with their 95 % intervals, the gain of far context, differences from the
    sliding window and from the baseline (all in nats per token), and the shares of passkeys and documents found.
    """
    lengths, models = results["lengths"], results["models"]
    rows = [{"model": name} | _wide(results, name, model) for name, model in models.items()]
    if results["sliding"]:
        rows.append({"model": results["sliding"]["name"]} | _lengths(results["sliding"], lengths))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return _csv(columns, [[row.get(column, "") for column in columns] for row in rows])


def _wide(results: Results, name: str, model: ModelEntry) -> dict[str, object]:
    columns = _lengths(model, results["lengths"])
    if conclusion := model.get("conclusion"):
        columns |= {"conclusion": conclusion["verdict"]}
    if far := model.get("far_context"):
        columns |= {f"far_context_{key}": far[key] for key in ("further", "gain", "low", "high", "verdict")}
    compared: dict[str, Sequence[Mapping[str, object]]] = {
        "sliding": model.get("against_sliding", []),
        "base": results["comparisons"].get(name, {}).get("lengths", []),
    }
    for title, rows in compared.items():
        for row in rows:
            prefix = ("against", title, str(row["length"]))
            columns |= {"_".join((*prefix, *suffix)): row[key] for key, suffix in _CHANGE}
    if short := model.get("short_reg"):
        columns |= {"within_window": short["loss"]["difference"], "within_window_verdict": short["loss"]["verdict"]}
    if passkey := model.get("passkey"):
        columns |= {"passkeys_found": sum(cell["share"] for cell in passkey["cells"]) / len(passkey["cells"])}
        columns |= {"effective_length": passkey["effective_length"]["length"]}
    if ruler := model.get("ruler_lite"):
        columns |= {f"tasks_{length}": score for length, score in task_scores(ruler).items()}
    kept = results["comparisons"].get(name, {}).get("ruler_lite", [])
    columns |= {f"tasks_kept_{row['length']}": row["kept"] for row in kept}
    columns |= {f"retrieved_{row['length']}": row["accuracy"] for row in model.get("retrieval", [])}
    return columns | {f"cosine_to_base_{row['length']}": row["cosine"] for row in model.get("vectors", [])}


def _lengths(model: ModelEntry, lengths: Sequence[int]) -> dict[str, object]:
    """Return perplexity and interval at each length; columns are the same for all models."""
    scores: dict[int, Mapping[str, object]] = {row["length"]: row for row in scores_by_length(model)}
    fields = (("perplexity", ()), ("low", ("low",)), ("high", ("high",)))
    return {
        "_".join(("perplexity", str(length), *suffix)): scores[length][key] if length in scores else ""
        for length in (lengths if scores else [])
        for key, suffix in fields
    }


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([header, *rows])
    return table.getvalue()


def collect_results(
    works: Sequence[Work],
    base: Work,
    measured: Mapping[str, dict[str, object]],
    comparisons: Mapping[str, dict[str, object]],
    sliding: dict[str, object] | None,
    lengths: Sequence[int],
    command: str | None,
) -> Results:
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
    count, notes = len(base.documents.names), []
    reader = window_reader([work.subject for work in works], base.subject)
    window = reader.reach.window or base.window
    others = [f"{work.subject.name} {work.subject.reach.window}" for work in works
              if work.subject.reach.window not in (0, window)]  # fmt: skip
    if count < LEAST_DOCUMENTS:
        notes = [f"Only {count} documents: with fewer than {LEAST_DOCUMENTS} there is no verdict and no ranking."]
    if (copies := count - len({*base.documents.digests})) > 0:
        notes.append(
            f"{copies} of {count} documents equal another one as far as they are read: they are not independent, so "
            "intervals are too narrow and verdicts too sure. Leave out copies, and a beginning that all share."
        )
    if others:
        notes.append(f"Windows differ ({', '.join(others)}): here they are those of {reader.name}, {window} tokens.")
    if base.documents.protocol == JOINED:
        notes.append(f"Concatenating protocol: {base.documents.said}.")
    tokenizer = base.tokenizer
    tokenizer_entry = {"class": type(tokenizer).__name__, "vocabulary": len(tokenizer), "bos": tokenizer.bos_token_id}
    values: dict[str, object] = {
        "schema": SCHEMA,
        "kind": "hf_posswap evaluation",
        "base": base.subject.name,
        "window": window,
        "lengths": list(lengths),
        "metrics": list(base.metrics),
        "settings": base.settings.to_dict(),
        "data": base.documents.to_dict() | {"tokenizer": tokenizer_entry},
        "made": {"command": command, "date": date_now()},
        "environment": environment([work.subject.model.device for work in works]),
        "notes": notes,
        "models": {work.subject.name: _model(work, lengths) | measured[work.subject.name] for work in works},
        "comparisons": dict(comparisons),
        "sliding": sliding,
    }
    results = cast("Results", values)
    for name, model in results["models"].items():
        conclusion = conclude(results, name)
        model["conclusion"] = None if conclusion is None else conclusion.to_dict()
    results["notes"] += control_warnings(results)
    return results


def keep_date(results: Results, folder: Path) -> None:
    """Keep the date of the results in `folder` if nothing else differs."""
    try:
        earlier = read_json(folder / RESULTS)
    except PosswapError:  # missing or unreadable: they are overwritten
        return
    if same_but_for_the_date(results, earlier):
        results["made"]["date"] = earlier["made"]["date"]


def write_results(results: Results, folder: Path) -> None:
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


def _model(work: Work, lengths: Sequence[int]) -> dict[str, object]:
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
