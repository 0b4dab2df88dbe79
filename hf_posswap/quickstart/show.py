"""What the terminal shows at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from hf_posswap.quickstart.pictures import SLIDING
from hf_posswap.quickstart.variants import CONTROL
from hf_posswap.utils.progress import Reporter


def show(results: dict[str, Any], out: Path, reporter: Reporter, seconds: float) -> None:
    """Show the perplexities, the continuation, and where everything lies."""
    window = results["model"]["window"]
    table = Table(title=f"Perplexity by length (window {window} tokens)", title_justify="left")
    table.add_column("model")
    for length in results["lengths"]:
        table.add_column(f"{length // window}x ({length})", justify="right")
    for name, entry in results["models"].items():
        table.add_row(
            name, *("table ends" if "cannot_run" in row else f"{row['perplexity']:.3f}" for row in entry["lengths"])
        )
    sliding = results["models"][CONTROL]["sliding"]["lengths"]
    table.add_row(SLIDING, *(f"{row['perplexity']:.3f}" for row in sliding), style="dim")
    reporter.console.print(table)
    reload, best = results["reload"], results["best"]
    past = reload["prompt_tokens"] + reload["new_tokens"] - window
    reporter.line(f"\n{best['name']} continues a held-out text, {past} tokens past the window:")
    reporter.line(f"{reload['prompt_end']} >>> {reload['text']}\n")
    reporter.line(f"reloaded in a fresh process: logits differ by {reload['max_logit_difference']:.2g} at most")
    reporter.line(f"best swapped model: {out / best['folder']}")
    reporter.line(f"report: {out / 'report.md'} ({seconds:.0f} s)")
