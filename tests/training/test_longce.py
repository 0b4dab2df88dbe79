"""LongCE is the formula, with short contexts read by hand; weights carry no gradient; the shape fixes the forwards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap import patch_model
from hf_posswap.errors import ConfigError, DataError
from hf_posswap.training.longce import LongCESettings, longce_loss
from tests.training.tiny_models import VOCABULARY, WINDOW, tiny

CONTEXT = 12


def model_of(kind: str) -> Any:
    return patch_model(tiny(kind), "rope" if kind == "gpt2" else "yarn", max_length=2 * WINDOW)


def token_loss(model: Any, ids: Tensor) -> Tensor:
    """Return the loss of the last token of `ids` [n], given those before it."""
    return functional.cross_entropy(model(input_ids=ids[None, :-1]).logits[0, -1], ids[-1])


def by_the_formula(model: Any, documents: list[Tensor], clip: float) -> Tensor:
    """Return the loss token by token: each short context is a forward of its own.

    It begins a whole number of half contexts after the beginning of the row, in which documents follow each other.
    """
    total, count, offset = torch.zeros(()), 0, 0
    for ids in documents:
        for t in range(1, len(ids)):  # the token to predict
            full, weight = token_loss(model, ids[: t + 1]), 1.0
            begin = CONTEXT // 2 * ((offset + t - 1) // (CONTEXT // 2) - 1) - offset
            if begin > 0:
                assert CONTEXT // 2 <= t - begin <= CONTEXT
                with torch.no_grad():
                    weight = min(math.exp(float(token_loss(model, ids[begin : t + 1]) - full)), clip)
            total, count = total + weight * full, count + 1
        offset += len(ids)
    return total / count


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True))


@pytest.mark.parametrize("clip", [1.0, 1.01, 5.0])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_it_is_the_formula(kind: str, clip: float) -> None:
    model = model_of(kind)
    ids = torch.randint(3, VOCABULARY, (2, 31))
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    ours = longce_loss(model, inputs, LongCESettings(CONTEXT, clip), chunk=7)
    expected = by_the_formula(model, [ids[0]], clip) / 2 + by_the_formula(model, [ids[1]], clip) / 2
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients(model, ours), gradients(model, expected), strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_weights_differ_from_plain_cross_entropy() -> None:
    model = model_of("llama")
    ids = torch.randint(3, VOCABULARY, (1, 40))
    ours = longce_loss(model, {"input_ids": ids, "labels": ids}, LongCESettings(CONTEXT), chunk=64)
    plain = model(input_ids=ids, labels=ids).loss
    assert not torch.allclose(ours, plain, rtol=1e-4)


def test_padding_at_the_end_changes_nothing_and_ignored_tokens_do_not_count() -> None:
    model = model_of("llama")
    ids = torch.randint(3, VOCABULARY, (1, 29))
    padded = functional.pad(ids, (0, 9), value=1)
    inputs = {
        "input_ids": padded,
        "labels": padded.where(torch.arange(38) < 29, -100),
        "attention_mask": (torch.arange(38) < 29).long()[None],
    }
    settings = LongCESettings(CONTEXT)
    alone = longce_loss(model, {"input_ids": ids, "labels": ids}, settings, chunk=64)
    torch.testing.assert_close(longce_loss(model, inputs, settings, chunk=64), alone)
    left = {name: value.flip(1) for name, value in inputs.items()}
    with pytest.raises(DataError, match="pad on the right"):
        longce_loss(model, left, settings, chunk=64)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [(20, 18), (5, 33), (30, 4, 4)])
def test_packed_documents_are_each_its_own_text(sizes: tuple[int, ...], masked: bool) -> None:
    model = model_of("llama")
    documents = [torch.randint(3, VOCABULARY, (size,)) for size in sizes]
    labels = [torch.cat([torch.tensor([-100]), document[1:]]) for document in documents]
    inputs = {
        "input_ids": torch.cat(documents)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(size) for size in sizes])[None],
    }
    if masked:
        blocks = torch.block_diag(*(torch.ones(size, size).tril() for size in sizes))
        inputs["attention_mask"] = torch.zeros(blocks.shape).masked_fill(blocks == 0, -math.inf)[None, None]
    ours = longce_loss(model, inputs, LongCESettings(CONTEXT), chunk=64)
    torch.testing.assert_close(ours, by_the_formula(model, documents, 5.0), rtol=1e-5, atol=1e-6)


def test_the_number_of_forwards_follows_from_the_shape_alone() -> None:
    model, counts = model_of("llama"), []
    model.model.register_forward_hook(lambda *_: counts.append(1))
    ids = torch.randint(3, VOCABULARY, (2, 40))
    seen = set()
    for labels in (ids, ids.where(torch.arange(40) > 38, -100), ids.where(torch.arange(40) < 4, -100)):
        counts.clear()
        longce_loss(model, {"input_ids": ids, "labels": labels}, LongCESettings(CONTEXT), chunk=64)
        seen.add(len(counts))
    assert len(seen) == 1


@pytest.mark.parametrize(("context", "clip"), [(0, 5.0), (7, 5.0), (8, 0.5), (8, math.nan), (8, math.inf)])
def test_wrong_settings_are_refused(context: int, clip: float) -> None:
    with pytest.raises(ConfigError, match="longce: (context is an even|clip is a)"):
        LongCESettings(context, clip)
