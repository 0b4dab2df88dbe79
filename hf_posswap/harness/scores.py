"""Scores of the harness as a table of tasks and lengths, with effective lengths and the share of a base's scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hf_posswap.comparison.report.results import HarnessCell, HarnessResults, HarnessRow, HarnessTable
from hf_posswap.errors import DataError
from hf_posswap.evaluation.passkey import RULER_BAR, longest_passing

ALL = "all"
"""The column of scores that belong to no length."""
_SHARE = 0.85  # NoLiMa: of the base score
_SAME = ("tasks", "limit", "num_fewshot", "apply_chat_template", "fewshot_as_multiturn", "metadata")


def rows_of(output: Mapping[str, Any], length: int | None, questions_of: Mapping[str, int | None]) -> list[HarnessRow]:
    """Return one row per task and metric of one output of the harness.

    RULER's metrics are called by their lengths; they become one metric "score" in the column of their length, and the
    harness's -1 for the lengths that were not run is dropped.

    Args:
        output: what `lm_eval.simple_evaluate` returned.
        length: the column of all other metrics; None: "all".
        questions_of: questions of each task; None: what the harness says.
    """
    rows: list[HarnessRow] = []
    for task, scores in output["results"].items():
        known = output.get("higher_is_better", {}).get(task) or {}
        effective = output.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in scores.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            by_length = metric.isdecimal()
            if by_length and (value == -1 or (length is not None and int(metric) != length)):
                continue
            error = scores.get(f"{metric}_stderr,{kept}")
            name = "score" if by_length else metric
            cell: HarnessCell = {
                "score": float(value),
                "stderr": float(error) if isinstance(error, int | float) else None,
                "questions": effective if questions_of.get(task) is None else questions_of[task],
            }
            rows.append(
                {
                    "task": task,
                    "metric": name if kept == "none" else f"{name}, {kept}",
                    "higher_is_better": True if by_length else known.get(metric),
                    "values": {metric if by_length else ALL if length is None else str(length): cell},
                }
            )
    return rows


def table_of(rows: Iterable[HarnessRow], groups: Mapping[str, list[str]]) -> HarnessTable:
    """Return the table of all rows: those of one task and metric become one, and groups get the mean of their tasks.

    Args:
        rows: of `rows_of`, for each length.
        groups: {name: its tasks}; those with one task are left out.
    """
    joined: dict[tuple[str, str], HarnessRow] = {}
    for row in rows:
        key = (row["task"], row["metric"])
        joined.setdefault(key, row | {"values": {}})["values"].update(row["values"])
    means = [mean for name, tasks in groups.items() for mean in _means(name, tasks, list(joined.values()))]
    table_rows = [*joined.values(), *means]
    columns = sorted(
        {column for row in table_rows for column in row["values"]},
        key=lambda column: (column == ALL, 0 if column == ALL else int(column)),
    )
    for row in table_rows:
        row["effective_length"] = _effective(row)
    return {"columns": columns, "rows": table_rows}


def _means(name: str, tasks: list[str], rows: list[HarnessRow]) -> list[HarnessRow]:
    """Return the means over the tasks of a group, weighted by questions; only lengths that all tasks have count."""
    means: list[HarnessRow] = []
    group_rows = [row for row in rows if row["task"] in tasks]
    for metric in dict.fromkeys(row["metric"] for row in group_rows):
        same = [row for row in group_rows if row["metric"] == metric]
        if len(tasks) < 2 or len(same) < len(tasks):
            continue
        values: dict[str, HarnessCell] = {}
        for column in same[0]["values"]:
            cells = [row["values"][column] for row in same if column in row["values"]]
            counts = [cell["questions"] for cell in cells if cell["questions"] is not None]
            if len(counts) < len(same) or not sum(counts):
                continue
            total = sum(cell["score"] * count for cell, count in zip(cells, counts, strict=True))
            questions = sum(counts)
            values[column] = {"score": total / questions, "stderr": None, "questions": questions}
        better = {row["higher_is_better"] for row in same}
        title = f"{name}, mean of {len(same)} tasks"
        row: HarnessRow = {
            "task": title,
            "metric": metric,
            "higher_is_better": better.pop() if len(better) == 1 else None,
        }
        means += [row | {"values": values}] if values else []
    return means


def _effective(row: HarnessRow) -> dict[str, int | None] | None:
    """Return the effective lengths by RULER's and by NoLiMa's criterion, or None where they have no meaning.

    NoLiMa's is None if nothing is right at the shortest length; RULER's, if the score is below the bar there.
    """
    scores = {int(column): cell["score"] for column, cell in row["values"].items() if column != ALL}
    if len(scores) < 2 or not row["higher_is_better"]:
        return None
    first = scores[min(scores)]
    by_share = longest_passing(scores, _SHARE * first) if first > 0 else None
    return {"ruler": longest_passing(scores, RULER_BAR), "nolima": by_share}


def add_retention(table: HarnessTable, base: HarnessTable) -> None:
    """Add to each row of `table` the percentage of the base's score, by column; None where the base has none, or 0.

    Metrics for which less is better get none.

    Args:
        table: of `table_of`, which is changed.
        base: the base's table.
    """
    base_values = {(row["task"], row["metric"]): row["values"] for row in base["rows"]}
    for row in table["rows"]:
        values = base_values.get((row["task"], row["metric"]), {})
        row["retention"] = None if not row["higher_is_better"] else {
            column: 100 * cell["score"] / values[column]["score"]
            if column in values and values[column]["score"] > 0
            else None
            for column, cell in row["values"].items()
        }  # fmt: skip


def retention(results: HarnessResults, base: HarnessResults) -> HarnessTable:
    """Return the table of `results` with the percentage of the base's scores, in `retention` of each row.

    Args:
        results: what `run_tasks` returned, also when read from JSON.
        base: the same for the unswapped model, whose lengths may end earlier.

    Raises:
        DataError: one of them is not a result of `run_tasks`, or they come from different questions.

    Example:
        >>> cell = {"score": 0.5, "stderr": None, "questions": 10}
        >>> row = {"task": "a", "metric": "acc", "higher_is_better": True, "values": {"all": cell}}
        >>> mine = {"table": {"columns": ["all"], "rows": [row]}, "settings": {}}
        >>> theirs = {"table": {"rows": [row | {"values": {"all": cell | {"score": 0.8}}}]}, "settings": {}}
        >>> retention(mine, theirs)["rows"][0]["retention"]
        {'all': 62.5}
    """
    for name, value in (("results", results), ("base", base)):
        if not isinstance(value, Mapping) or not {"table", "settings"} <= set(value):
            raise DataError(
                f"{name} is not a result of run_tasks or posswap lm-eval --out: it has no table and settings. Run the "
                "tasks again."
            )
    mine, base_settings = results["settings"], base["settings"]
    other = [key for key in _SAME if mine.get(key) != base_settings.get(key)]
    if not _begins(mine.get("lengths"), base_settings.get("lengths")):
        other.append("lengths")
    if other:
        listed = "; ".join(f"{key} {mine.get(key)!r} and {base_settings.get(key)!r}" for key in other)
        raise DataError(
            f"the model and the base answered different questions: {listed}. Run both with the same options."
        )
    table: HarnessTable = {
        "columns": list(results["table"]["columns"]),
        "rows": [row.copy() for row in results["table"]["rows"]],
    }
    add_retention(table, base["table"])
    return table


def _begins(lengths: list[int] | None, base: list[int] | None) -> bool:
    """Tell whether a base that reads less has the first ones of the lengths: the questions of these are the same."""
    return lengths == base if lengths is None or base is None else bool(base) and lengths[: len(base)] == base
