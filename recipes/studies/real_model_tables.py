"""The tables of `recipes.studies.real_model`, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hf_posswap.evaluation import effective_length, wilson_interval
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.utils.format import interval_text
from recipes.studies.measuring import difference, intervals_said

BASE, SLIDING, CONTROL = "base", "sliding window", "control, sliding window"
CHOICE = "continuation"
"""The task of choosing a passage's continuation among four."""

KEPT = 0.98
"""Of the base, which LinearARD reports for a 7B model after 4.25 M tokens."""

Units = Sequence[Mapping[str, Any]]


def markdown(result: Mapping[str, Any]) -> str:
    """Return the results of one of the studies as Markdown."""
    tables = {"beyond": _beyond, "tasks": _tasks, "within": _within, "served": _served}
    title = {
        "beyond": "beyond its window",
        "tasks": "asked for what stands far back",
        "within": "with other mechanisms, in its window",
        "served": "swapped, and served by llama.cpp",
    }[result["study"]]
    model, units = result["model"], result["units"]
    lines = [
        f"# {model['name']} {title}",
        "",
        f"{model['parameters'] / 1e6:.0f} M parameters, window {model['window']}, {result['dtype']}; "
        f"{versions_of(units)}.",
        "",
        *tables[result["study"]](result, units),
        "",
        cost_of(units),
        "",
        f"    {result['command']}",
    ]
    return "\n".join(lines) + "\n"


def versions_of(units: Units) -> str:
    """Return the versions that the units were measured with, and on what.

    Example:
        >>> versions_of([{"versions": {"torch": "2.13.0", "transformers": "5.24.0"}, "on": "cpu"}] * 2)
        'torch 2.13.0, transformers 5.24.0, on cpu'
    """
    seen = [f"{kind} {_and(unit['versions'][kind] for unit in units)}" for kind in ("torch", "transformers")]
    return f"{', '.join(seen)}, on {_and(unit['on'] for unit in units)}"


def cost_of(units: Units) -> str:
    """Return what measuring took, in all."""
    by_machine: dict[str, float] = {}
    for unit in units:
        by_machine[unit["on"]] = by_machine.get(unit["on"], 0.0) + unit["seconds"]
    spent = (f"{seconds / 3600:.2f} hours on {machine}" for machine, seconds in by_machine.items())
    return f"Measuring took {_and(spent)}, without training."


def _and(words: Iterable[str]) -> str:
    return " and ".join(sorted(set(words)))


def _beyond(result: Mapping[str, Any], units: Units) -> list[str]:
    """Return loss by range of positions, and differences from the base and its sliding window."""
    window, length, block = result["model"]["window"], result["length"], result["block"]
    books = by_reader(units)
    ranges = [(0, window // 4), (window // 4, window // 2), (window // 2, window)]
    ranges += [(at, min(at + window // 2, length)) for at in range(window, length, window // 2)]
    ranges = [(start, stop) for start, stop in ranges if start // block < stop // block]
    names = [f"{start // 1024}-{stop // 1024}k" for start, stop in ranges]
    lines = [
        f"The first {length} tokens of documents of {result['texts']}, nats a token by position. "
        f"After: tokens of training. {intervals_said(result)}",
        "",
        *_head(["reader", "documents", *names]),
    ]
    for name, losses in books.items():
        means = np.stack(list(losses.values()))  # [N, blocks]
        shown = (f"{means[:, start // block : stop // block].mean():.3f}" for start, stop in ranges)
        lines.append(_row([name, str(len(losses)), *shown]))
    for other in (BASE, SLIDING, *(name for name in books if name.startswith(CONTROL))):
        if other not in books:
            continue
        lines += ["", f"Less the {other}, on the same documents; below 0 is better:", ""]
        lines += _head(["reader", "documents", *names])
        for name, losses in books.items():
            both = [key for key in losses if key in books[other]]
            if name != other and both:
                cells = [_less(books[other], losses, both, start // block, stop // block) for start, stop in ranges]
                lines.append(_row([name, str(len(both)), *cells]))
    return lines


def _tasks(result: Mapping[str, Any], units: Units) -> list[str]:
    """Return right answers by task and length, and the effective length of each reader."""
    lines = [
        f"Swaps for {result['reach']} tokens; {result['samples']} prompts of each retrieval task and length; "
        f"trained ones read {result['tokens']:,} tokens. Percent of the answers that are right, teacher-forced.",
    ]
    tasks = list(dict.fromkeys(unit["task"] for unit in units))
    for task in tasks:
        rows = [unit for unit in units if unit["task"] == task]
        lengths = sorted({unit["length"] for unit in rows})
        lines += ["", f"{task}:", "", *_head(["reader", *(f"{length}" for length in lengths)])]
        for reader in dict.fromkeys(unit["reader"] for unit in rows):
            scores_by_length = {unit["length"]: unit["scores"] for unit in rows if unit["reader"] == reader}
            lines.append(_row([reader, *(_percent(scores_by_length.get(length)) for length in lengths)]))
    pooled: dict[str, dict[int, list[float]]] = {}
    for reader in dict.fromkeys(unit["reader"] for unit in units):
        answers = [unit for unit in units if unit["reader"] == reader and unit["task"] != CHOICE]
        lengths_of = {task: {unit["length"] for unit in answers if unit["task"] == task} for task in tasks}
        all_lengths = set[int]().union(*lengths_of.values())
        for unit in answers:
            if lengths_of[unit["task"]] == all_lengths:
                pooled.setdefault(reader, {}).setdefault(unit["length"], []).extend(unit["scores"])
    if not pooled:
        return lines
    lines += [
        "",
        "The retrieval tasks with results at all lengths of the reader, with Wilson's 95 % interval, and the effective "
        "length (85 % of its own first):",
    ]
    lengths = sorted({length for scores_by_length in pooled.values() for length in scores_by_length})
    lines += ["", *_head(["reader", *map(str, lengths), "effective length"])]
    for reader, scores_by_length in pooled.items():
        counts = {length: (round(sum(scores)), len(scores)) for length, scores in scores_by_length.items()}
        cells = [_share(*counts[length]) if length in counts else "-" for length in lengths]
        reached = effective_length(counts)
        lines.append(_row([reader, *cells, str(reached.length) if reached.no_verdict is None else "no verdict"]))
    return lines


def above_base(units: Units) -> dict[tuple[str, str], dict[int, dict[str, float]]]:
    """Return the loss above the base's by mechanism and dtype, by tokens of training, by document.

    Documents that the base did not read in the same dtype are left out.
    """
    means = _document_means(units)
    above: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for (name, dtype, tokens, document), mean in means.items():
        before = means.get((BASE, dtype, 0, document))
        if before is not None:
            above.setdefault((name, dtype), {}).setdefault(tokens, {})[document] = mean - before
    return above


def _document_means(units: Units) -> dict[tuple[str, str, int, str], float]:
    """Return the loss by mechanism, dtype, tokens and document."""
    return {
        (unit["mechanism"], unit["dtype"], unit["tokens"], unit["document"]): float(np.mean(unit["nll"]))
        for unit in units
        if "nll" in unit
    }


def tokens_to_keep(
    budgets: Mapping[int, Mapping[str, float]], share: float, *, draws: int = 2000
) -> list[float] | None:
    """Return the tokens after which `share` of the base is kept, and the ends of its 95 % interval.

    Between two budgets, and after the largest, the loss above the base's falls with one power of the tokens; if it is
    low enough after the smallest budget, that is the answer. The interval is that of the documents, drawn again and
    again; whether the power stays is not in it. Infinite: the loss does not fall, or takes more than `FARTHEST`.

    Args:
        budgets: of each number of tokens, the loss above the base's in nats a token, by document.
        share: of the base's perplexity over the model's.
        draws: of the documents.

    Returns:
        Three numbers, or None without two budgets above zero that read the same documents, 8 at least.

    Example:
        >>> falling = {1000: dict.fromkeys(range(8), 0.4), 4000: dict.fromkeys(range(8), 0.2)}  # a half by four times
        >>> [round(tokens) for tokens in tokens_to_keep(falling, math.exp(-0.1))]
        [16000, 16000, 16000]
        >>> [round(tokens) for tokens in tokens_to_keep(falling, math.exp(-0.5))]  # after the first already
        [1000, 1000, 1000]
    """
    trained = sorted(tokens for tokens in budgets if tokens)
    documents = sorted(set.intersection(*(set(budgets[tokens]) for tokens in trained))) if trained else []
    if len(trained) < 2 or len(documents) < LEAST_DOCUMENTS:
        return None
    losses = np.array([[budgets[tokens][document] for document in documents] for tokens in trained])  # [T, N]
    chosen = np.random.default_rng(0).integers(len(documents), size=(draws, len(documents)))
    drawn = losses[:, chosen].mean(axis=2)  # [T, draws]
    estimates = [_tokens_at(trained, each, -math.log(share)) for each in drawn.T.tolist()]
    least, most = np.quantile(estimates, (0.025, 0.975), method="inverted_cdf")
    return [_tokens_at(trained, losses.mean(axis=1).tolist(), -math.log(share)), float(least), float(most)]


FARTHEST = 1e12
"""Tokens beyond which an extrapolation says nothing."""


def _tokens_at(trained: Sequence[int], losses: Sequence[float], wanted: float) -> float:
    """Return the tokens after which a loss, `losses` after `trained`, is as `wanted`."""
    reached = next((number for number, loss in enumerate(losses) if loss <= wanted), len(losses) - 1)
    if reached == 0:
        return float(trained[0])
    few, many, before, after = trained[reached - 1], trained[reached], losses[reached - 1], losses[reached]
    if after <= 0:  # below the base: no power leads there
        return float(many)
    if after >= before:
        return math.inf
    growth = math.log(after / wanted) / math.log(before / after) * math.log(many / few)
    return many * math.exp(growth) if growth <= math.log(FARTHEST / many) else math.inf


def _within(result: Mapping[str, Any], units: Units) -> list[str]:
    """Return the loss above the base's, the share of the base that is kept, and the tasks, by tokens of training."""
    above, means = above_base(units), _document_means(units)
    scores: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    settings: dict[tuple[str, int, str], Mapping[str, Any]] = {}
    for unit in units:
        key = (unit["mechanism"], unit["tokens"], unit["dtype"])
        settings.setdefault(key, unit)
        if "task" in unit:
            scores.setdefault(key, {})[unit["task"]] = unit["scores"]
    tasks = list(dict.fromkeys(unit["task"] for unit in units if "task" in unit))
    columns = ("mechanism", "tokens", "rate", "step", "dtype", "documents", "nats a token", "above the base", "kept")
    lines = [
        f"Windows of {result['short']} tokens, {result['windows']} of each document of {result['texts']}. "
        f"{intervals_said(result)} Kept: the base's perplexity over the model's. Tasks: percent right. Step: tokens.",
        "",
        *_head([*columns, *tasks]),
    ]
    for key, unit in settings.items():
        name, tokens, dtype = key
        documents = above.get((name, dtype), {}).get(tokens, {})
        if not documents:
            continue
        new = np.array(list(documents.values()))
        loss = np.mean([means[name, dtype, tokens, document] for document in documents])
        rate, step = (
            f"{unit[field]:{form}}" if field in unit else "" for field, form in (("rate", "g"), ("step", ","))
        )
        cells = [name, f"{tokens:,}", rate, step, dtype, str(len(new)), f"{loss:.4f}"]
        cells += [_change(np.zeros(len(new)), new, ".4f"), f"{math.exp(-new.mean()):.1%}"]
        lines.append(_row([*cells, *(_percent(scores.get(key, {}).get(task)) for task in tasks)]))
    return [*lines, *_far(above)]


def _far(above: Mapping[tuple[str, str], Mapping[int, Mapping[str, float]]]) -> list[str]:
    """Return the tokens that keeping 98 % would take, of the mechanisms that were trained on two budgets or more."""
    rows = []
    for (name, dtype), budgets in above.items():
        estimate = tokens_to_keep(budgets, KEPT)
        if estimate is not None:
            cells = [f"{tokens / 1e6:,.1f} M" if math.isfinite(tokens) else "not in sight" for tokens in estimate]
            interval = cells[1] if cells[1] == cells[2] else f"{cells[1]} to {cells[2]}"
            rows.append(_row([name, dtype, f"{max(budgets):,}", cells[0], interval]))
    if not rows:
        return []
    return [
        "",
        f"Tokens after which {KEPT:.0%} is kept: the smallest budget, if it was enough; else the loss above the base "
        "falls with one power of the tokens between budgets, and beyond the largest. The interval is of the documents "
        "alone: whether that power stays is not in it. Not in sight: it takes more than a million million tokens.",
        "",
        *_head(["mechanism", "dtype", "trained on", f"{KEPT:.0%} after", "95 % interval"]),
        *rows,
    ]


def _served(result: Mapping[str, Any], units: Units) -> list[str]:
    """Return how llama.cpp continues long texts, by swap, type of weights and document."""
    lines = [
        f"Texts of {result['length']:,} tokens of {result['texts']}, continued by {result['new']} tokens: by "
        "`generate` in float32, and by llama.cpp with the GGUF file, its cache in float32. Both see the same text "
        "before each token. Apart, in nats: the thousand most probable tokens on average, and the most probable ones "
        "at most.",
        "",
        *_head(["swap", "weights", "document", "same tokens", "same from the start", "apart", "at most"]),
    ]
    for unit in units:
        counts = [f"{unit[key]} of {result['new']}" for key in ("same", "begun")]
        apart = [f"{unit[key]:.4f}" for key in ("apart", "most")]
        lines.append(_row([unit["swap"], unit["weights"], unit["document"][:8], *counts, *apart]))
    return lines


def by_reader(units: Units) -> dict[str, dict[str, np.ndarray]]:
    """Return the blocks of each document, by reader, with the tokens that it was trained on, and document."""
    grouped: dict[str, dict[str, np.ndarray]] = {}
    for unit in units:
        name = f"{unit['reader']}, after {unit['tokens']:,}" if "tokens" in unit else unit["reader"]
        grouped.setdefault(name, {})[unit["document"]] = np.array(unit["nll"])
    return grouped


def _less(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], documents: Sequence[str], start: int, stop: int
) -> str:
    old, new = (np.array([books[key][start:stop].mean() for key in documents]) for books in (before, after))
    return _change(old, new, ".3f")


def _change(old: np.ndarray, new: np.ndarray, digits: str) -> str:
    if len(old) < LEAST_DOCUMENTS:
        return f"{(new - old).mean():+{digits}}"
    change = difference(old, new)
    return f"{change['difference']:+{digits}} [{interval_text(change, f'+{digits}', ', ')}]"


def _percent(scores: Sequence[float] | None) -> str:
    return "-" if not scores else f"{100 * sum(scores) / len(scores):.0f}"


def _share(right: int, count: int) -> str:
    low, high = wilson_interval(right, count)
    return f"{100 * right / count:.0f} [{100 * low:.0f}, {100 * high:.0f}]"


def _head(cells: Sequence[str]) -> list[str]:
    return [_row(cells), _row(["---"] * len(cells))]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
