"""The study of claims as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from recipes.studies.algorithms import TASKS
from recipes.studies.claims_judging import BEYOND, FAR, INSIDE


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a page: verdicts, their numbers, and the measurements."""
    return "\n".join(
        [
            "# Famous claims about positions, on small models from scratch",
            "",
            *_about(result),
            "## Verdicts",
            "",
            *_table(("claim", "source", "verdict"), _claims(result)),
            *(f"- {line}" for line in _in_words(result)),
            "",
            "## Their numbers",
            "",
            "A part holds if its whole interval is in the asked range, and does not hold if none of it is. Other rate: "
            "the estimate of seed 0 at the other learning rate. There is no verdict if the other rate contradicts it, "
            "or if the models have not learned the task within the trained lengths.",
            "",
            *_table(("claim", "unit", "what", "estimate", "asked", "other rate", "verdict"), _parts(result)),
            "## What was measured",
            "",
            *_measured(result),
            f"    {result['command']}",
            "",
        ]
    )


def _about(result: dict[str, Any]) -> list[str]:
    installed, texts, trained = result["versions"], result["texts"], result["trained"]
    return [
        f"GPT-2 models with a window of {result['window']}, trained from random weights with each scheme, "
        f"{result['seeds']} seeds each. Trainings of one seed start with the same weights, as far as they share them, "
        f"and read the same tokens in the same order. torch {installed['torch']}, "
        f"transformers {installed['transformers']}.",
        "",
        *_table(("material", "parameters", "read in a training", "learning rate", "other rate"), _amounts(trained)),
        *_read(texts),
        "Needles are passkeys in text that requires looking back everywhere. Tasks have "
        f"1 to {result['longest']} letters in training and up to twice as many in tests, where the whole answer must "
        "be right. Intervals are 95 %, Student's over seeds, paired. "
        f"For losses, distances to the ends over seeds and over documents ({result['intervals']}) are added in "
        "squares. A width of 0 means that all seeds agree.",
        "",
        *_left_out(result),
        "The papers' experiments are larger and different: RoFormer's figure 3 uses a masked BERT, Vaswani's table "
        "translation, Press's WikiText-103, and Kazemnejad's 107 M parameters. A claim that does not hold here may "
        "hold there, and vice versa; the verdicts are about models and budgets of this size.",
        "",
    ]


def _read(texts: dict[str, Any] | None) -> Iterator[str]:
    if texts:
        yield (
            f"Text is Python's own; losses are nats/token on {texts['documents']} held-out documents, "
            f"{texts['tokens of a piece']} tokens each."
        )


def _left_out(result: dict[str, Any]) -> Iterator[str]:
    """Yield the claims that are not judged because their trainings were left out or are not finished."""
    if result["left out"]:
        yield f"**Not run, not judged:** {'; '.join(result['left out'])}. The same command resumes."
        yield ""


def _amounts(trained: dict[str, Any]) -> Iterator[Sequence[str]]:
    for material, amount in trained.items():
        (read_text,) = (f"{amount[name]:,} {name}" for name in ("tokens", "examples") if name in amount)
        yield material, f"{amount['parameters'] / 1e6:.2f} M", read_text, *(f"{rate:g}" for rate in amount["rates"])


def _claims(result: dict[str, Any]) -> Iterator[Sequence[str]]:
    for claim in result["claims"]:
        yield claim["said"], claim["source"], f"**{claim['verdict']}**"


def _in_words(result: dict[str, Any]) -> Iterator[str]:
    """Yield the results as sentences with the numbers of the tables."""
    measurements = {(claim["claim"], item["what"]): item for claim in result["claims"] for item in claim["parts"]}
    text, shares = result["text"], result["shares"]
    judged = {claim["claim"] for claim in result["claims"]}
    if "rope converges" in judged:
        gains = [
            measurements["rope converges", f"rope less {rival}"]["estimate"] for rival in ("sinusoidal", "learned")
        ]
        yield (
            f"Convergence: averaged over the training, RoPE is {_apart(gains[0])} sinusoidal positions and "
            f"{_apart(gains[1])} learned ones. It reaches their final loss after "
            f"{_needed(result['needed']['sinusoidal'])} and {_needed(result['needed']['learned'])} of the tokens."
        )
    if "tables end close" in judged:
        close = measurements["tables end close", "learned less sinusoidal, in the window"]
        yield f"Tables: learned positions end {_apart(close['estimate'])} sinusoidal ones, {interval(close)}."
    for scheme in (scheme for scheme in text if scheme != "learned"):  # its table ends with the window
        means = {windows: float(np.mean(losses)) for windows, losses in text[scheme]["losses"].items()}
        moved = " / ".join(f"{means[windows] - means['1']:+.3f}" for windows in FAR)
        yield f"Longer text, {scheme}: {moved} nats at 2 / 4 / 8 windows at once, above {means['1']:.3f} one by one."
    if "needles" in shares:
        hits = " / ".join(f"{np.mean(shares['needles']['alibi'][windows]):.0%}" for windows in ("1", *FAR))
        yield f"Needles, ALiBi: found at 1 / 2 / 4 / 8 windows {hits}."
    for task in (task for task in TASKS if task in shares):
        beyond, inside = (
            ", ".join(f"{scheme} {np.mean(by_length[where]):.0%}" for scheme, by_length in shares[task].items())
            for where in (BEYOND, INSIDE)
        )
        yield f"{task.capitalize()}: beyond the trained lengths {beyond}; inside them {inside}."


def _apart(difference: float) -> str:
    return f"{abs(difference):.3f} nats {'below' if difference < 0 else 'above'}"


def _parts(result: dict[str, Any]) -> Iterator[Sequence[str]]:
    for claim in result["claims"]:
        for item in claim["parts"]:
            reason = f": {item['why']}" if item["why"] else ""
            other_rate = item["other rate"]
            yield (
                claim["claim"],
                claim["unit"],
                item["what"],
                interval(item),
                item["asked"],
                "–" if other_rate is None else f"{other_rate:+.3f}",
                item["verdict"] + reason,
            )


def interval(part: Mapping[str, Any]) -> str:
    """Return an estimate with its interval.

    Example:
        >>> interval({"estimate": -0.1, "low": -0.2, "high": 0.0})
        '-0.100 [-0.200, +0.000]'
    """
    return f"{part['estimate']:+.3f} [{part['low']:+.3f}, {part['high']:+.3f}]"


def _measured(result: dict[str, Any]) -> Iterator[str]:
    text, shares, window = result["text"], result["shares"], result["window"]
    if text:
        yield "Loss by windows read at once, on the same tokens, and the share of the tokens after which RoPE's"
        yield "training loss reached the scheme's final one. Mean over seeds (least to most)."
        yield ""
        windows = sorted({windows for scheme_result in text.values() for windows in scheme_result["losses"]}, key=int)
        rows = [
            [scheme, *(_spread(scheme_result["losses"].get(m)) for m in windows), _needed(result["needed"].get(scheme))]
            for scheme, scheme_result in text.items()
        ]
        yield from _table(["scheme", *(f"{m} x {window}" for m in windows), "RoPE needs"], rows)
    if shares:
        yield "Shares of right answers, mean over seeds (least to most)."
        yield ""
    if "needles" in shares:
        lengths = list(shares["needles"]["alibi"])
        rows = [
            ["needles", s, *(_spread(scheme_result.get(m), "%") for m in lengths)]
            for s, scheme_result in shares["needles"].items()
        ]
        yield from _table(["", "scheme", *(f"{m} x {window}" for m in lengths)], rows)
    if tasks := [task for task in TASKS if task in shares]:
        head = ["", "scheme", "trained lengths", "beyond", "one longer", "half longer", "twice"]
        yield from _table(head, [row for task in tasks for row in _answers(task, result)])


def _answers(task: str, result: dict[str, Any]) -> Iterator[Sequence[str]]:
    longest = result["longest"]
    lengths = (INSIDE, BEYOND, str(longest + 1), str(longest + longest // 2), str(2 * longest))
    for scheme, shares in result["shares"][task].items():
        yield [f"{task}, up to {longest}", scheme, *(_spread(shares[length], "%") for length in lengths)]


def _needed(shares: Sequence[float | None] | None) -> str:
    if shares is None:
        return "–"
    reached = [value for value in shares if value is not None]
    if len(reached) < len(shares):
        return f"all, and more ({len(shares) - len(reached)} of {len(shares)} seeds)"
    return _spread(reached, "%")


def _spread(values: Sequence[float] | None, unit: str = "nats") -> str:
    if values is None:
        return "ends before"
    number_format = "{:.0%}" if unit == "%" else "{:.3f}"
    low, mean, high = (number_format.format(value) for value in (min(values), float(np.mean(values)), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def _table(head: Sequence[str], rows: Any) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]
