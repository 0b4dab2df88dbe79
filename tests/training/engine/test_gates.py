"""What stops a training, before it begins and while it runs, each with its cause and the last good checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hf_posswap
from hf_posswap.errors import (
    ConfigError,
    DataError,
    NotEnoughMemoryError,
    NumericError,
    PositionRangeError,
    SwapVerificationError,
    TrainingError,
    UnsupportedModelError,
)
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.config import GateSettings
from hf_posswap.training.dryrun import dry_run
from hf_posswap.training.engine.gates import (
    FirstLoss,
    check_first_loss,
    check_positions,
    predicted_limit,
    probe,
    short_of_window,
    short_windows,
)
from hf_posswap.training.engine.memory import training_need
from hf_posswap.training.engine.parallel import Launch
from hf_posswap.training.engine.services import Services
from hf_posswap.training.engine.trainer import explosion
from tests.training.engine_runs import recipe, trained, write_model
from tests.training.tiny_models import tiny

FIRST = FirstLoss(before=3.0, vocabulary=1000)


def plan(kind: str, scheme: str, **options: Any) -> SwapPlan:
    """Return a plan for a tiny model."""
    return plan_swap(tiny(kind), scheme, **options)


def test_the_probe_is_the_models_own_loss() -> None:
    model = tiny("llama").train()
    ids = torch.randint(300, (2, 20))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    found = probe(model, batch, causal=True)
    assert model.training
    assert found == pytest.approx(model.eval()(**batch).loss.item(), rel=1e-6)
    plain = probe(model, batch | {"position_ids": torch.zeros_like(ids)}, causal=True, plain=7)
    assert plain == pytest.approx(model(input_ids=ids[:, :7], labels=ids[:, :7]).loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("swap", "above", "limit"),
    [
        (None, None, 3.25),
        (("llama", "rope", {}), None, 3.25),
        (("llama", "yarn", {"factor": 4}), None, 4.5),
        (("gpt2", "learned", {"max_length": 128}), None, 4.5),
        (("gpt2", "alibi", {}), None, FIRST.uniform + 1.5),
        (("llama", "nope", {}), None, FIRST.uniform + 1.5),
        (("gpt2", "alibi", {}), 0.5, 3.5),
    ],
)
def test_the_limit_follows_from_the_plan(swap: Any, above: float | None, limit: float) -> None:
    made = None if swap is None else plan(swap[0], swap[1], **swap[2])
    assert predicted_limit(made, FIRST, above) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("loss", "plain", "first", "swap", "cause"),
    [
        (9.0, 3.1, FIRST, True, r"the positions or masks of data.packing, .* the swapped model has 3.100"),
        (9.0, 9.0, FIRST, True, r"the fields of yarn\(.*\) \(base, layout, factor or original_length\) do not fit"),
        (9.0, 9.0, FIRST, False, r"the data: without a swap"),
        (9.5, 9.0, FirstLoss(7.0, 1000), True, r"no better than guessing \(6.91\): a wrong tokenizer"),
        (float("nan"), 3.1, FIRST, True, r"first loss nan, 3.000 before the swap: the plan predicts at most 4.50"),
    ],
)
def test_a_start_far_above_the_plan_is_refused_with_its_cause(
    loss: float, plain: float, first: FirstLoss, swap: bool, cause: str
) -> None:
    made = plan("llama", "yarn", factor=4) if swap else None
    with pytest.raises(TrainingError, match=cause):
        check_first_loss(loss, lambda: plain, first, made, None)
    assert check_first_loss(first.before, pytest.fail, first, made, None).startswith("first loss")


@pytest.mark.slow
def test_a_wrong_scheme_is_stopped_before_the_first_step(tmp_path: Path) -> None:
    """A model that was trained, patched with a base that is far from its own, starts far above what it had."""
    base = trained(
        tmp_path,
        "training.max_steps=40",
        "training.save_steps=40",
        "swap.scheme=null",
        "swap.max_length=null",
        kind="llama",
    )
    spoilt = ("model.name=" + str(base.model), "out=" + str(tmp_path / "spoilt"), "gates.start_above=0.05")
    with pytest.raises(TrainingError, match=r"first loss .* Likely cause: .* gates.start_above sets the limit"):
        trained(tmp_path, *spoilt, kind="llama", swap={"scheme": {"name": "rope", "base": 1.5}})
    assert not any((tmp_path / "spoilt").rglob("checkpoint-*"))


def test_windows_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises((PositionRangeError, DataError), match=r"128"):
        trained(tmp_path, "data.length=128", swap={"scheme": None, "max_length": None})
    batch = {"position_ids": torch.tensor([[0, 1, 70]])}
    with pytest.raises(PositionRangeError, match=r"reach position 70, .* set swap.max_length to 71, or a smaller"):
        check_positions(batch, 3, 64, 0, unbounded=False)
    check_positions(batch, 3, 71, 0, unbounded=False)
    check_positions(batch, 3, 64, 0, unbounded=True)
    check_positions({"position_ids": torch.tensor([[2, 3]])}, 2, 2, 2, unbounded=False)


def test_windows_shorter_than_those_of_the_base_are_warned_of_where_a_rotation_is_scaled() -> None:
    made, near = plan("llama", "yarn", max_length=256), {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
    said = short_of_window(16, 64, near, made)
    assert said is not None
    assert "windows of 16 tokens (data.length) are shorter than the 64" in said
    assert "the swap is for 256: the new angles are trained at no distance above 16" in said
    assert short_of_window(64, 64, near, made) is None
    far = near | {"position_ids": torch.cat([torch.arange(8), torch.arange(200, 208)]).repeat(2, 1)}
    assert short_of_window(16, 64, far, made) is None
    assert short_of_window(16, 64, near | {"position_ids": torch.arange(16).repeat(2, 1)}, made) is not None
    assert short_of_window(16, 64, near, plan("gpt2", "rope", max_length=256)) is None
    assert short_of_window(16, 64, near, plan("llama", "alibi", max_length=256)) is None
    assert short_of_window(16, 64, near, None) is None


def test_a_swap_that_is_not_in_force_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posswap.training.engine import preparing

    def spoilt(model: Any, scheme: Any, **options: Any) -> Any:
        made = hf_posswap.patch_model(model, scheme, **options)
        made.transformer.posswap._fixed.inv_freq.mul_(2)  # as a library that meddles with the model would
        return made

    monkeypatch.setattr(preparing, "patch_model", spoilt)
    with pytest.raises(SwapVerificationError):
        trained(tmp_path)


@pytest.mark.slow
def test_a_training_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    little = Services(free_bytes=lambda device: 1000)
    with pytest.raises(
        NotEnoughMemoryError,
        match=r"needs about .*optimizer.* 1000 B are free on the device, where .* helps: a smaller",
    ):
        trained(tmp_path, services=little)
    assert trained(tmp_path, "gates.start=false", services=little).model.is_dir()


@pytest.mark.parametrize(
    ("settings", "part", "relation"),
    [
        (("training.gradient_checkpointing=true",), "activations", "less"),
        (("training.per_device_train_batch_size=8",), "activations", "more"),
        (("objective.chunk=8",), "logits", "less"),
        (("training.bf16=true",), "activations", "less"),
    ],
)
def test_the_estimate_follows_the_settings(tmp_path: Path, settings: tuple[str, ...], part: str, relation: str) -> None:
    model = tiny("gpt2")
    plain, other = (
        training_need(model, recipe(tmp_path, *more), Launch(), biased=(), chunk=8 if more == settings else 64)
        for more in ((), settings)
    )
    assert (getattr(other, part) < getattr(plain, part)) == (relation == "less")


def test_the_estimate_knows_scores_of_every_length_and_the_teacher(tmp_path: Path) -> None:
    """Scores of the whole are [rows, H, L, L], of a fourth four times as many rows of a sixteenth: by counting."""
    model, wanted = (
        tiny("gpt2"),
        recipe(tmp_path, "data.length=64", "data.cut=[4, 1]", "training.per_device_train_batch_size=3"),
    )
    plain, whole, short, both = (
        training_need(model, wanted, Launch(), biased=biased, chunk=8).layer for biased in ((), (64,), (16,), (64, 16))
    )
    scores = 4 * 4 * 4  # copies, heads, bytes
    assert (whole - plain, short - plain) == (scores * 3 * 64**2, scores * 12 * 16**2)
    assert both == whole
    taught = training_need(model, wanted, Launch(), biased=(), chunk=8, teacher=tiny("gpt2"))
    assert taught.teacher == taught.weights
    alone = training_need(model, wanted, Launch(), biased=(), chunk=8)
    words = model.config.vocab_size
    assert taught.logits - alone.logits == 2 * 8 * words * 4, "those of the teacher, and its chances"
    taught, alone = (
        training_need(model, wanted, Launch(), biased=(), chunk=0, teacher=teacher) for teacher in (tiny("gpt2"), None)
    )
    assert taught.total - alone.total == taught.weights + taught.logits - alone.logits, "all logits: the forward's end"


def test_sharded_weights_are_counted_in_parts(tmp_path: Path) -> None:
    model, wanted = tiny("gpt2"), recipe(tmp_path)
    whole = training_need(model, wanted, Launch(4), biased=(), chunk=0)
    part = training_need(model, wanted, Launch(4, fsdp=2), biased=(), chunk=0)
    assert whole.weights == sum(p.numel() * 4 for p in model.parameters()) == 4 * part.weights
    assert whole.optimizer == 2 * whole.gradients == 4 * part.optimizer


@pytest.mark.slow
def test_nan_stops_with_the_last_good_checkpoint_named(tmp_path: Path) -> None:
    settings = (
        "training.learning_rate=1e30",
        "training.max_grad_norm=0",
        "training.warmup_steps=0",
        "training.save_steps=1",
    )
    with pytest.raises(NumericError, match=r"the loss became \w+ at step \d of 6 .* smaller learning rate") as caught:
        trained(tmp_path, *settings, "gates.explosion=0")
    named = re.search(r"The last good checkpoint is (\S+)\. Use", str(caught.value))
    assert named is not None
    assert Path(named[1]).is_dir()


@pytest.mark.slow
def test_an_explosion_stops_with_the_last_good_checkpoint_named(tmp_path: Path) -> None:
    settings = (
        "training.learning_rate=3.0",
        "training.max_steps=40",
        "training.max_grad_norm=0",
        "training.save_steps=1",
    )
    with pytest.raises(NumericError, match=r"exploded by step \d+: .* The last good checkpoint is .*checkpoint-\d+\."):
        trained(tmp_path, *settings, "gates.window=2", "gates.explosion=1")


def test_an_explosion_is_seen_against_the_best_mean() -> None:
    settings = GateSettings(explosion=1.0, window=3)
    falling = [5.0, 4.0, 3.0, 2.0, 2.0, 2.0]
    assert explosion(falling, settings) is None
    assert explosion([*falling, 3.0], settings) is None
    assert explosion([*falling, 3.1], settings) == "3.10, 1.10 nats above the best mean of 3 (2.00)"
    assert explosion([*falling, 30.0], GateSettings(explosion=0)) is None
    assert explosion([1.0, 9.0], settings) is None


def test_short_windows_are_the_beginnings_of_held_out_documents() -> None:
    documents = [np.arange(n, dtype=np.int32) for n in (5, 30, 20, 7)]
    for window, ids in ((20, [list(range(20))] * 2), (100, [list(range(30))])):
        assert {name: rows.tolist() for name, rows in short_windows(documents, window).items()} == {
            "input_ids": ids,
            "labels": ids,
        }


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "gpt2", vocab_size=100)
    with pytest.raises(DataError, match=r"use the tokenizer that belongs to the model"):
        trained(tmp_path)


def test_a_model_of_two_texts_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"T5ForCond\w+ is an encoder-decoder, .* with transformers' Seq2SeqTrainer"
    ):
        trained(tmp_path, kind="t5", swap={"scheme": "alibi"})


def test_evaluation_lengths_need_who_evaluates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs Services.evaluate"):
        trained(tmp_path, "evaluation.lengths=[16]")


def test_lengths_that_no_held_out_document_has_are_refused_before_the_first_step(tmp_path: Path) -> None:
    services = Services(evaluate=lambda model, documents, lengths, limit: dict.fromkeys(lengths, 1.0))
    with pytest.raises(DataError, match=r"no held-out document has 9000 tokens \(the longest has \d+\): give longer"):
        trained(tmp_path, "evaluation.lengths=[16,9000]", services=services)
    assert not any((tmp_path / "run").rglob("checkpoint-*"))


def test_a_swapped_base_is_trained_as_it_is(tmp_path: Path) -> None:
    unswapped = tmp_path / "gpt2"
    write_model(unswapped)
    alone = {"swap": {"scheme": None, "max_length": None}, "trainable": {"what": "positions"}}
    with pytest.raises(ConfigError, match="trainable.what positions needs a swap: .* and .*gpt2 carries none"):
        trained(tmp_path, "training.max_steps=2", **alone)
    swapped = hf_posswap.patch_model(hf_posswap.load(unswapped), "kerple", max_length=256)
    hf_posswap.save(swapped, tmp_path / "swapped", tokenizer=byte_tokenizer())
    names = (f"model.name={tmp_path / 'swapped'}", "training.max_steps=2")
    with pytest.raises(ConfigError, match="already carries kerple.*set swap.scheme=null"):
        trained(tmp_path, *names)
    with pytest.raises(ConfigError, match="already carries kerple.*set swap.scheme=null"):
        dry_run(recipe(tmp_path, *names))
    finished = trained(tmp_path, *names, **alone)
    before, after = swapped.state_dict(), hf_posswap.load(finished.model).state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition(".")[2] for name in moved} == {"raw_r1", "raw_r2"}
