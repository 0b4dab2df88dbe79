"""The study of encoders as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_posswap.utils.format import interval_text
from recipes.studies.measuring import intervals_said

_ENDS = ("beyond", "recall@10", "nDCG@10", "less cutting", "less the mean")
_TASKS = {
    "passkey": "Passkeys: filler that is the same in all documents, and eight names with their keys",
    "passage": "Passages: real text, of which eight passages were taken out",
}


def markdown(result: dict[str, Any]) -> str:
    """Return the results of `recipes.studies.encoders` as Markdown: verdicts, a table per task, and the commands."""
    installed, base, texts = result["versions"], result["base"], result["texts"]
    tasks = list(dict.fromkeys(cell["task"] for cell in result["rows"][0]["cells"]))
    lines = [
        f"# One vector for a long text: {base['name']}, {base['parameters'] / 1e6:.1f} M parameters, window "
        f"{base['window']}",
        "",
        f"Distilled: {result['tokens']:,} tokens in texts of one window, {result['seeds']} seeds; all others are not "
        f"trained. torch {installed['torch']}, transformers {installed['transformers']}, size "
        f"{result['size']}. Differences are paired. {intervals_said(result)}",
        "",
        "- Recall@1, the first columns: the share of questions whose document is the nearest by cosine; recall@10 and "
        "nDCG@10 use the same ranks.",
        "- Beyond: the accuracy on questions whose answer is beyond the first window, at the longest length.",
        f"- Real text: {texts['source']}; {texts['said']}.",
        "",
        *_answers(result),
    ]
    for task in tasks:
        lines += ["", *_task(task, result["rows"])]
    return "\n".join([*lines, "", *(f"    {command}" for command in (result["command"], *result["commands"])), ""])


def _answers(result: dict[str, Any]) -> list[str]:
    """Return the verdicts at the longest length as a table and sentences."""
    longest = max(cell["length"] for cell in result["rows"][0]["cells"])
    lines = [f"## What was found at {longest:,} tokens", ""]
    if not result["verdicts"]:  # none of the ways that LongEmbed's claims are about were read
        return lines + _sorted_ways(result["rows"], longest)
    lines += [
        "| task | LongEmbed | here | difference of accuracy | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for verdict in result["verdicts"]:
        cells = (verdict["task"], verdict["claim"], f"{verdict['way']} less {verdict['other']}", _change(verdict))
        lines.append(_line([*cells, verdict["verdict"]]))
    return [*lines, "", *_sorted_ways(result["rows"], longest)]


def _sorted_ways(rows: Sequence[dict[str, Any]], length: int) -> list[str]:
    """Return for each task the methods that are better or worse than truncation and than the mean of windows."""
    lines = []
    for task in dict.fromkeys(cell["task"] for cell in rows[0]["cells"]):
        for key, other in (("less_cut", "cutting"), ("less_mean", "the mean of windows")):
            changes = {
                row["way"]: cell[key]
                for row in rows
                for cell in row["cells"]
                if (cell["task"], cell["length"]) == (task, length)
            }
            better = [way for way, change in changes.items() if change["low"] is not None and change["low"] > 0]
            worse = [way for way, change in changes.items() if change["high"] is not None and change["high"] < 0]
            lines.append(
                f"- {task}: better than {other}: {'; '.join(better) or 'none'}. Worse: {'; '.join(worse) or 'none'}."
            )
    return lines


def _task(task: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    first = [cell for cell in rows[0]["cells"] if cell["task"] == task]
    longest = first[-1]
    head = ["way", *(f"{cell['length']:,}" for cell in first), *_ENDS]
    lines = [
        f"## {_TASKS[task]}",
        "",
        f"{longest['documents']} documents and {longest['questions']} questions of each length; chance is "
        f"{1 / longest['documents']:.0%}. The last five columns are of {longest['length']:,} tokens.",
        "",
        _line(head),
        _line(["---"] * len(head)),
    ]
    for row in rows:
        cells = [cell for cell in row["cells"] if cell["task"] == task]
        last = cells[-1]
        shown = [_share(cell["accuracy"]) for cell in cells]
        beyond = "–" if last["beyond"] is None else f"{last['beyond']:.0%}"
        ends = [f"{last['recall']['mean']:.0%}", f"{last['ndcg']['mean']:.2f}"]
        changes = [_change(last["less_cut"]), _change(last["less_mean"])]
        lines.append(_line([row["way"], *shown, beyond, *ends, *changes]))
    near = [f"{row['way']} {row['near']:.3f}" for row in rows if row["near"] is not None]
    lines += ["", *_parts(task, rows, longest)]
    return [*lines, "", f"Cosine to the base's vectors at one window, both tasks: {', '.join(near)}."]


def _parts(task: str, rows: Sequence[dict[str, Any]], longest: dict[str, Any]) -> list[str]:
    """Return recall@1 by the place of the answer in the longest documents, as a table."""
    parts = len(longest["by_part"])
    lines = [
        f"By the place of the answer in {longest['length']:,} tokens, {longest['documents']} questions in each part:",
        "",
        _line(["way", *(f"part {i + 1} of {parts}" for i in range(parts))]),
        _line(["---"] * (parts + 1)),
    ]
    for row in rows:
        last = [cell for cell in row["cells"] if cell["task"] == task][-1]
        lines.append(_line([row["way"], *(f"{share:.0%}" for share in last["by_part"])]))
    return lines


def _share(accuracy: dict[str, float | None]) -> str:
    return f"{accuracy['mean']:.0%} [{interval_text(accuracy, '.0%', ', ')}]"


def _change(change: dict[str, Any]) -> str:
    return f"{change['difference']:+.2f} [{interval_text(change, '+.2f', ', ')}]"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
