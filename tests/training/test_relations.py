"""Relations are the formula on whole matrices, gradients too; what is recorded is what is attended with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posswap import patch_model
from hf_posswap.errors import ConfigError
from hf_posswap.training import distill
from hf_posswap.training.distill import (
    Attended,
    DistillSettings,
    distillation_loss,
    recorded_attention,
    relation_divergence,
)
from tests.training.tiny_models import VOCABULARY, WINDOW, tiny

SCHEMES = {"gpt2": "rope", "llama": "linear"}


def divergence_by_hand(ours: Tensor, theirs: Tensor, rows: Tensor, begins: Tensor) -> Tensor:
    """Return the sum over `rows` of the mean over heads of KL(theirs || ours), token by token."""
    total = torch.zeros((), dtype=ours.dtype)
    for b, i in rows.nonzero().tolist():
        seen = slice(int(begins[b, i]), i + 1)
        p = (theirs[b, :, seen] @ theirs[b, :, i, :, None] * theirs.shape[-1] ** -0.5)[..., 0].softmax(-1)
        q = (ours[b, :, seen] @ ours[b, :, i, :, None] * ours.shape[-1] ** -0.5)[..., 0].softmax(-1)
        total = total + (p * (p.log() - q.log())).sum(-1).mean()
    return total


@pytest.mark.parametrize("block", [1, 64, 2**24])
def test_the_divergence_is_the_formula_and_so_is_its_gradient(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "_MOST_SCORES", block)
    torch.manual_seed(0)
    shapes = ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 6))
    ours = [torch.randn(shape, requires_grad=True) for shape in shapes]
    theirs = [torch.randn(shape) for shape in shapes]
    rows = torch.rand(2, 9) > 0.3
    begins = torch.tensor([[0] * 9, [0] * 4 + [4] * 5])
    found = relation_divergence([Attended(*ours, None)], [Attended(*theirs, None)], rows, begins)
    expected = sum(divergence_by_hand(a, b, rows, begins) for a, b in zip(ours, theirs, strict=True))
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, ours), torch.autograd.grad(expected, ours), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_is_recorded_gives_the_attention_of_the_model(kind: str, implementation: str) -> None:
    model = patch_model(tiny(kind), SCHEMES[kind], max_length=2 * WINDOW)
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, VOCABULARY, (1, 13))
    with torch.no_grad():
        before = model(ids).logits
        with recorded_attention(model) as layers:
            assert torch.equal(model(ids).logits, before)
            rotated = [layer.rotated() for layer in layers]
        assert torch.equal(model(ids).logits, before)
        model.set_attn_implementation("eager")
        weights = model(ids, output_attentions=True).attentions
    assert len(rotated) == len(weights) == model.config.num_hidden_layers
    for (query, key, _), attended in zip(rotated, weights, strict=True):
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query @ key.mT * query.shape[-1] ** -0.5
        expected = scores.masked_fill(~torch.ones(13, 13).tril().bool(), -torch.inf).softmax(-1)
        torch.testing.assert_close(expected, attended, rtol=1e-4, atol=1e-5)


def batch(length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, length))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def relations_by_hand(model: Any, teacher: Any, inputs: dict[str, Tensor]) -> Tensor:
    found = []
    for each in (model, teacher):
        ids = inputs["input_ids"] if each is model else inputs["input_ids"][:, :WINDOW]
        with recorded_attention(each) as layers:
            each(input_ids=ids, attention_mask=inputs["attention_mask"][:, : ids.shape[1]])
            found.append([layer.rotated() for layer in layers])
    mask = inputs["attention_mask"][:, :WINDOW]
    rows = inputs["labels"][:, 1:].ne(-100)
    rows = torch.cat([rows, torch.zeros(2, 1, dtype=torch.bool)], dim=1)[:, :WINDOW]
    begins = mask.argmax(1, keepdim=True).expand(mask.shape)
    total = torch.zeros(())
    for ours, theirs in zip(*found, strict=True):
        total = total + sum(
            divergence_by_hand(a[:, :, : mask.shape[1]], b, rows, begins) for a, b in zip(ours, theirs, strict=True)
        )
    return total / len(found[0]) / inputs["labels"][:, 1:].ne(-100).sum()


@pytest.mark.parametrize("pads", [0, 5])
@pytest.mark.parametrize("length", [WINDOW - 20, WINDOW + 9])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_loss_has_them_once_more(kind: str, length: int, pads: int) -> None:
    model = tiny(kind)
    teacher = copy.deepcopy(model)
    patch_model(model, SCHEMES[kind], max_length=2 * WINDOW)
    inputs = batch(length)
    if pads:
        inputs["attention_mask"][0, :pads] = 0
        inputs["labels"][0, : pads + 1] = -100
    loss = {
        weight: distillation_loss(
            model, teacher, inputs, DistillSettings(1.0, relations=weight), window=WINDOW, chunk=16
        )
        for weight in (0.0, 0.5)
    }
    expected = 0.5 * relations_by_hand(model, teacher, inputs)
    torch.testing.assert_close(loss[0.5] - loss[0.0], expected, rtol=1e-4, atol=1e-5)
    assert float(expected.detach()) > 0
    given = [p for p in model.parameters() if p.requires_grad]
    both = [
        torch.autograd.grad(value, given, retain_graph=True, materialize_grads=True)
        for value in (loss[0.5] - loss[0.0], expected)
    ]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_it_is_nothing_for_the_same_model() -> None:
    model = tiny("llama")
    teacher = copy.deepcopy(model)
    inputs = batch(WINDOW)
    alone, both = (
        distillation_loss(model, teacher, inputs, DistillSettings(1.0, relations=weight), window=WINDOW, chunk=16)
        for weight in (0.0, 1.0)
    )
    torch.testing.assert_close(alone, both)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_activation_checkpointing_gives_the_same_gradients(kind: str) -> None:
    model = tiny(kind)
    teacher = copy.deepcopy(model)
    patch_model(model, SCHEMES[kind], max_length=2 * WINDOW)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs, settings, found = batch(WINDOW), DistillSettings(1.0, relations=1.0), []
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    for reentrant in (None, False):
        model.zero_grad()
        if reentrant is not None:
            enable({"use_reentrant": reentrant})
            model.train()
        distillation_loss(model, teacher, inputs, settings, window=WINDOW, chunk=16).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ConfigError, match="reentrant"):
        distillation_loss(model, teacher, inputs, settings, window=WINDOW, chunk=16)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="relations is for the teacher window"):
        DistillSettings(relations=1.0, teacher="sliding")
    with pytest.raises(ConfigError, match="relations is a number of at least 0, got nan"):
        DistillSettings(relations=float("nan"))
    model = tiny("llama")
    teacher = copy.deepcopy(model)
    patch_model(model, "self_extend", max_length=2 * WINDOW)
    with pytest.raises(ConfigError, match="differently for near and far keys"):
        distillation_loss(model, teacher, batch(WINDOW), DistillSettings(relations=1.0), window=WINDOW, chunk=16)
    assert type(model.model.layers[0].self_attn.config).__name__ == "ConfigView"
