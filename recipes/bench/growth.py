"""Growth of time and memory with the length of the text, for each scheme and for the unswapped model.

A causal model of one layer runs over 1k, 2k, ... 32k tokens; peaks are measured in a separate process per scheme. The
exponent is the slope of log(time) on log(tokens) from 4k on: at most 2 for attention, and 1 for memory.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap import patch_model, set_backend
from recipes.bench.harness import LOOSER, in_a_process

UNPATCHED = "unpatched"
SCHEMES: dict[str, dict[str, Any]] = {
    UNPATCHED: {},
    "rope": {},
    "dynamic": {"original_length": 2048},
    "alibi": {},
    "t5": {"init_std": 1.0},
    "kerple": {},
    "fire": {},
    "self_extend": {"window": 512, "original_length": 2048},
    "rerope": {"window": 512, "original_length": 2048},
    "leaky_rerope": {"window": 512, "original_length": 2048},
    "dual_chunk": {"original_length": 2048},
}
LENGTHS = 1024, 2048, 4096, 8192, 16384, 32768
BEYOND_MIB = {"t5": 100.0, "alibi": 100.0}
"""Most MiB by which the peak at the longest text may exceed the unpatched model's."""
FITTED_FROM = 4096
TOLERANCE = 1e-3
"""Largest difference of logits between the chosen backend and the formula, for weights of size 0.1."""


def rows(smoke: bool) -> list[dict[str, Any]]:
    """Return for each scheme seconds and peaks at each length, and the exponents."""
    lengths = (32, 64, 128) if smoke else LENGTHS
    scheme_rows = [_row(scheme, lengths, smoke) for scheme in SCHEMES]
    for row in scheme_rows:
        row["exponent"] = {
            quantity: _exponent(row[quantity]) for quantity in ("seconds", "peak_mib") if quantity in row
        }
    return scheme_rows


def _row(scheme: str, lengths: tuple[int, ...], smoke: bool) -> dict[str, Any]:
    model = _model(scheme, lengths[-1])
    row: dict[str, Any] = {"name": scheme, "wrong": _wrong(model, scheme, lengths[0]), "seconds": {}}
    for length in lengths:
        run = _forward(model, length)
        if length <= 8192:
            run()
        durations = [_timed(run) for _ in range(1 if smoke or length > 8192 else 3)]
        row["seconds"][str(length)] = statistics.median(durations)
    if not smoke and sys.platform == "linux":
        row["peak_mib"] = in_a_process(__name__, scheme, {str(length): length for length in lengths})
    return row


def _wrong(model: Any, scheme: str, length: int) -> list[str]:
    """Return what is wrong with the automatically chosen backend, if anything."""
    if scheme in (UNPATCHED, "rope", "dynamic"):
        return []  # rotated, and then the model's own attention
    run = _forward(model, length)
    logits = run()
    set_backend(model, "plain")
    expected = run()
    set_backend(model, "auto")
    difference = float((logits - expected).abs().max())
    return [] if difference <= TOLERANCE else [f"auto and plain differ by {difference:.2e}, allowed is {TOLERANCE:.0e}"]


def _model(scheme: str, positions: int) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        n_positions=positions, vocab_size=64, n_embd=256, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.1,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    if scheme != UNPATCHED:
        patch_model(model, scheme, max_length=positions, **SCHEMES[scheme])
    return model


def _forward(model: Any, length: int) -> Callable[[], torch.Tensor]:
    ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(0))

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=False, logits_to_keep=64).logits

    return run


def _timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def apart(scheme: str, **lengths: int) -> dict[str, Callable[[], Any]]:
    """Return the functions whose memory is measured in order in a separate process."""
    model = _model(scheme, max(lengths.values()))
    return {name: _forward(model, length) for name, length in lengths.items()}


def _exponent(by_length: dict[str, float]) -> float:
    """Return the slope of the logarithm of what was measured on that of the length, by least squares."""
    lengths = [int(length) for length in by_length]
    least = FITTED_FROM if max(lengths) > FITTED_FROM else 0
    fitted = [n for n in lengths if n >= least]
    costs = [math.log(max(by_length[str(n)], 1e-9)) for n in fitted]
    return float(np.polyfit([math.log(n) for n in fitted], costs, 1)[0])


def table(rows: list[dict[str, Any]], *, smoke: bool) -> str:
    """Return time and memory at each length as Markdown, with the exponents, and whether the goals are reached."""
    lengths = list(rows[0]["seconds"])
    text = []
    for quantity, unit in (("seconds", "s"), ("peak_mib", "MiB")):
        if quantity in rows[0]:
            text += [f"| {unit} | {' | '.join(lengths)} | exponent |", "|---" * (len(lengths) + 2) + "|"]
            for row in rows:
                shown = " | ".join(f"{row[quantity][length]:.3g}" for length in lengths)
                text.append(f"| {row['name']} | {shown} | {row['exponent'][quantity]:.2f} |")
            text.append("")
    if "peak_mib" in rows[0]:
        text += _beyond({row["name"]: row["peak_mib"][lengths[-1]] for row in rows}, lengths[-1], smoke)
    return "\n".join(text).rstrip()


def _beyond(peaks: dict[str, float], length: str, smoke: bool) -> list[str]:
    lines = ["| what | against | more | goal | |", "|---|---|---|---|---|"]
    for scheme, most in BEYOND_MIB.items():
        if not {scheme, UNPATCHED} <= peaks.keys():  # rows come one by one
            lines.append(f"| {length} tokens with {scheme}: peak memory | unpatched | | | NOT MEASURED |")
            continue
        extra = peaks[scheme] - peaks[UNPATCHED]
        verdict = "reached" if extra <= most * (LOOSER if smoke else 1.0) else "missed"
        lines.append(
            f"| {length} tokens with {scheme}: peak memory | unpatched | {extra:+.0f} MiB | <= {most:.0f} | {verdict} |"
        )
    return lines
