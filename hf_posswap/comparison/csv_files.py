"""Results as CSV: one line per value, or one line per model."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from hf_posswap.report.words import scores_by_length, task_scores


def curves_csv(results: dict[str, Any]) -> str:
    """Return perplexity by length, loss by position and context gain of all models, one line per value."""
    rows: list[Sequence[Any]] = []
    for name, model in results["models"].items():
        rows += [
            (name, "perplexity", 0, r["length"], r["perplexity"], r["low"], r["high"])
            for r in model.get("ppl_prefix", [])
        ]
        rows += [
            (name, "loss", r["start"], r["stop"], r["loss"], r["low"], r["high"]) for r in model.get("nll_pos", [])
        ]
        rows += [
            (name, "context_gain", 0, r["context"], r["gain"], r["low"], r["high"]) for r in model.get("ctx_gain", [])
        ]
    sliding = results["sliding"] or {"name": "", "ppl_prefix": [], "nll_pos": []}
    for r in sliding["ppl_prefix"]:
        rows.append((sliding["name"], "perplexity", 0, r["length"], r["perplexity"], r["low"], r["high"]))
    for r in sliding["nll_pos"]:
        rows.append((sliding["name"], "loss", r["start"], r["stop"], r["loss"], r["low"], r["high"]))
    return _csv(["model", "metric", "from_token", "to_token", "value", "low", "high"], rows)


def needle_csv(results: dict[str, Any]) -> str:
    """Return the needle grids of all models, one line per cell."""
    fields = ["length", "depth", "share", "low", "high", "answer_nll"]
    rows = [
        (name, *(cell[field] for field in fields))
        for name, model in results["models"].items()
        for cell in model.get("passkey", {}).get("cells", [])
    ]
    return _csv(["model", *fields], rows)


def wide_csv(results: dict[str, Any]) -> str:
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


def _wide(results: dict[str, Any], name: str, model: dict[str, Any]) -> dict[str, Any]:
    columns = _lengths(model, results["lengths"])
    if conclusion := model.get("conclusion"):
        columns |= {"conclusion": conclusion["verdict"]}
    if far := model.get("far_context"):
        columns |= {f"far_context_{key}": far[key] for key in ("further", "gain", "low", "high", "verdict")}
    for title, rows in (
        ("sliding", model.get("against_sliding", [])),
        ("base", results["comparisons"].get(name, {}).get("lengths", [])),
    ):
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


def _lengths(model: dict[str, Any], lengths: Sequence[int]) -> dict[str, Any]:
    """Return perplexity and interval at each length; columns are the same for all models."""
    scores = {row["length"]: row for row in scores_by_length(model)}
    fields = (("perplexity", ()), ("low", ("low",)), ("high", ("high",)))
    return {
        "_".join(("perplexity", str(length), *suffix)): scores[length][key] if length in scores else ""
        for length in (lengths if scores else [])
        for key, suffix in fields
    }


_CHANGE = (("difference", ()), ("low", ("low",)), ("high", ("high",)), ("p_holm", ("p",)))


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([header, *rows])
    return table.getvalue()
