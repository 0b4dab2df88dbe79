"""Metrics for encoders: masked tokens, pseudo-perplexity, retrieval by length, and similarity of vectors."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np

from hf_posswap.comparison.work import Unit, Work, key_of
from hf_posswap.errors import DataError
from hf_posswap.evaluation.masked import mask_groups, masked_losses, pseudo_perplexity, special_frame
from hf_posswap.evaluation.perplexity import loss_by_position, perplexity_by_length
from hf_posswap.evaluation.retrieval import (
    FILLER,
    leading_tokens,
    retrieval_at_length,
    retrieval_texts,
    vector_cosine,
    vector_score,
)
from hf_posswap.evaluation.store import unit_key
from hf_posswap.text.tokens import tokens_after

_SHARE = 0.15
_PSEUDO_TOKENS = 64
_RETRIEVED = 50


def measure_masked(work: Work) -> dict[str, object]:
    """Return the perplexity of masked tokens at each length, and their loss by position at the longest length."""
    _refuse_causal(work)
    losses = _masked(work, _SHARE)
    seed, first = work.settings.seed, len(special_frame(work.tokenizer)[0])
    lengths = [dataclasses.asdict(score) for score in perplexity_by_length(losses, seed=seed)]
    positions = loss_by_position(losses[max(losses)], first=first, seed=seed)
    return {"share": _SHARE, "lengths": lengths, "positions": [dataclasses.asdict(score) for score in positions]}


def measure_pseudo(work: Work) -> list[dict[str, object]]:
    """Return pseudo-perplexity, one row per length, over 64 evenly spaced tokens per document."""
    _refuse_causal(work)
    return [
        {"length": length, "perplexity": pseudo_perplexity(list(losses)), "tokens": int(losses.size)}
        for length, losses in _masked(work, 0.0).items()
    ]


def measure_retrieval(work: Work) -> list[dict[str, object]]:
    """Return how often a question finds its passkey document, one row per length that can hold one."""
    results = work.values("retrieval", [_retrieval(work, length) for length in work.lengths])
    rows = [row for row in results if "too_short" not in row]
    if not rows:
        raise DataError(f"no length holds a passkey document: {results[-1]['too_short']}")
    return rows


def _retrieval(work: Work, length: int) -> Unit:
    options = {
        "documents": _RETRIEVED,
        "seed": work.settings.seed,
        "kind": "passkey",
        "pooling": "mean",
    }
    texts = [FILLER, *(text for pair in retrieval_texts("passkey", _RETRIEVED, work.settings.seed) for text in pair)]
    ids = [*special_frame(work.tokenizer), *work.tokenizer(texts, verbose=False)["input_ids"]]
    ids += [tokens_after(work.tokenizer, text) for text in texts]
    return Unit(
        {"metric": "retrieval", **options},
        {"length": length, "tokenizer": unit_key({"ids": ids})},
        partial(_retrieved, work, length, options),
        [length] * _RETRIEVED,
    )


def _retrieved(work: Work, length: int, options: dict[str, Any]) -> dict[str, object]:
    try:
        return dataclasses.asdict(retrieval_at_length(work.subject.model, work.tokenizer, length, **options))
    except DataError as error:
        return {"too_short": str(error)}


def measure_vectors(work: Work) -> list[dict[str, object]] | None:
    """Return the mean cosine of the model's vectors to the base's, one row per length; None if the subject is the base.

    A vector is the mean of the last hidden states of one document with its special tokens. The base reads as much of
    each document as fits its window, like the teacher in embedding distillation; the model reads all of it.
    """
    _refuse_causal(work)
    if work.base is None:
        return None
    cosines = iter(work.values("vectors", [unit for length in work.lengths for unit in _vector_units(work, length)]))
    rows = []
    for length in work.lengths:
        document_cosines = [next(cosines)["cosine"] for _ in work.documents.digests]
        score = vector_score(length, _base_reads(work, length), document_cosines, seed=work.settings.seed)
        rows.append(dataclasses.asdict(score))
    return rows


def _base_reads(work: Work, length: int) -> int:
    assert work.base is not None
    reach = work.base.reach
    return min(length, reach.window or length, reach.limit or length)


def _vector_units(work: Work, length: int) -> list[Unit]:
    """Return one unit per document: the cosine of the two models' vectors of its first `length` tokens."""
    frame, reads = special_frame(work.tokenizer), _base_reads(work, length)
    return [
        Unit(
            {"metric": "vectors", "pooling": "mean", "base": key_of(work)},
            {"document": digest, "length": length, "base_reads": reads, "frame": list(frame)},
            partial(_cosine, work, leading_tokens(document, length, frame), leading_tokens(document, reads, frame)),
            (length, reads),
        )
        for digest, document in zip(work.documents.digests, work.documents.tokens, strict=True)
    ]


def _cosine(work: Work, whole: list[int], leading: list[int]) -> dict[str, float]:
    assert work.base is not None
    return {"cosine": vector_cosine(work.subject.model, work.base.model, whole, leading)}


def _refuse_causal(work: Work) -> None:
    if work.subject.reach.causal:
        name = type(work.subject.model).__name__
        raise DataError(f"{name} predicts the next token: this metric is for masked language models.")


def _masked(work: Work, share: float) -> dict[int, np.ndarray]:
    """Return the losses of the masked tokens by length L, {L: [N, masked]}; L includes the special tokens."""
    units = [_masked_units(work, length, share) for length in work.lengths]
    values = iter(work.values("masked tokens", [unit for length_units in units for unit in length_units]))
    return {
        length: np.stack([next(values) for _ in length_units])
        for length, length_units in zip(work.lengths, units, strict=True)
    }


def _masked_units(work: Work, length: int, share: float) -> list[Unit]:
    before, after = special_frame(work.tokenizer)
    count = length - len(before) - len(after)
    if count < 1:
        raise DataError(f"a text of {length} tokens has room only for special tokens.")
    groups = mask_groups(count, share=share, seed=work.settings.seed)
    if share == 0.0:
        groups = [groups[i] for i in np.unique(np.linspace(0, count - 1, _PSEUDO_TOKENS).round().astype(int))]
    positions = np.sort(np.concatenate(groups))
    protocol = {"metric": "masked", "share": share, "seed": work.settings.seed, "mask": work.tokenizer.mask_token_id}
    return [
        Unit(
            protocol,
            {"document": digest, "length": length, "frame": [before, after]},
            partial(lambda d: masked_losses(work.subject.model, work.tokenizer, d, groups)[positions], document),
            [length] * len(groups),
            np.mean,
        )
        for digest, document in zip(work.documents.digests, work.documents.tokens[:, :count], strict=True)
    ]
