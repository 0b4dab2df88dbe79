"""The sliding-window control: an unswapped model on long text, and the comparison of each model with it.

A swap to a longer reach pays off only if it predicts better than the unswapped model that reads the same text in
half-overlapping windows of its original size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hf_posswap.comparison.names import CONTROL, is_control
from hf_posswap.comparison.work import Unit, Work, document_losses
from hf_posswap.evaluation.losses import sliding_document, sliding_reads
from hf_posswap.evaluation.paired import holm_corrected, paired_change
from hf_posswap.evaluation.perplexity import loss_by_position, perplexity_by_length
from hf_posswap.patching.record.training import training_of


def sliding_source(works: Sequence[Work], reference: Work) -> Work | None:
    """Return the work on the model that reads sliding windows: the control, an unswapped model, or the reference.

    Returns None if perplexity by length is not requested, no length exceeds the window, or the model cannot run it.
    """
    controls = [work for work in works if _is_control(work)]
    native = [work for work in (reference, *works) if work.subject.plan is None]
    source = (controls or native or [reference])[0]
    longest, limit = max(max(work.lengths) for work in works), source.subject.reach.limit
    window = source.window
    reads = source.subject.scoring is not None and 2 <= window < longest and (limit is None or window <= limit)
    return source if reads and "ppl_prefix" in source.metrics else None


def _is_control(work: Work) -> bool:
    """Return whether the model is called a control, or is unswapped and was trained by the recipe `control`."""
    if is_control(work.subject.name):
        return True
    training = training_of(work.subject.model.config)
    return work.subject.plan is None and training is not None and training.recipe == CONTROL


def sliding_units(work: Work, length: int) -> list[Unit]:
    """Return one unit per document: its losses, float32 [length - 1]."""
    window = work.window
    return [
        Unit(
            {"metric": "sliding", "window": window},
            {"document": digest, "length": length},
            partial(lambda d: sliding_document(work.subject.scorer, d, window), document),
            sliding_reads(length, window),
            np.mean,
        )
        for digest, document in zip(work.documents.digests, work.documents.tokens[:, :length], strict=True)
    ]


def measure_sliding(source: Work, works: Sequence[Work]) -> tuple[dict[str, Any], np.ndarray]:
    """Return the results entry of the sliding window, and its losses, [N, longest length - 1].

    Args:
        source: the work on the model that reads windows.
        works: the work on all models, whose lengths beyond the window are measured.
    """
    lengths = sorted({length for work in works for length in work.lengths if length >= source.window})
    losses = np.stack(source.values("sliding window", sliding_units(source, max(lengths))))
    seed = source.settings.seed
    positions = [dataclasses.asdict(score) for score in loss_by_position(losses, seed=seed)]
    by_length = {length: losses[:, : length - 1] for length in lengths}
    summary = {
        "name": f"{source.subject.name}, sliding window",
        "of": source.subject.name,
        "window": source.window,
        "stride": source.window // 2,
        "ppl_prefix": [dataclasses.asdict(score) for score in perplexity_by_length(by_length, seed=seed)],
        "nll_pos": [row for row in positions if row["stop"] >= source.window],  # below, it equals the model itself
    }
    return summary, losses


def against_sliding(losses: np.ndarray, work: Work) -> list[dict[str, Any]]:
    """Return the differences of a model from the sliding window, one row per length beyond the window.

    Args:
        losses: losses of the sliding window, from `measure_sliding`.
        work: the work on the model, measured on the same documents.
    """
    rows = []
    for length in (n for n in work.lengths if n > work.window):
        before = losses[:, : length - 1].sum(axis=1, dtype=np.float64)
        after = document_losses(work, length).sum(axis=1, dtype=np.float64)
        change = paired_change(before, after, np.full(len(before), length - 1), seed=work.settings.seed)
        rows.append({"length": length} | dataclasses.asdict(change))
    return holm_corrected(rows)
