"""The metrics: each takes a `Work` and returns its entry in results.json.

The passkey grid is one; whether the base finds passkeys within its own window is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_posswap.comparison.candidates import Subject
from hf_posswap.comparison.encoders import measure_masked, measure_pseudo, measure_retrieval, measure_vectors
from hf_posswap.comparison.results import environment
from hf_posswap.comparison.work import Unit, Work, document_losses, key_of, losses_by_length, values_and_losses
from hf_posswap.errors import DataError
from hf_posswap.evaluation.compat import PROTOCOLS, protocol_losses, protocol_perplexity
from hf_posswap.evaluation.cost import costs_are_possible, measure_cost
from hf_posswap.evaluation.ctx_gain import context_gain, context_losses, contexts_of, far_context
from hf_posswap.evaluation.longppl import KeySpans, long_perplexity
from hf_posswap.evaluation.offset_probe import offset_change, offset_losses, offsets_of
from hf_posswap.evaluation.passkey import PasskeyTask, answer_prompt, effective_length, passkey_keys
from hf_posswap.evaluation.perplexity import loss_by_position, perplexity_by_length
from hf_posswap.evaluation.ruler_lite import IN_DOCUMENTS, TASKS, ruler_prompt, ruler_score
from hf_posswap.evaluation.scoring import PrefixStates
from hf_posswap.evaluation.short_reg import ShortDocument, compare_short, short_regression
from hf_posswap.evaluation.statistics import wilson_interval
from hf_posswap.evaluation.store import unit_key
from hf_posswap.geometry import ConfigSizes

Measure = Callable[[Work], Any]
_COMPAT_STRIDE = 256
_TIMED_BY = ("processor", "threads", "gpu")
"""What a cost is keyed by in addition, from the environment of the results: losses are reused on any machine."""


def why_no_needles(work: Work) -> str | None:
    """Return why a needle grid would be uninformative, or None: the model finds no passkey within its own window.

    Returns None if no prompt fits the window, or if the metric is requested by name.
    """
    if work.settings.metrics is not None or "passkey" not in work.metrics:
        return None
    task = _passkey_task(work)
    within = [n for n in work.lengths if task.shortest <= n <= work.window]
    if not within:
        return None
    answers = work.values(
        "passkey in the window", [_needle(work, task, *prompt_key) for prompt_key in _prompt_keys(work, within)]
    )
    if any(value["right"] for value in answers):
        return None
    return (
        f"{work.subject.name} finds none of {len(answers)} passkeys within its own {work.window:,} tokens, so a grid "
        "of longer prompts would be uninformative; request the metric passkey by name to measure it anyway."
    )


def measure_passkey(work: Work) -> dict[str, object]:
    """Return the needle grid, one row per cell, and the effective length derived from it."""
    settings, task = work.settings, _passkey_task(work)
    lengths = [n for n in work.lengths if n >= task.shortest]
    if not lengths:
        raise DataError(f"the shortest passkey prompt takes {task.shortest} tokens; the lengths are {work.lengths}.")
    grid = [(length, depth) for length in lengths for depth in settings.depths]
    answers = iter(
        work.values("passkey", [_needle(work, task, *prompt_key) for prompt_key in _prompt_keys(work, lengths)])
    )
    cells = []
    right: dict[tuple[int, float, int], bool] = {}
    for length, depth in grid:
        cell_answers = [next(answers) for _ in range(settings.trials)]
        right |= {(length, depth, trial): value["right"] for trial, value in enumerate(cell_answers)}
        losses = [float(np.mean(value["nll"])) for value in cell_answers]
        cells.append(_cell(length, depth, [value["right"] for value in cell_answers], losses))
    work.raw["passkey"] = right
    by_length = {n: [is_right for (length, _, _), is_right in right.items() if length == n] for n in lengths}
    effective = dataclasses.asdict(
        effective_length({n: (sum(is_right), len(is_right)) for n, is_right in by_length.items()})
    )
    return {"header": task.header, "trials": settings.trials, "cells": cells, "effective_length": effective}


def _prompt_keys(work: Work, lengths: list[int]) -> list[tuple[int, float, int]]:
    """Return length, depth and passkey of each prompt."""
    settings = work.settings
    return [
        (length, depth, key)
        for length in lengths
        for depth in settings.depths
        for key in passkey_keys(settings.seed, length, depth, settings.trials)
    ]


def _needle(work: Work, task: PasskeyTask, length: int, depth: float, key: int) -> Unit:
    """Return one prompt as a unit. Its text is written on demand, because all prompts together take much memory."""

    def answer() -> dict[str, object]:
        right, losses = answer_prompt(work.subject.scorer, *task.prompt(length=length, depth=depth, key=key))
        return {"right": right, "nll": losses.tolist()}

    ids, _ = task.prompt(length=length, depth=depth, key=key)
    unit_id = {"length": length, "depth": depth, "prompt": unit_key({"ids": ids})}
    return Unit({"metric": "passkey", "header": task.header}, unit_id, answer, (length,))


def _cell(length: int, depth: float, right: list[bool], losses: list[float]) -> dict[str, object]:
    low, high = wilson_interval(sum(right), len(right))
    share = sum(right) / len(right)
    nll = float(np.mean(losses))
    return {"length": length, "depth": depth, "share": share, "low": low, "high": high, "answer_nll": nll}


def _passkey_task(work: Work) -> PasskeyTask:
    """Return the task, without its header if the window is too short for it; it is the same for every subject."""
    task = PasskeyTask(work.tokenizer)
    return task if task.shortest <= work.window else PasskeyTask(work.tokenizer, header=False)


def measure_perplexity(work: Work) -> list[dict[str, object]]:
    """Return perplexity by length, one row per length."""
    losses = losses_by_length(work, work.lengths)
    return [dataclasses.asdict(score) for score in perplexity_by_length(losses, seed=work.settings.seed)]


def measure_positions(work: Work) -> list[dict[str, object]]:
    """Return loss by position at the longest length, one row per bucket."""
    losses = document_losses(work, max(work.lengths))
    return [dataclasses.asdict(score) for score in loss_by_position(losses, seed=work.settings.seed)]


def measure_gain(work: Work) -> list[dict[str, object]]:
    """Return the gain from context, one row per amount of context."""
    length = max(work.lengths)
    contexts, tail = contexts_of(work.window, length, work.settings.tail)
    known = work.subject.reach.prefix_consistent  # the tail after all context is the end of what is read anyway
    read = contexts[:-1] if known else contexts
    units = [
        Unit(
            {"metric": "ctx_gain", "contexts": read, "tail": tail},
            {"document": digest, "length": length},
            partial(lambda d: context_losses(work.subject.scorer, d, read, tail), document),
            [context + tail for context in read],
            lambda row: float(row[-1]) / tail,
        )
        for digest, document in (_leading(work, length) if read else [])
    ]
    columns, losses = values_and_losses(work, "context gain", units, [length] if known else [])
    whole = [losses[length][:, -tail:].sum(axis=1, dtype=np.float64)] if known else []
    sums = np.column_stack([*np.array(columns).T, *whole])
    scores = context_gain(sums, contexts, tail, work.window - tail, seed=work.settings.seed)
    work.raw["far_context"] = far_context(scores, tail, len(sums))
    return [dataclasses.asdict(score) | {"tail": tail} for score in scores]


_KEPT_BYTES = 2 << 30
"""Most bytes of hidden states that are kept of one model."""
_READS_WHOLE = {"ppl_prefix", "nll_pos", "ctx_gain", "longppl"}
"""Metrics for which whole documents are read."""


def keep_prefixes(works: Sequence[Work], reference: Work) -> None:
    """Have each model keep the last states of its documents' prefixes, whose logits `measure_short` compares.

    They come with the forwards for other metrics, so that no text is read for them alone.
    """
    length = min(reference.window, max(reference.lengths))
    for work in works:
        scorer = work.subject.scoring
        metrics = set.intersection(*(set(each.metrics) for each in (work, reference)))
        if scorer is None or "short_reg" not in metrics or not metrics & _READS_WHOLE:
            continue
        longest, width = max(work.lengths), ConfigSizes.of(work.subject.model.config).hidden
        size = len(work.documents.tokens) * length * width * work.subject.model.dtype.itemsize
        if scorer.can_keep_states and length <= longest and size <= _KEPT_BYTES:
            scorer.prefixes = PrefixStates(work.documents.tokens[:, :longest], length, longest)


def measure_short(work: Work) -> dict[str, object] | None:
    """Return the short-context verdict against the base; None if the subject is the base."""
    if work.base is None:
        return None
    length = min(work.window, max(work.lengths))
    base, new = work.base, work.subject
    kept = [subject.scorer.prefixes for subject in (base, new)]
    reads = [length if each is None or each.length != length else each.reads for each in kept]
    protocol = {"metric": "short_reg", "base": key_of(work), "reads": reads}
    units = [
        Unit(
            protocol,
            {"document": digest, "length": length},
            partial(lambda d: dataclasses.asdict(compare_short(base.scorer, new.scorer, d, length=length)), document),
            [
                read
                for subject, read in zip((base, new), reads, strict=True)
                if not _is_kept(work, subject, document, digest, read)
            ],
            lambda value: value["after"] / value["tokens"],
        )
        for digest, document in zip(work.documents.digests, work.documents.tokens, strict=True)
    ]
    documents = [ShortDocument(**value) for value in work.values("short context", units)]
    result = short_regression(documents, margin=work.settings.margin, seed=work.settings.seed)
    return dataclasses.asdict(result) | {"length": length}


def _is_kept(work: Work, subject: Subject, document: np.ndarray, digest: str, read: int) -> bool:
    """Return whether the states of a document's prefix are kept, or will be when this metric is measured."""
    prefixes = subject.scorer.prefixes
    if prefixes is None or prefixes.reads != read:
        return False
    losses = {"model": subject.identity, "protocol": {"metric": "losses"}, "unit": {"document": digest, "length": read}}
    will_be = work.planned is not None and not work.store.holds(losses)
    return will_be or prefixes.key(document) in prefixes.states


def measure_offsets(work: Work) -> list[dict[str, object]]:
    """Return the loss of one passage per document at several offsets, one row per offset."""
    passage = max(2, work.window // 2)
    limit = work.subject.reach.limit
    offsets = [offset for offset in offsets_of(work.window) if limit is None or offset + passage <= limit]
    if not offsets:
        raise DataError(
            f"a passage has {passage} tokens, half the window of {work.window}, and the model ends at {limit}."
        )
    # at offset 0 the passage is the beginning of what is read anyway
    known = work.subject.reach.prefix_consistent and passage <= max(work.lengths)
    read = offsets[1:] if known else offsets
    units = [
        Unit(
            {"metric": "offset_probe", "offsets": read},
            {"document": digest, "length": passage},
            partial(lambda d: offset_losses(work.subject.scorer, d, read), document),
            [passage] * len(read),
        )
        for digest, document in (_leading(work, passage) if read else [])
    ]
    columns, losses = values_and_losses(work, "offsets", units, [passage] if known else [])
    first = [losses[passage].sum(axis=1, dtype=np.float64)] if known else []
    sums = np.column_stack([*first, *np.array(columns).T])
    scores = offset_change(sums, offsets, passage - 1, seed=work.settings.seed)
    return [dataclasses.asdict(score) for score in scores]


def measure_compat(work: Work) -> list[dict[str, object]]:
    """Return perplexity by each protocol of the literature, one row per protocol."""
    stride = work.settings.stride or min(_COMPAT_STRIDE, max(1, work.window // 2))
    bos = work.tokenizer.bos_token_id
    length = max(work.lengths)
    texts = {digest: row[bos is not None :] for digest, row in _leading(work, length)}
    stream = {"+".join(texts): np.concatenate(list(texts.values()))}
    protocol_names: list[str] = []
    units: list[Unit] = []
    for name, protocol in PROTOCOLS.items():
        before = work.tokenizer.eos_token_id if bos is None and name == "lmeval_disjoint" else bos
        if before is None and name == "lmeval_disjoint":
            continue  # lm-eval itself stops where a tokenizer has neither
        key = {"metric": "ppl_compat", "id": name, "window": work.window, "stride": stride, "bos": before}
        for digest, text in (stream if protocol.stream else texts).items():
            windows = protocol.cut(len(text), work.window, stride, bos is not None)
            compute = partial(_compat, work, name, text, stride, before)
            protocol_names.append(name)
            reads = [window.stop - window.start for window in windows]
            units.append(Unit(key, {"document": digest, "length": length}, compute, reads))
    losses: dict[str, list[np.ndarray]] = {name: [] for name in protocol_names}
    for name, value in zip(protocol_names, work.values("other protocols", units), strict=True):
        losses[name] += np.split(np.array(value["losses"], dtype=np.float32), np.cumsum(value["sizes"])[:-1])
    return [
        {
            "protocol": name,
            "window": work.window,
            "stride": stride,
            "perplexity": protocol_perplexity(name, chunks),
            "tokens": sum(map(len, chunks)),
        }
        for name, chunks in losses.items()
    ]


def _leading(work: Work, length: int) -> list[tuple[str, np.ndarray]]:
    """Return the digest and the first `length` tokens of each document."""
    return list(zip(work.documents.digests, work.documents.tokens[:, :length], strict=True))


def _compat(work: Work, name: str, text: np.ndarray, stride: int, bos: int | None) -> dict[str, object]:
    chunks = protocol_losses(work.subject.scorer, text, name, window=work.window, stride=stride, bos=bos)
    return {"sizes": [len(chunk) for chunk in chunks], "losses": np.concatenate(chunks).tolist()}


def measure_ruler(work: Work) -> dict[str, object]:
    """Return the mean score of each task at each length, one row each, and the tasks that do not fit a length."""
    trials, too_short = work.settings.trials, {}
    cells: list[tuple[str, int]] = []
    units: list[Unit] = []
    for task, length in ((task, length) for task in TASKS for length in work.lengths):
        try:
            units += [_ruler(work, task, length, sample) for sample in range(trials)]
        except DataError as error:
            too_short[f"{task} at {length}"] = str(error)
            continue
        cells.append((task, length))
    if not cells:
        raise DataError(f"no ruler_lite prompt fits the lengths: {next(iter(too_short.values()))}")
    answers = iter(work.values("ruler_lite", units))
    scores = {(length, task, n): float(next(answers)["score"]) for task, length in cells for n in range(trials)}
    work.raw["ruler_lite"] = scores
    rows = []
    for task, length in cells:
        mean = float(np.mean([scores[length, task, sample] for sample in range(trials)]))
        rows.append({"task": task, "length": length, "score": mean, "prompts": trials})
    return {"cells": rows, "left_out": too_short}


def _ruler(work: Work, task: str, length: int, sample: int) -> Unit:
    documents = (
        list(work.documents.tokens) if task == IN_DOCUMENTS else None
    )  # the others have the same text everywhere
    write = partial(
        ruler_prompt,
        work.tokenizer,
        task,
        length=length,
        seed=work.settings.seed,
        sample=sample,
        documents=documents,
    )  # rewritten on demand, as in _needle
    prompt = write()
    return Unit(
        {"metric": "ruler_lite", "task": task, "spans": [list(span) for span in prompt.spans]},
        {"length": length, "prompt": unit_key({"ids": list(prompt.ids)})},
        lambda: {"score": ruler_score(work.subject.scorer, write())},
        (length,),
    )


def measure_longppl(work: Work) -> dict[str, object]:
    """Return LongPPL over the key tokens of the settings' file."""
    assert work.settings.key_spans is not None
    spans = KeySpans.load(work.settings.key_spans)
    length, whole = max(work.lengths), work.documents.tokens.shape[1]
    if length < whole:
        spans.masks(list(work.documents.tokens))  # raises where they are of other documents
        raise DataError(f"{work.subject.name} ends at {length} tokens, and the key spans are of texts of {whole}.")
    masks = spans.masks(list(work.documents.tokens))
    perplexity, tokens = long_perplexity(list(document_losses(work, length)), masks)
    return {"perplexity": perplexity, "key_tokens": tokens, "evaluator": spans.evaluator, "length": length}


def measure_length_cost(work: Work) -> list[dict[str, object]]:
    """Return seconds and bytes, one row per length; stored values of an earlier run on such a machine are reused."""
    units = []
    model = work.subject.scorer.model  # raises for a model that is not causal
    hardware = environment(list({parameter.device for parameter in model.parameters()}))
    protocol = {"metric": "cost"} | {name: hardware[name] for name in _TIMED_BY if name in hardware}
    for length in (n for n in work.lengths if costs_are_possible(model, n)):
        ids = torch.from_numpy(work.documents.tokens[:1, :length].astype(np.int64))
        units.append(Unit(protocol, {"length": length}, partial(_cost, work, ids), (length,)))
    rows = work.values("cost", units, alone=True)
    if not rows:
        raise DataError("no length leaves room for the tokens to decode after it.")
    return rows


def _cost(work: Work, ids: torch.Tensor) -> dict[str, object]:
    return dataclasses.asdict(measure_cost(work.subject.model, ids, prefill=work.subject.scorer.prefill))


MEASURES: dict[str, Measure] = {
    "ppl_prefix": measure_perplexity,
    "nll_pos": measure_positions,
    "ctx_gain": measure_gain,
    "short_reg": measure_short,
    "passkey": measure_passkey,
    "offset_probe": measure_offsets,
    "ppl_compat": measure_compat,
    "ruler_lite": measure_ruler,
    "longppl": measure_longppl,
    "cost": measure_length_cost,
    "mlm_pos": measure_masked,
    "pseudo_ppl": measure_pseudo,
    "retrieval": measure_retrieval,
    "vectors": measure_vectors,
}
