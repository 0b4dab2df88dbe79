"""The final terminal output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hf_posswap.comparison.tables import details_of, in_short
from hf_posswap.report import PAGE
from hf_posswap.utils.printable import printable

if TYPE_CHECKING:
    from hf_posswap.utils.progress import Reporter


def show(
    results: dict[str, Any], best: str, reload: dict[str, Any], out: Path, reporter: Reporter, seconds: float
) -> None:
    """Show the verdicts, the perplexities, the details, the continuation, and the next commands."""
    window, lengths = results["window"], results["lengths"]
    title = f"Perplexity by length (window {window} tokens)"
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for length in lengths:
        table.add_column(f"{length / window:g}x ({length})", justify="right")
    for name, model in results["models"].items():
        table.add_row(printable(name), *_perplexities(model, lengths))
    if sliding := results["sliding"]:
        table.add_row(printable(sliding["name"]), *_perplexities(sliding, lengths), style="dim")
    for line in in_short(results):
        reporter.line(line)
    for note in results["notes"]:
        reporter.line(f"note: {note}")
    reporter.console.print(table)
    for line in details_of(results):
        reporter.line(line)
    reporter.line(f"\n{best} continues a held-out text, past the window:")
    reporter.line(f"{reload['prompt_end']} >>> {reload['text']}\n")
    reporter.line(f"reloaded in a fresh process: logits differ by {reload['max_logit_difference']:.2g} at most")
    model = out / best / "model"
    reporter.line(f"report: {out / PAGE} ({seconds:.0f} s)\n")
    reporter.line("Next:")
    reporter.line(f"  posswap explain {model}")
    reporter.line(f"  posswap push {model} me/my-model --dry-run")
    reporter.line(f"  python -c \"import hf_posswap; model = hf_posswap.load('{model}')\"")
    reporter.line("  posswap quickstart --model my-gpt2 --out mine   # a model of yours")


def _perplexities(model: dict[str, Any], lengths: list[int]) -> list[str]:
    perplexities = {row["length"]: f"{row['perplexity']:.3f}" for row in model["ppl_prefix"]}
    ends = model.get("cannot_run", {})
    return [perplexities.get(length, "table ends" if str(length) in ends else "–") for length in lengths]
