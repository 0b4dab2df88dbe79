"""Results as tables: CSV for programs, Markdown for a model card."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hf_posswap.utils.naming import markdown_text


def curves_csv(results: dict[str, Any]) -> str:
    """Return perplexity by length, loss by position and context gain of all models, one value a line."""
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
    return _csv(["model", "metric", "from_token", "to_token", "value", "low", "high"], rows)


def needle_csv(results: dict[str, Any]) -> str:
    """Return the needle grids of all models, one cell a line."""
    fields = ["length", "depth", "share", "low", "high", "answer_nll"]
    rows = [
        (name, *(cell[field] for field in fields))
        for name, model in results["models"].items()
        for cell in model.get("passkey", {}).get("cells", [])
    ]
    return _csv(["model", *fields], rows)


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([header, *rows])
    return table.getvalue()


def markdown(results: dict[str, Any]) -> str:
    """Return the main numbers as Markdown: perplexity by length with intervals, needles, verdicts, and what is missing.

    Example:
        >>> row = {"length": 8, "perplexity": 2.0, "low": 1.9, "high": 2.1}
        >>> model = {"ppl_prefix": [row], "cannot_run": {}, "not_measured": {}}
        >>> shown = {"models": {"a": model}, "lengths": [8], "window": 8, "comparisons": {}, "notes": []}
        >>> print(markdown(shown | {"data": {"documents": 9, "source": "texts"}, "base": "a"}).splitlines()[2])
        | model | 8 (1x) |
    """
    lengths, window, models = results["lengths"], results["window"], results["models"]
    columns = [column for column in _COLUMNS if any(column[1] in model for model in models.values())]
    shown = lengths if any(_scores(model) for model in models.values()) else []
    header = ["model", *(_length(n, window) for n in shown), *(title for title, _, _ in columns)]
    on_what = f"{results['data']['documents']} documents ({markdown_text(results['data']['source'])})"
    lines = [f"{'Perplexity by length' if shown else 'Measured'} on {on_what}.", ""]
    lines += [_row(header), _row("---" for _ in header)]
    for name, model in models.items():
        cells = [write(model[metric]) if metric in model else "–" for _, metric, write in columns]
        lines.append(_row([markdown_text(name), *_perplexities(model, shown), *cells]))
    meanings = [f" {_MEANINGS[title]}" for title, _, _ in columns]
    lines += ["", f"Brackets: 95 % intervals over documents.{''.join(meanings)}"]
    lines += ["", *(f"- {markdown_text(text)}" for text in _remarks(results))]
    return "\n".join(lines).rstrip() + "\n"


def _length(tokens: int, window: int) -> str:
    return f"{tokens} ({tokens // window}x)" if window and tokens % window == 0 else str(tokens)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _scores(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Return perplexity by length: of the next token, or of masked ones."""
    return model.get("ppl_prefix") or model.get("mlm_pos", {}).get("lengths", [])


def _perplexities(model: dict[str, Any], lengths: Sequence[int]) -> list[str]:
    scores = {row["length"]: row for row in _scores(model)}
    cells = []
    for length in lengths:
        score = scores.get(length)
        shown = model["cannot_run"].get(str(length), "–")
        cells.append(f"{score['perplexity']:.3g} [{score['low']:.3g}, {score['high']:.3g}]" if score else shown)
    return cells


def _found(passkey: dict[str, Any]) -> str:
    shares = [cell["share"] for cell in passkey["cells"]]
    return f"{sum(shares) / len(shares):.0%}"


def _effective(passkey: dict[str, Any]) -> str:
    return str(passkey["effective_length"]["length"] or "no verdict")


def _short(short: dict[str, Any]) -> str:
    return f"{short['loss']['difference']:+.3f}, {short['loss']['verdict']}"


def _retrieved(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['length']}: {row['accuracy']:.0%}" for row in rows)


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("found", "passkey", _found),
    ("effective length", "passkey", _effective),
    ("within the window", "short_reg", _short),
    ("retrieved", "retrieval", _retrieved),
)
_MEANINGS = {
    "found": "Found: share of passkeys.",
    "effective length": "Effective length: in tokens, by passkeys.",
    "within the window": "Within the window: change of the loss, in nats a token.",
    "retrieved": "Retrieved: share of passkey documents, by length.",
}


def _remarks(results: dict[str, Any]) -> list[str]:
    said = list(results["notes"])
    for name, model in results["models"].items():
        said += [f"{name}: {metric} was not measured: {why}" for metric, why in model["not_measured"].items()]
        effective = model.get("passkey", {}).get("effective_length", {})
        if effective.get("no_verdict"):
            said.append(f"{name}: no effective length: {effective['no_verdict']}")
    for name, found in results["comparisons"].items():
        clear = [r for r in found.get("lengths", []) if r["p_holm"] is not None and r["p_holm"] <= 0.05]
        if clear:
            shown = ", ".join(f"{r['length']}: {r['difference']:+.3f} nats (p {r['p_holm']:.2g})" for r in clear)
            said.append(f"{name} against {results['base']}, differences that are not chance: {shown}")
    return said
