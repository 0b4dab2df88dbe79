"""Results as tables: Markdown for terminals and model cards, LaTeX for papers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posswap.comparison.report.conclusion import SIGNIFICANT, conclude, inside_statement, percent
from hf_posswap.comparison.report.looks import model_numbers
from hf_posswap.comparison.report.results import DifferenceRow, ModelEntry, Results
from hf_posswap.comparison.report.words import (
    TASKS_KEPT,
    common_gaps,
    far_change,
    far_statement,
    kept_text,
    own_gaps,
    scores_by_length,
    share_found,
    task_scores,
    with_tasks_kept,
)
from hf_posswap.plotting.styles import SLIDING, sign_of
from hf_posswap.utils import html_tables
from hf_posswap.utils.format import interval_text, markdown_text
from hf_posswap.utils.printable import printable, printable_lines


@dataclass(frozen=True)
class Grid:
    """The main numbers as text.

    Attributes:
        header: column titles after the model column.
        rows: number, name and cells of each model; the sliding window comes last.
        meanings: one sentence per column that explains it.
    """

    header: list[str]
    rows: list[tuple[int, str, list[str]]]
    meanings: list[str]


def grid_of(results: Results) -> Grid:
    """Return the main numbers: perplexity by length with intervals, far context, needles, verdicts."""
    models = with_tasks_kept(results)
    columns = [column for column in _COLUMNS if any(model.get(column[1]) is not None for model in models.values())]
    shown = results["lengths"] if any(map(scores_by_length, results["models"].values())) else []
    rows, numbers = [], model_numbers(results)
    for name, model in models.items():
        cells = ["–" if model.get(metric) is None else write(model[metric]) for _, metric, write in columns]
        rows.append((numbers[name], name, [*_perplexities(results["models"][name], shown), *cells]))
    if sliding := results.get("sliding"):
        cells = _perplexities(sliding | {"cannot_run": {}}, shown)
        rows.append((SLIDING, sliding["name"], cells + ["–"] * len(columns)))
    window = results["window"]
    titles = [f"{length} ({length // window}x)" if window and length % window == 0 else str(length) for length in shown]
    header = [*titles, *(title for title, _, _ in columns)]
    meanings = ["Brackets: 95 % intervals over documents.", *(_MEANINGS[title] for title, _, _ in columns)]
    if any(title in _DIFFERENCES for title, _, _ in columns):
        meanings.append("Differences are in nats per token; negative is better.")
    return Grid(header, rows, meanings)


def markdown(results: Results) -> str:
    """Return the verdict on each model, the main numbers as Markdown, and remarks on missing metrics.

    Example:
        >>> row = {"length": 8, "perplexity": 2.0, "low": 1.9, "high": 2.1}
        >>> model = {"ppl_prefix": [row], "cannot_run": {}, "not_measured": {}, "plan": None}
        >>> shown = {"models": {"a": model}, "lengths": [8], "window": 8, "comparisons": {}, "notes": []}
        >>> print(markdown(shown | {"data": {"documents": 9, "source": "texts"}, "base": "a"}).splitlines()[0])
        - a: Not swapped: it was measured only inside the window.
    """
    grid = grid_of(results)
    lines = [f"- {markdown_text(text)}" for text in in_short(results)]
    lines += [*([""] if lines else []), _measured_on(results, markdown_text), ""]
    lines += [_row(["model", *grid.header]), _row("---" for _ in ["model", *grid.header])]
    lines += [
        # numbers stay, other text, such as a reason, is escaped
        _row(
            [
                f"{sign_of(n)} {markdown_text(name)}",
                *(cell if _NUMBERS.fullmatch(cell) else markdown_text(cell) for cell in cells),
            ]
        )
        for n, name, cells in grid.rows
    ]
    lines += ["", " ".join(grid.meanings)]
    if details := details_of(results):
        lines += ["", "Details:", "", *(f"- {markdown_text(text)}" for text in details)]
    lines += ["", *(f"- {markdown_text(text)}" for text in _remarks(results))]
    return "\n".join(lines).rstrip() + "\n"


def notebook(results: Results) -> str:
    """Return the content of `markdown` as HTML, for a notebook."""
    grid, short, details = grid_of(results), in_short(results), details_of(results)
    return html_tables.together(
        [
            *([html_tables.bullets(short)] if short else []),
            html_tables.title(_measured_on(results, str)),
            html_tables.table(
                ([f"{sign_of(n)} {name}", *cells] for n, name, cells in grid.rows), ["model", *grid.header]
            ),
            html_tables.paragraph(" ".join(grid.meanings)),
            *([html_tables.paragraph("Details:"), html_tables.bullets(details)] if details else []),
            html_tables.bullets(_remarks(results)),
        ]
    )


def _measured_on(results: Results, escape: Callable[[str], str]) -> str:
    title = "Perplexity by length" if any(map(scores_by_length, results["models"].values())) else "Measured"
    return f"{title} on {results['data']['documents']} documents ({escape(results['data']['source'])})."


def in_short(results: Results) -> list[str]:
    """Return the verdict on each model as one sentence."""
    conclusions = {name: conclude(results, name) for name in results["models"]}
    return [f"{name}: {conclusion.text}" for name, conclusion in conclusions.items() if conclusion is not None]


def details_of(results: Results) -> list[str]:
    """Return one line per model: its loss inside the window, and whether far context helps it."""
    lines = []
    for name, model in results["models"].items():
        texts = [text for text in (inside_statement(results, name), far_statement(model)) if text]
        if texts:
            lines.append(f"{name}: {' '.join(texts)}")
    return lines


def latex(results: Results) -> str:
    r"""Return the main numbers as a LaTeX table, for the package booktabs.

    Example:
        >>> row = {"length": 8, "perplexity": 2.0, "low": 1.9, "high": 2.1}
        >>> model = {"ppl_prefix": [row], "cannot_run": {}, "plan": None}
        >>> shown = {"models": {"a_1": model}, "lengths": [8], "window": 8, "data": {"documents": 9, "source": "t"}}
        >>> print(latex(shown).splitlines()[5])
        a\_1 & 2 [1.9, 2.1] \\
    """
    grid, data = grid_of(results), results["data"]
    lines = [
        f"% {printable(data['documents'])} documents. {' '.join(grid.meanings)}".replace("–", "--"),
        rf"\begin{{tabular}}{{l{'r' * len(grid.header)}}}",
        r"\toprule",
        rf"{' & '.join(['model', *map(_latex_text, grid.header)])} \\",
        r"\midrule",
        *(rf"{' & '.join(map(_latex_text, [name, *cells]))} \\" for _, name, cells in grid.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(printable_lines(text).split()))


_NUMBERS = re.compile(r"[\w .,:%+–\-\[\]]*")
_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": "--",
}


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _perplexities(model: ModelEntry, lengths: Sequence[int]) -> list[str]:
    scores = {row["length"]: row for row in scores_by_length(model)}
    cells = []
    for length in lengths:
        score = scores.get(length)
        shown = model["cannot_run"].get(str(length), "–")
        cells.append(f"{score['perplexity']:.3g} [{interval_text(score, '.3g', ', ')}]" if score else shown)
    return cells


def _sliding(rows: list[DifferenceRow]) -> str:
    last = rows[-1]
    return f"{last['difference']:+.3f} ({percent(last['difference'])}) at {last['length']}"


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("far context", "far_context", lambda far: f"{far_change(far)['difference']:+.3f}, {far['verdict']}"),
    ("sliding window", "against_sliding", _sliding),
    ("found", "passkey", lambda passkey: f"{share_found(passkey):.0%}"),
    ("effective length", "passkey", lambda passkey: str(passkey["effective_length"]["length"] or "no verdict")),
    ("within the window", "short_reg", lambda short: f"{short['loss']['difference']:+.3f}, {short['loss']['verdict']}"),
    ("tasks", "ruler_lite", lambda ruler: ", ".join(f"{n}: {score:.0%}" for n, score in task_scores(ruler).items())),
    ("tasks kept", TASKS_KEPT, lambda rows: ", ".join(f"{row['length']}: {kept_text(row)}" for row in rows)),
    ("retrieved", "retrieval", lambda rows: ", ".join(f"{row['length']}: {row['accuracy']:.0%}" for row in rows)),
    ("near the base", "vectors", lambda rows: ", ".join(f"{row['length']}: {row['cosine']:.3f}" for row in rows)),
)
_DIFFERENCES = ("far context", "sliding window", "within the window")
_MEANINGS = {
    "far context": "Far context: change of the loss by all text beyond the window.",
    "sliding window": "Sliding window: loss minus that of the sliding window, and the change of perplexity.",
    "found": "Found: share of passkeys, over all lengths that a model can run.",
    "effective length": "Effective length: in tokens, by passkeys.",
    "tasks": "Tasks: mean score of ruler_lite, by length.",
    "tasks kept": "Tasks kept: percentage of the baseline's score on the same prompts; in brackets the change of the "
    "score and its interval over prompts.",
    "within the window": "Within the window: loss minus the baseline's.",
    "near the base": "Near the base: mean cosine of vectors to the base's, which reads only its window.",
    "retrieved": "Retrieved: share of passkey documents, by length.",
}


def _remarks(results: Results) -> list[str]:
    remarks = [*results["notes"], *(f"{metric} was not measured: {why}" for metric, why in common_gaps(results))]
    for name, model in results["models"].items():
        remarks += [f"{name}: {metric} was not measured: {why}" for metric, why in own_gaps(results, model)]
        effective = model.get("passkey", {}).get("effective_length", {})
        if effective.get("no_verdict"):
            remarks.append(f"{name}: no effective length: {effective['no_verdict']}")
    for name, comparison in results["comparisons"].items():
        short = results["models"].get(name, {}).get("short_reg")
        clear = [r for r in comparison.get("lengths", []) if r["p_holm"] is not None and r["p_holm"] <= SIGNIFICANT]
        clear = [row for row in clear if row["length"] != (short and short.get("length"))]
        if clear:
            shown = ", ".join(f"{r['length']}: {r['difference']:+.3f} nats (p {r['p_holm']:.2g})" for r in clear)
            remarks.append(f"{name} compared with {results['base']}, significant differences: {shown}")
    return remarks
