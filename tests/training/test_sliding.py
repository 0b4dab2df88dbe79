"""The sliding teacher, token by token, against forwards of the stock model on the window that each token belongs to."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_posswap import patch_model
from hf_posswap.errors import ConfigError, DataError
from hf_posswap.training.distill import DistillSettings, distillation_loss, make_teacher
from hf_posswap.training.head import sliding_states, windows_of
from tests.training.tiny_models import VOCABULARY, WINDOW, tiny

SLIDING = DistillSettings(weight=0.6, temperature=1.5, teacher="sliding")
HOW: dict[str, Any] = {"window": WINDOW, "chunk": 7}


def window_start(index: int, size: int) -> int:
    """Return where the first window begins, of those half a window apart, that holds `index`."""
    start = 0
    while index >= start + size:
        start += size // 2
    return start


def stock_logits(model: Any, document: Tensor) -> Tensor:
    """Return the logits [L, V] of each token from a forward of its own, on its window up to itself."""
    found = []
    for index in range(len(document)):
        start = window_start(index, WINDOW)
        with torch.no_grad():
            found.append(model(input_ids=document[None, start : index + 1]).logits[0, -1])
    return torch.stack(found)


def text(rows: int, length: int) -> Tensor:
    torch.manual_seed(length)
    return torch.randint(3, VOCABULARY, (rows, length))


@pytest.mark.slow
@pytest.mark.parametrize("length", [WINDOW - 10, WINDOW, WINDOW + 1, 3 * WINDOW + 5])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_each_token_is_read_in_its_window(kind: str, length: int) -> None:
    model, ids = tiny(kind), text(2, length)
    states, head, _ = sliding_states(model, {"input_ids": ids}, torch.ones_like(ids, dtype=torch.bool), WINDOW)
    found = head(states).view(2, length, -1)
    for row in range(2):
        torch.testing.assert_close(found[row], stock_logits(model, ids[row]), rtol=1e-4, atol=1e-4)


def test_another_window_would_show() -> None:
    """The comparison has power: from windows that begin elsewhere the same tokens have other logits."""
    model, ids = tiny("gpt2"), text(1, WINDOW + 20)
    with torch.no_grad():
        here, elsewhere = (model(input_ids=ids[:, start : WINDOW + 10]).logits[0, -1] for start in (32, 30))
    assert (here - elsewhere).abs().max() > 0.1


@pytest.mark.slow
@given(data=st.data(), size=st.integers(2, 12), length=st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_windows_are_those_of_the_definition(data: st.DataObject, size: int, length: int) -> None:
    """By counting: half-overlapping, from each document's beginning, at least half of one before every later token."""
    begins = data.draw(st.lists(st.booleans(), min_size=length, max_size=length).map(lambda b: [True, *b[1:]]))
    documents = torch.tensor([max(k for k in range(i + 1) if begins[k]) for i in range(length)])[None]
    wanted = torch.tensor(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))[None]
    found = windows_of(wanted, documents, size)
    tokens = wanted[0].nonzero()[:, 0].tolist()
    starts = found.starts[found.of_token].tolist()
    for token, start, at in zip(tokens, starts, found.at.tolist(), strict=True):
        document = int(documents[0, token])
        assert start == document + window_start(token - document, size)
        assert at == token - start < found.width <= size
        assert start == document or at >= size // 2
    assert sorted(set(starts)) == found.starts.tolist(), "a window is read that no token needs"


def test_a_long_text_costs_less_than_two_tokens_for_each() -> None:
    ids = text(2, 8 * WINDOW)
    found = windows_of(torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids), WINDOW)
    assert len(found.rows) * found.width == 2 * (8 * 2 - 1) * WINDOW < 2 * ids.numel()


def watched(model: Any) -> list[Tensor]:
    """Return a list that the tokens of every forward of `model` are put in."""
    seen: list[Tensor] = []
    forward = model.forward
    model.forward = lambda **given: (seen.append(given["input_ids"]), forward(**given))[1]
    return seen


def test_no_more_is_read_at_once_than_is_given_and_padding_is_not_read() -> None:
    model, ids = tiny("gpt2"), text(2, 4 * WINDOW)
    mask = torch.ones_like(ids)
    mask[1, WINDOW:] = 0
    wanted = mask.bool()
    wanted[:, -1] = False
    seen = watched(model)
    states, head, _ = sliding_states(model, {"input_ids": ids, "attention_mask": mask}, wanted, WINDOW)
    assert [len(some) for some in seen] == [8]  # seven windows of the first row, one of the second
    full = sliding_states(model, {"input_ids": ids}, torch.ones_like(wanted), WINDOW)[0].view(2, 4 * WINDOW, -1)
    assert [some.numel() for some in seen[1:]] == [8 * WINDOW, 6 * WINDOW]
    torch.testing.assert_close(states, full[wanted])
    assert head(states).shape == (int(wanted.sum()), VOCABULARY)


def test_packed_documents_are_read_each_by_itself() -> None:
    model, ids = tiny("gpt2"), text(1, 3 * WINDOW + 40)
    lengths = (WINDOW + 30, 50, WINDOW - 10, 34)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    assert positions.shape == ids.shape
    given_ = {"input_ids": ids, "position_ids": positions}
    states, head, _ = sliding_states(model, given_, torch.ones_like(ids, dtype=torch.bool), WINDOW)
    alone = torch.cat([stock_logits(model, document) for document in ids[0].split(lengths)])
    torch.testing.assert_close(head(states), alone, rtol=1e-4, atol=1e-4)


def swapped(kind: str = "gpt2") -> tuple[Any, Any]:
    model = tiny(kind)
    native = copy.deepcopy(model)
    return patch_model(model, "rope", max_length=4 * WINDOW), native


def terms(model: Any, native: Any, inputs: dict[str, Tensor]) -> Iterator[Tensor]:
    """Give the loss of each counted token by the formula, the teacher's part from `stock_logits`."""
    ours = model(input_ids=inputs["input_ids"]).logits
    for row, ids in enumerate(inputs["input_ids"]):
        theirs = stock_logits(native, ids)
        for index, label in enumerate(inputs["labels"][row, 1:].tolist()):
            if label == -100:
                continue
            cross = -ours[row, index].softmax(-1)[label].log()
            p, q = ((one[index] / SLIDING.temperature).softmax(-1) for one in (theirs, ours[row]))
            divergence = (p * (p / q).log()).sum() * SLIDING.temperature**2
            yield (1 - SLIDING.weight) * cross + SLIDING.weight * divergence


@pytest.mark.slow
@pytest.mark.parametrize("length", [WINDOW, 2 * WINDOW + 30])
def test_the_loss_is_the_formula_with_its_gradient(length: int) -> None:
    model, native = swapped()
    ids = text(2, length)
    labels = ids.clone()
    labels[0, :9], labels[1, -5:] = -100, -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    ours = distillation_loss(model, make_teacher(model), inputs, SLIDING, **HOW)
    by_formula = list(terms(model, native, inputs))
    expected = torch.stack(by_formula).sum() / len(by_formula)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    weight = model.transformer.h[0].attn.c_attn.weight
    found, wanted = (torch.autograd.grad(loss, weight)[0] for loss in (ours, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    assert wanted.abs().max() > 1e-3


def test_in_one_window_both_teachers_are_the_same() -> None:
    model, _ = swapped("llama")
    teacher, ids = make_teacher(model), text(2, WINDOW)
    one, other = (
        distillation_loss(model, teacher, {"input_ids": ids, "labels": ids}, DistillSettings(0.9, 1.0, kind), **HOW)
        for kind in ("window", "sliding")
    )
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_batch_that_counts_nothing_adds_nothing() -> None:
    model, _ = swapped()
    ids = text(1, WINDOW + 10)
    inputs = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    assert distillation_loss(model, make_teacher(model), inputs, SLIDING, **HOW, num_items=5) == 0
    with pytest.raises(DataError, match="no token of this batch is counted"):
        distillation_loss(model, make_teacher(model), inputs, SLIDING, **HOW)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="distill: teacher is one of window, sliding, got 'slidng'"):
        DistillSettings(teacher="slidng")  # type: ignore[arg-type]
    model, _ = swapped()
    ids = text(1, 40)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with pytest.raises(DataError, match="needs padding at the end of rows, .* pad on the right"):
        distillation_loss(model, make_teacher(model), {"input_ids": ids, "attention_mask": mask, "labels": ids},
                          SLIDING, **HOW)  # fmt: skip
    with pytest.raises(ConfigError, match="the model's has 300 tokens and the teacher's 200"):
        distillation_loss(model, tiny("gpt2", vocab_size=200), {"input_ids": ids % 200, "labels": ids % 200},
                          SLIDING, **HOW)  # fmt: skip
