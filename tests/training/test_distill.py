"""Distillation is the formula, on whole logits; the teacher is the model before the swap, and stays so."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_posswap import patch_model
from hf_posswap.errors import ConfigError, DataError, UnsupportedModelError
from hf_posswap.training.distill import DistillSettings, distillation_loss, make_teacher
from tests.training.tiny_models import VOCABULARY, WINDOW, tiny


def pair(kind: str, scheme: str = "rope") -> tuple[Any, Any]:
    model = tiny(kind)
    native = copy.deepcopy(model)
    patch_model(model, scheme, max_length=2 * WINDOW)
    return model, native


def batch(length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, length))
    labels = ids.clone()
    labels[0, :9] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def by_the_formula(model: Any, teacher: Any, inputs: dict[str, Tensor], settings: DistillSettings) -> Tensor:
    """Return the loss token by token, from whole probabilities."""
    ours = model(input_ids=inputs["input_ids"]).logits
    with torch.no_grad():
        theirs = teacher(input_ids=inputs["input_ids"][:, :WINDOW]).logits
    total, count = torch.zeros(()), 0
    for row in range(len(ours)):
        for t in range(ours.shape[1] - 1):
            label = inputs["labels"][row, t + 1]
            if label == -100:
                continue
            cross = -ours[row, t].softmax(-1)[label].log()
            count += 1
            if t >= WINDOW:
                total = total + cross
                continue
            p = (theirs[row, t] / settings.temperature).softmax(-1)
            q = (ours[row, t] / settings.temperature).softmax(-1)
            divergence = (p * (p / q).log()).sum() * settings.temperature**2
            total = total + (1 - settings.weight) * cross + settings.weight * divergence
    return total / count


@pytest.mark.parametrize("length", [WINDOW - 20, WINDOW + 30])
@pytest.mark.parametrize("settings", [DistillSettings(), DistillSettings(0.25, 2.0), DistillSettings(1.0)])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_it_is_the_formula(kind: str, settings: DistillSettings, length: int) -> None:
    model, native = pair(kind, "alibi")
    inputs = batch(length)
    ours = distillation_loss(model, make_teacher(model), inputs, settings, window=WINDOW, chunk=7)
    expected = by_the_formula(model, native, inputs, settings)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(ours, list(model.parameters()), allow_unused=True)
    for one, other in zip(
        found, torch.autograd.grad(expected, list(model.parameters()), allow_unused=True), strict=True
    ):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def outputs_of_blocks(model: Any, ids: Tensor) -> list[Tensor]:
    """Return what each block but the last gives, [B, L, E] each, by hooks."""
    blocks = model.transformer.h if hasattr(model, "transformer") else model.base_model.get_decoder().layers
    found: list[Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    hooks = [block.register_forward_hook(keep) for block in blocks]
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return found[:-1]


@pytest.mark.parametrize("teacher", ["window", "sliding"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gptj"])
def test_states_are_compared_after_each_layer_but_the_last(kind: str, teacher: Any) -> None:
    model, native = pair(kind)
    length = WINDOW + WINDOW // 2
    inputs = batch(length)
    how: dict[str, Any] = {"window": WINDOW, "chunk": 16}
    without, with_states = (
        distillation_loss(model, make_teacher(model), inputs, DistillSettings(teacher=teacher, states=states), **how)
        for states in (0.0, 0.7)
    )
    ours = outputs_of_blocks(model, inputs["input_ids"])
    with torch.no_grad():
        theirs = outputs_of_blocks(native, inputs["input_ids"][:, :WINDOW])
        later = outputs_of_blocks(native, inputs["input_ids"][:, WINDOW // 2 :])
    counted = [
        (row, t)
        for row, t in np.ndindex(2, length - 1)
        if inputs["labels"][row, t + 1] != -100 and (teacher == "sliding" or t < WINDOW)
    ]
    shares = []
    for mine, first, second in zip(ours, theirs, later, strict=True):
        known = {(row, t): first[row, t] if t < WINDOW else second[row, t - WINDOW // 2] for row, t in counted}
        mean = torch.stack(list(known.values())).mean(0)
        variance = sum(float(((state - mean) ** 2).sum()) for state in known.values()) / len(counted)
        shares.append(sum(((mine[at] - state) ** 2).sum() for at, state in known.items()) / variance)
    expected = 0.7 * sum(shares) / len(shares) / (inputs["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(with_states - without, expected, rtol=1e-4, atol=1e-5)
    found, wanted = (
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for loss in (with_states - without, expected)
    )
    for one, other in zip(found, wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("counted", [1, 2])
def test_states_of_a_single_token_or_of_equal_ones_have_no_variance_and_keep_the_loss_finite(counted: int) -> None:
    """A micro-batch may have one counted token: its distance was divided by a variance of zero, which gave infinity."""
    model = patch_model(tiny("gpt2"), "nope")
    teacher = patch_model(make_teacher(model), "nope")  # so that equal tokens have equal states
    for parameter in model.parameters():
        parameter.data.add_(0.01)
    ids = torch.full((1, 8), 3)
    labels = torch.where(torch.arange(8)[None] < 8 - counted, -100, ids)
    losses = {}
    for states in (0.0, 0.7):
        model.zero_grad()
        settings = DistillSettings(states=states)
        inputs = {"input_ids": ids, "labels": labels}
        losses[states] = distillation_loss(model, teacher, inputs, settings, window=WINDOW, chunk=16)
        losses[states].backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool(losses[0.7].isfinite())
    assert bool(losses[0.7] > losses[0.0]) == (counted == 2)


def test_a_model_of_one_layer_has_no_states_before_the_last() -> None:
    model = tiny("gpt2", n_layer=1)
    patch_model(model, "rope", max_length=2 * WINDOW)
    settings = DistillSettings(states=1.0)
    with pytest.raises(UnsupportedModelError, match="has only one layer: distill with states=0"):
        distillation_loss(model, make_teacher(model), batch(20), settings, window=WINDOW, chunk=16)


def test_the_teacher_is_the_model_before_the_swap_and_does_not_learn() -> None:
    model, native = pair("gpt2")
    teacher = make_teacher(model)
    inputs = batch(40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    distillation_loss(model, teacher, inputs, DistillSettings(), window=WINDOW, chunk=16).backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(teacher(inputs["input_ids"]).logits, native(inputs["input_ids"]).logits)
    assert not any(p.requires_grad for p in teacher.parameters())
    assert model.transformer.wte.weight is not teacher.transformer.wte.weight


def test_a_model_that_is_its_teacher_has_no_divergence() -> None:
    native = tiny("llama")
    settings = DistillSettings(weight=1.0, temperature=3.0)
    loss = distillation_loss(native, copy.deepcopy(native), batch(40), settings, window=WINDOW, chunk=16)
    assert abs(float(loss.detach())) < 1e-5


def test_micro_batches_add_up() -> None:
    model, _ = pair("gpt2")
    teacher, inputs = make_teacher(model), batch(WINDOW + 10)
    how: dict[str, Any] = {"window": WINDOW, "chunk": 16}
    whole = distillation_loss(model, teacher, inputs, DistillSettings(), **how)
    items = (inputs["labels"][:, 1:] != -100).sum()
    parts = [
        distillation_loss(model, teacher, {name: value[row : row + 1] for name, value in inputs.items()},
                          DistillSettings(), num_items=items, **how)
        for row in range(2)
    ]  # fmt: skip
    torch.testing.assert_close(sum(parts), whole)


def test_jumping_positions_are_for_the_model_and_packed_documents_for_both() -> None:
    model, native = pair("gpt2")
    teacher, inputs = make_teacher(model), batch(40)
    jumps = torch.arange(40).repeat(2, 1)
    jumps[:, 20:] += 50
    seen: list[dict[str, Any]] = []
    forward = teacher.forward
    teacher.forward = lambda **given: (seen.append(given), forward(**given))[1]
    how: dict[str, Any] = {"window": WINDOW, "chunk": 16}
    distillation_loss(model, teacher, inputs | {"position_ids": jumps}, DistillSettings(), **how)
    assert "position_ids" not in seen[0]
    packed = {"input_ids": inputs["input_ids"], "labels": inputs["labels"]}
    packed |= {"position_ids": torch.arange(20).repeat(2, 2)}
    distillation_loss(model, teacher, packed, DistillSettings(), **how)
    whole = next(given for given in seen if "position_ids" in given)
    assert torch.equal(whole["position_ids"], packed["position_ids"])
    assert "attention_mask" not in whole


def of_single_rows(model: Any, native: Any, rows: list[Tensor], settings: DistillSettings) -> Tensor:
    """Return the loss of documents, each in a forward of its own, over all of their counted tokens."""
    count = sum(len(row) - 1 for row in rows)
    parts = []
    for row in rows:
        inputs = {"input_ids": row[None], "labels": row[None]}
        parts.append(by_the_formula(model, native, inputs, settings) * (len(row) - 1) / count)
    return torch.stack(parts).sum()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
def test_behind_padding_the_teacher_reads_as_it_reads_the_text_alone(kind: str, attention: str) -> None:
    model = tiny(kind, attention)
    native = copy.deepcopy(model)
    patch_model(model, "rope", max_length=2 * WINDOW)
    text, pads = torch.randint(3, VOCABULARY, (30,)), 11
    ids = torch.cat([torch.zeros(pads, dtype=torch.long), text])[None]
    mask = (torch.arange(30 + pads) >= pads).long()[None]
    labels = torch.where(mask.bool(), ids, -100)
    labels[0, pads] = -100  # its target would be told by padding
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    inputs |= {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    found = distillation_loss(model, native, inputs, DistillSettings(), window=WINDOW, chunk=16)
    wanted = of_single_rows(model, native, [text], DistillSettings())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    jumps = inputs | {"position_ids": inputs["position_ids"] + 7 * (torch.arange(30 + pads) > 20)}
    ours = model(**{name: value for name, value in jumps.items() if name != "labels"}).logits
    alone = native(input_ids=text[None]).logits
    full = DistillSettings(weight=1.0)  # the divergence alone
    p, q = alone[0, :-1].log_softmax(-1), ours[0, pads:-1].log_softmax(-1)
    wanted = (p.exp() * (p - q)).sum(-1).mean()
    found = distillation_loss(model, native, jumps, full, window=WINDOW, chunk=16)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def document_masks(lengths: tuple[int, ...], rows: int) -> list[Tensor]:
    """Return the mask of packed documents as booleans and as numbers that are added."""
    seen = torch.block_diag(*[torch.ones(length, length).tril() for length in lengths]).bool()
    seen = seen[None, None].expand(rows, 1, -1, -1)
    return [seen, torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)]


@pytest.mark.parametrize("teacher", ["window", "sliding"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("lengths", [(30, 20, 10), (40, 60, 12)])
def test_a_document_mask_keeps_the_teacher_in_each_document(kind: str, lengths: tuple[int, ...], teacher: Any) -> None:
    model = tiny(kind)
    native = copy.deepcopy(model)
    patch_model(model, "rope", max_length=4 * WINDOW)
    ids = torch.randint(3, VOCABULARY, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = torch.where(positions == 0, -100, ids)
    settings, read = DistillSettings(teacher=teacher), len(ids[0]) if teacher == "sliding" else WINDOW
    total, count, start = torch.zeros(()), 0, 0
    for length in lengths:
        row = ids[:, start : start + length]
        ours, theirs = model(input_ids=row).logits[0], native(input_ids=row).logits[0]
        for t in range(length - 1):
            p, q = theirs[t].log_softmax(-1), ours[t].log_softmax(-1)
            cross, divergence = -q[row[0, t + 1]], (p.exp() * (p - q)).sum()
            total = total + (0.5 * cross + 0.5 * divergence if start + t < read else cross)
            count += 1
        start += length
    for mask in document_masks(lengths, 1):
        for where in ({"position_ids": positions}, {}):
            if not where and kind == "gpt2" and teacher == "window":
                continue  # without positions its table counts on over the documents, as stock does
            inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, **where}
            found = distillation_loss(model, native, inputs, settings, window=WINDOW, chunk=16)
            torch.testing.assert_close(found, total / count, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("teacher", ["window", "sliding"])
def test_a_mask_of_something_else_than_documents_is_refused(teacher: Any) -> None:
    model, native = pair("gpt2")
    ids = torch.randint(3, VOCABULARY, (1, 20))
    prefix = torch.ones(20, 20).tril().bool()
    prefix[:5, :5] = True
    local = torch.ones(20, 20).tril().triu(-4).bool()
    heads = torch.ones(20, 20).tril().bool().expand(1, 4, -1, -1).clone()
    heads[0, 1] = local
    for mask in (prefix[None, None], local[None, None], heads):
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        with pytest.raises(DataError, match="is not causal within whole documents"):
            distillation_loss(model, native, inputs, DistillSettings(teacher=teacher), window=WINDOW, chunk=16)
    with pytest.raises(DataError, match=r"reads a mask \[B, L\] or \[B, 1, L, L\], got torch.Size\(\[1, 20, 20\]\)"):
        distillation_loss(model, native, inputs | {"attention_mask": local[None]}, DistillSettings(teacher=teacher),
                          window=WINDOW, chunk=16)  # fmt: skip


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"distill: weight lies above 0 .* got 0.0; temperature .* got -1.0"):
        DistillSettings(0.0, -1.0)
    with pytest.raises(ConfigError, match=r"distill: states is a number of at least 0, got nan"):
        DistillSettings(states=float("nan"))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no swap: start from the unswapped checkpoint"):
        make_teacher(tiny("gpt2"))
    model, _ = pair("gpt2")
    inputs = batch(20)
    how: dict[str, Any] = {"window": WINDOW, "chunk": 16}
    with pytest.raises(ConfigError, match="the model's has 300 tokens and the teacher's 200"):
        distillation_loss(model, tiny("gpt2", vocab_size=200), inputs | {"input_ids": inputs["input_ids"] % 200},
                          DistillSettings(), **how)  # fmt: skip
    nothing = inputs | {"labels": torch.full_like(inputs["labels"], -100)}
    with pytest.raises(DataError, match="no token of this batch is counted"):
        distillation_loss(model, make_teacher(model), nothing, DistillSettings(), **how)


def test_a_model_that_was_loaded_with_its_swap_has_no_teacher(tmp_path: Any) -> None:
    import hf_posswap

    model, _ = pair("gpt2")
    hf_posswap.save(model, tmp_path)
    with pytest.raises(ConfigError, match="was loaded with its swap, so its old positions are unknown"):
        make_teacher(hf_posswap.load(tmp_path))
