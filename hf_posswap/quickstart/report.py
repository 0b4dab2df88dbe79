"""The Markdown report of a results.json: every sentence follows from its numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_posswap.quickstart.pictures import LOSS, PASSKEY, PERPLEXITY, SLIDING
from hf_posswap.quickstart.variants import CONTROL


def trend(change: dict[str, float]) -> str:
    """Return what the perplexity does from the shortest to the longest length, as far as the documents can tell.

    Example:
        >>> trend({"ratio": 1.2, "low": 1.1, "high": 1.3}), trend({"ratio": 0.99, "low": 0.9, "high": 1.1})
        ('worse', 'no clear change')
    """
    if change["low"] > 1:
        return "worse"
    return "better" if change["high"] < 1 else "no clear change"


def write_report(results: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    sections = [
        _opening(results),
        _perplexity(results),
        _positions(results),
        _passkey(results),
        _best(results),
        _method(results),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _opening(results: dict[str, Any]) -> str:
    model, longest = results["model"], f"{results['lengths'][-1] // results['model']['window']}x"
    lines = [
        "# Position swaps, compared",
        "",
        f"Base: {model['class']}, {model['parameters'] / 1e6:.2f} million parameters, {model['positions']}, "
        f"window {model['window']} tokens. Each copy got another position mechanism and the same "
        f"{results['adaptation']['steps']} steps of {results['adaptation']['step_tokens']} tokens in windows of "
        f"{model['window']}; the control kept its own and got the same steps.",
        "",
    ]
    for name, entry in results["models"].items():
        change = entry["change"]
        if change is None:
            lines.append(f"- **{name}**: {entry['ends']}: no number beyond it.")
        else:
            lines.append(
                f"- **{name}**: {trend(change)}: perplexity at {longest} is {change['ratio']:.3f} of that at 1x "
                f"(95 % interval {change['low']:.3f} to {change['high']:.3f}, paired over documents)."
            )
    lines += [f"- **{name}** was left out: {reason}" for name, reason in results["left_out"].items()]
    return "\n".join([*lines, *(f"\n{note}" for note in results["notes"])])


def _perplexity(results: dict[str, Any]) -> str:
    window = results["model"]["window"]
    head = [f"{n // window}x ({n})" for n in results["lengths"]]
    rows = [[f"**{name}**", *map(_score, entry["lengths"])] for name, entry in results["models"].items()]
    sliding = results["models"][CONTROL]["sliding"]["lengths"]
    rows.append([f"*{SLIDING}*", *map(_score, sliding)])
    return "\n\n".join(
        [
            "## Perplexity by length",
            f"![Perplexity by length]({PERPLEXITY})",
            _table(["model", *head], rows),
            "In brackets: 95 % bootstrap interval over documents. The tokens are the same for every model, so models "
            "may be compared within a column more sharply than the intervals suggest. Columns hold different tokens, "
            "and the beginning of a document is its least predictable part. The last line is the measure of that: the "
            f"control, reading half-overlapping windows of {window} tokens and never more, goes from "
            f"{sliding[0]['perplexity']:.3f} to {sliding[-1]['perplexity']:.3f}. Only below it does reach pay.",
        ]
    )


def _positions(results: dict[str, Any]) -> str:
    models = results["models"]
    stops = sorted({row["start"] for entry in models.values() for row in entry["positions"] if row["start"] >= 16})
    rows = []
    for name, entry in (models | {SLIDING: models[CONTROL]["sliding"]}).items():
        by_start = {row["start"]: row for row in entry["positions"]}
        rows.append([f"**{name}**", *(f"{by_start[s]['loss']:.3f}" if s in by_start else "-" for s in stops)])
    head = [f"{start} to {2 * start - 1}" for start in stops]
    return "\n\n".join(
        [
            "## Loss by position",
            f"![Loss by position]({LOSS})",
            _table(["model", *head], rows),
            "Nats a token, by the token's position in its document.",
        ]
    )


def _passkey(results: dict[str, Any]) -> str:
    asked, window = results["passkey"], results["model"]["window"]
    if asked.get("skipped"):
        return f"## Passkey\n\nNot asked: {asked['skipped']}"
    head = [f"{n // window}x ({n})" for n in asked["lengths"]]
    rows, beyond, found = [], 0, 0
    for name, entry in results["models"].items():
        row = [f"**{name}**"]
        for length in asked["lengths"]:
            cells = [cell for cell in entry["passkey"] if cell["length"] == length]
            trials, exact = sum(c["trials"] for c in cells), sum(c["exact"] for c in cells)
            nll = sum(c["answer_nll"] for c in cells) / len(cells) if cells else 0.0
            row.append(f"{exact}/{trials}, {nll:.2f}" if cells else entry["ends"])
            if length > window:
                beyond, found = beyond + trials, found + exact
        rows.append(row)
    return "\n\n".join(
        [
            "## Passkey",
            f"![Passkey]({PASSKEY})",
            _table(["model", *head], rows),
            "Keys found, of all asked at that length, and the mean loss of the answer's tokens in nats. Beyond the "
            f"window the models found {found} of {beyond} keys. A flat perplexity alone does not show that far context "
            "is used; a key found beyond the window would" + ("." if found else ", and none was."),
        ]
    )


def _best(results: dict[str, Any]) -> str:
    best, reload = results["best"], results["reload"]
    beyond = reload["prompt_tokens"] + reload["new_tokens"] - results["model"]["window"]
    text = "\n".join("    " + line for line in (reload["prompt_end"] + " >>> " + reload["text"]).splitlines())
    return "\n\n".join(
        [
            "## The best swapped model",
            f"**{best['name']}** has the lowest perplexity at the longest length, {best['perplexity']:.3f} at "
            f"{best['length']} tokens. It lies in `{best['folder']}`; loaded in a fresh process its logits differ by "
            f"{reload['max_logit_difference']:.2g} at most. A continuation of a held-out text, sampled, {beyond} "
            "tokens past the original window (the model's own text follows the >>>):",
            text,
        ]
    )


def _method(results: dict[str, Any]) -> str:
    data, versions = results["data"], results["environment"]
    lines = [
        f"- Text: {data['text']}; {data['train_documents']} documents to learn from, {data['held_out_documents']} held "
        f"out and long enough, chosen by the hash of their names. Corpus {data['digest'][:16]}.",
        "- Perplexity: protocol `ppl_prefix`: the first L tokens of each document, every token but the first predicted "
        "from all before it in a full-context forward pass, exp of the mean over all tokens of all documents, float32.",
        f"- Seed {results['settings']['seed']}; hf_posswap {versions['hf_posswap']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, Python {versions['python']}, {versions['device']}.",
    ]
    for name, entry in results["models"].items():
        adapted = entry["adaptation"]
        if adapted["steps"]:
            lines.append(f"- {name}: loss of the adaptation {adapted['first_loss']:.3f} to {adapted['last_loss']:.3f}.")
    return "\n".join(["## How it was measured", "", *lines])


def _score(row: dict[str, Any]) -> str:
    if "cannot_run" in row:
        return row["cannot_run"]
    return f"{row['perplexity']:.3f} ({row['low']:.2f} to {row['high']:.2f})"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
