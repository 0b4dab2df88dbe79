"""`PosswapCallback` in the Trainers of other libraries: what it proves, stops, and leaves in checkpoints."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_posswap
from hf_posswap import PosswapCallback, load, patch_model, unpatch_model
from hf_posswap.checkpoints.card import CardFacts, write_card
from hf_posswap.errors import (
    CheckpointError,
    NotPatchedError,
    NumericError,
    OptionError,
    PositionRangeError,
    SwapVerificationError,
    TrainingError,
    TrainingWarning,
    UnknownNameError,
)
from hf_posswap.patching.record.training import swap_digest, training_of
from hf_posswap.patching.verify.verify_swap import copy_sharing_weights
from hf_posswap.schemes import make_scheme
from hf_posswap.training.engine.parallel import shard_on_cpus
from hf_posswap.training.fresh import byte_tokenizer
from hf_posswap.training.trainer_proof import check_scheme, dataset_digest, is_sharded, model_inside
from hf_posswap.utils.digests import weights_digest
from tests import forked
from tests.training.tiny_models import VOCABULARY, WINDOW, tiny

pytest.importorskip("accelerate")
LENGTH = 32
TRL_ASKS = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is:FutureWarning")  # TRL's default, PEFT
SWAPS = {"yarn:factor=4": "llama", "alibi": "llama", "kerple": "gpt2", "rope": "bloom"}
QUIET: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 0, "save_steps": 2}


def rows(count: int = 8, length: int = LENGTH, seed: int = 0) -> list[dict[str, list[int]]]:
    """Return rows of random tokens and labels."""
    ids = torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


class OnCpus(Trainer):
    """A Trainer that keeps FSDP2 on CPUs, which accelerate turns into DDP."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.is_fsdp_enabled = shard_on_cpus(self.accelerator) or self.is_fsdp_enabled


def trainer(model: Any, folder: Path, *callbacks: TrainerCallback, data: Any = None, **options: Any) -> Trainer:
    chosen: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    arguments = TrainingArguments(str(folder), **chosen | QUIET | options)
    given = {"train_dataset": rows() if data is None else data, "eval_dataset": rows(2, length=400)}
    return OnCpus(model, arguments, callbacks=list(callbacks), **given)


def swapped(scheme: str = "yarn:factor=4", **options: Any) -> Any:
    return patch_model(tiny(SWAPS.get(scheme, "llama"), **options), scheme, max_length=4 * WINDOW)


def logits(model: Any) -> torch.Tensor:
    ids = torch.tensor([row["input_ids"] for row in rows(2, seed=9)])
    with torch.no_grad():
        return model.eval()(ids).logits


class At(TrainerCallback):
    """Does something at the end of one step."""

    def __init__(self, step: int, do: Callable[[Any], object]) -> None:
        self.step, self.do, self.steps = step, do, 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps = state.global_step
        if state.global_step == self.step:
            self.do(model)


def watch() -> At:
    """Return a callback that counts steps."""
    return At(0, lambda model: None)


@pytest.mark.parametrize("scheme", SWAPS)
def test_a_training_is_proved_recorded_and_saved_with_its_swap(scheme: str, tmp_path: Path) -> None:
    base = tiny(SWAPS[scheme])
    base.name_or_path = "me/tiny"
    before, model = weights_digest(base), patch_model(base, scheme, max_length=4 * WINDOW)
    proof = PosswapCallback(scheme)
    run = trainer(model, tmp_path, proof)
    run.train()
    run.save_model(str(tmp_path / "model"))
    assert proof.verification is not None
    assert proof.verification.checks.keys() == hf_posswap.verify_swap(model).checks.keys()
    for folder, steps in [("checkpoint-2", 2), ("checkpoint-4", 4), ("model", 4)]:
        config = json.loads((tmp_path / folder / "config.json").read_text())
        training = training_of(load(tmp_path / folder).config)
        assert training is not None
        assert training.to_dict() == config["posswap_training"]
        assert (training.base, training.base_weights, training.steps) == ("me/tiny", before, steps)
        assert training.tokens == steps * 2 * LENGTH
        assert training.swap == swap_digest(hf_posswap.swap_plan(model).record)
        assert training.data == dataset_digest(rows())
        assert training.software["torch"] == torch.__version__
        assert training.what == "full"
    assert torch.equal(logits(load(tmp_path / "model")), logits(model))
    card = write_card(tmp_path / "model", CardFacts("me/mine"), online=False)
    assert str(training) in card
    assert f"| torch | {torch.__version__} | {torch.__version__} |" in re.sub(" +", " ", card)
    assert not [finding for finding in hf_posswap.doctor(tmp_path / "model").findings if finding.severity == "error"]
    shown = hf_posswap.explain(str(tmp_path / "model")).report
    assert shown.trained == str(training)


def test_it_changes_no_weight_that_a_training_without_it_gives(tmp_path: Path) -> None:
    ends = []
    for callbacks in ([], [PosswapCallback()]):
        model = swapped("kerple", attn_pdrop=0.1)  # dropout: the proof must not take random numbers
        trainer(model, tmp_path / str(len(callbacks)), *callbacks).train()
        ends.append(weights_digest(model))
    assert ends[0] == ends[1]


def test_a_model_without_a_swap_is_refused_before_the_first_step(tmp_path: Path) -> None:
    seen = watch()
    with pytest.raises(NotPatchedError, match=r"carries no swap.*patch_model.*require=False"):
        trainer(tiny("llama"), tmp_path, PosswapCallback(), seen).train()
    assert seen.steps == 0


def test_a_control_is_recorded_without_a_swap(tmp_path: Path) -> None:
    model = tiny("llama")
    before = weights_digest(model)
    trainer(model, tmp_path, PosswapCallback(require=False)).train()
    training = training_of(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4").config)
    assert training is not None
    assert (training.swap, training.base_weights, training.steps) == (None, before, 4)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ("linear:factor=4", "it carries yarn"),
        ("yarn:factor=8", r"its factor is 4\.0"),
        ("yarn:factor=4,base=500", "base"),
    ],
)
def test_another_scheme_than_expected_is_refused(expected: str, message: str, tmp_path: Path) -> None:
    seen = watch()
    with pytest.raises(SwapVerificationError, match=message):
        trainer(swapped(), tmp_path, PosswapCallback(expected), seen).train()
    assert seen.steps == 0


@pytest.mark.parametrize(
    ("name", "scheme", "others"),
    [
        ("llama", "native + ssmax", ("native + alibi", "native + ssmax:s=9", "native + ssmax + alibi", "rope + alibi")),
        ("llama", "yarn:factor=4 + alibi", ("yarn:factor=2 + alibi", "rope + alibi", "sum")),
        ("gpt2", "native + t5", ("native + alibi", "learned + rope", "together", "t5")),
        ("gpt2", "learned + alibi", ("learned + rope", "native + t5", "sinusoidal + alibi")),
    ],
)
def test_a_sum_is_proved_part_by_part(name: str, scheme: str, others: tuple[str, ...]) -> None:
    model = patch_model(tiny(name), scheme)
    check_scheme(model, make_scheme(scheme))
    for other in others:
        with pytest.raises(SwapVerificationError, match="was to prove .*, and .* has another mechanism: it carries"):
            check_scheme(model, make_scheme(other))


def _plain_config(model: Any) -> None:
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}


def _plain_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.copy_(tiny("llama").model.rotary_emb.inv_freq)


LOSSES: dict[str, Callable[[Any], object]] = {
    "unpatched": unpatch_model,
    "config": _plain_config,
    "frequencies": _plain_frequencies,
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_mechanism_that_is_lost_before_training_stops_it(kind: str, tmp_path: Path) -> None:
    model, seen = swapped(), watch()
    run = trainer(model, tmp_path, PosswapCallback(), seen)
    LOSSES[kind](model)
    with pytest.raises((NotPatchedError, SwapVerificationError)):
        run.train()
    assert seen.steps == 0


@pytest.mark.parametrize("kind", LOSSES)
def test_a_mechanism_that_is_lost_in_training_stops_it_before_anything_is_saved(kind: str, tmp_path: Path) -> None:
    seen = At(2, LOSSES[kind])
    with pytest.raises(SwapVerificationError, match=r"lost its swap by step|no longer intact"):
        trainer(swapped(), tmp_path, seen, PosswapCallback()).train()
    assert seen.steps == 2
    assert not (tmp_path / "checkpoint-2").exists()


@pytest.mark.parametrize("event", ["on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"])
def test_a_mechanism_that_is_lost_within_a_step_stops_it_before_anything_is_saved(event: str, tmp_path: Path) -> None:
    class Loses(TrainerCallback):
        """Undoes the swap at an event within the second step."""

    def lose(self: Any, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1 and getattr(model, "_posswap", None) is not None:
            unpatch_model(model)

    setattr(Loses, event, lose)
    run = trainer(swapped(), tmp_path, Loses(), PosswapCallback(), gradient_accumulation_steps=2)
    with pytest.raises(SwapVerificationError, match="lost its swap by step"):
        run.train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_trainer_whose_model_was_replaced_is_refused(tmp_path: Path) -> None:
    run = trainer(swapped(), tmp_path, PosswapCallback())
    run.model = run.model_wrapped = tiny("llama")
    with pytest.raises(NotPatchedError, match="carries no swap"):
        run.train()


@pytest.mark.parametrize(("decay", "learned"), [(0.1, True), (0.0, True), (0.1, False)])
def test_weight_decay_of_learned_slopes_is_warned_of(decay: float, learned: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(swapped(f"alibi:learned={learned}"), tmp_path, PosswapCallback(), weight_decay=decay).train()
    told = [str(one.message) for one in caught if issubclass(one.category, TrainingWarning)]
    assert [text.partition(" towards")[0] for text in told] == (
        ["weight decay of 0.1 pulls model.posswap.raw_slopes"] if decay and learned else []
    )


def test_an_absurd_first_loss_stops_before_the_second_step(tmp_path: Path) -> None:
    model, seen = swapped(), watch()
    with torch.no_grad():
        model.lm_head.weight.mul_(100.0)
    with pytest.raises(TrainingError, match=r"first loss is .*, above 7\.204 .*tokenizer"):
        trainer(model, tmp_path, seen, PosswapCallback(), save_steps=1).train()
    assert math.isclose(math.log(VOCABULARY) + 1.5, 7.204, abs_tol=1e-3)
    assert seen.steps == 1
    assert not (tmp_path / "checkpoint-1").exists()


def test_a_given_limit_is_the_limit(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"above 1\.000 \(max_first_loss\)"):
        trainer(swapped(), tmp_path, PosswapCallback(max_first_loss=1.0)).train()
    proof = PosswapCallback(max_first_loss=math.inf)
    run = trainer(swapped(), tmp_path, proof, logging_steps=1)
    run.train()
    assert proof.first_loss == run.state.log_history[0]["loss"]


@pytest.mark.parametrize("norm", [1.0, 0.0], ids=["gradients clipped", "not clipped"])
def test_a_first_loss_that_the_trainer_hides_as_zero_is_found(norm: float, tmp_path: Path) -> None:
    data, seen = [row | {"labels": [-100] * LENGTH} for row in rows()], watch()
    with pytest.raises(NumericError, match="no token of the batch has a label"):
        trainer(swapped(), tmp_path, PosswapCallback(), seen, data=data, max_grad_norm=norm).train()
    assert seen.steps == 1
    model = swapped()
    with torch.no_grad():
        model.lm_head.weight[0] = math.nan
    with pytest.raises((NumericError, SwapVerificationError), match="not finite"):
        trainer(model, tmp_path, PosswapCallback(), max_grad_norm=norm).train()


def interrupt_at(model: Any, step: int) -> Any:
    """Send SIGINT, as Ctrl-C does, inside the forward of one step; return what takes it back."""
    steps = iter(range(1, 99))

    def interrupt(module: Any, *args: Any) -> None:
        if module.training and next(steps) == step:  # the proof runs in evaluation mode
            signal.raise_signal(signal.SIGINT)

    return model.lm_head.register_forward_hook(interrupt)


def hooks(model: Any) -> dict[str, list[Any]]:
    modules = model.named_modules()
    return {name: [*module._forward_pre_hooks.values(), *module._forward_hooks.values()] for name, module in modules}


@pytest.mark.parametrize("anew", [False, True], ids=["the same Trainer", "a new one"])
@pytest.mark.parametrize("stop", ["first loss", "Ctrl-C"])
def test_a_stopped_training_begins_again_as_one_without_the_callback_does(
    stop: str, anew: bool, tmp_path: Path
) -> None:
    ends, modes = [], []
    for proved in (False, True):
        model = swapped()
        before = hooks(model)
        proofs = [PosswapCallback("yarn:factor=4", max_first_loss=1.0 if stop == "first loss" else None)] * proved
        fails = At(1, lambda _: 1 / 0)  # where the callback stops it
        run = trainer(model, tmp_path, *(proofs if proved or stop == "Ctrl-C" else [fails]))
        handle = interrupt_at(model, 3 if stop == "Ctrl-C" else 0)
        with pytest.raises(KeyboardInterrupt if stop == "Ctrl-C" else (TrainingError, ZeroDivisionError)):
            run.train()
        handle.remove()
        modes.append([module.training for module in model.modules()])
        if stop == "first loss":
            assert hooks(model) == before
        stopped = [(proof.verification, proof.first_loss) for proof in proofs]
        if stop == "first loss" and proved:
            with pytest.raises(TrainingError, match="first loss is .*, above 1.000"):  # it gates again
                trainer(copy.deepcopy(model), tmp_path / "again", *proofs).train()
        fails.step, start = 0, weights_digest(unpatch_model(copy.deepcopy(model)))
        for proof in proofs:
            proof.max_first_loss = None
        if anew:
            proofs = [PosswapCallback("yarn:factor=4")] * proved
            run = trainer(model, tmp_path, *proofs)
        run.train()
        assert hooks(model) == before
        ends.append(weights_digest(model))
        for proof in proofs:
            assert proof.verification is not None
            assert proof.record is not None
            assert (proof.verification, proof.first_loss) not in stopped
            assert (proof.record.steps, proof.record.tokens) == (4, 4 * 2 * LENGTH)
            assert proof.record.base_weights == start
            assert run.state.log_history[0]["loss"] == proof.first_loss
    assert ends[0] == ends[1]
    assert modes[0] == modes[1]


def test_a_limit_of_a_stopped_training_no_longer_holds(tmp_path: Path) -> None:
    model, far = swapped(), rows(length=4 * WINDOW + 1)
    before = hooks(model)
    first = PosswapCallback()
    handle = interrupt_at(model, 2)
    with pytest.raises(KeyboardInterrupt):
        trainer(model, tmp_path, first).train()
    handle.remove()
    seen = PosswapCallback(max_length=4 * WINDOW + 1), PosswapCallback(max_length=4 * WINDOW + 2)
    trainer(model, tmp_path, *seen, data=far).train()
    assert [one.record.tokens for one in seen if one.record] == [4 * 2 * len(far[0]["input_ids"])] * 2
    assert first.record is not None
    assert first.record.tokens == 2 * LENGTH
    with pytest.raises(PositionRangeError, match="is for 256"):
        trainer(model, tmp_path, seen[0], PosswapCallback(), data=far).train()
    with pytest.raises(PositionRangeError, match="is for 256"):
        trainer(model, tmp_path, PosswapCallback(), data=far).train()
    assert hooks(model).keys() == before.keys()


def test_a_refused_training_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    model, proof = swapped(), PosswapCallback()
    run = trainer(model, tmp_path, proof)
    run.train()
    unpatch_model(model)
    with pytest.raises(NotPatchedError, match="carries no swap"):
        run.train()
    assert (proof.verification, proof.first_loss, proof.record) == (None, None, None)


def test_a_longer_sequence_than_the_swap_is_for_stops_the_training(tmp_path: Path) -> None:
    data, seen = rows(length=4 * WINDOW + 1), watch()
    with pytest.raises(
        PositionRangeError, match=r"has 257 positions, and the swap to yarn.* is for 256.*max_length=257"
    ):
        trainer(swapped(), tmp_path, PosswapCallback(), seen, data=data).train()
    assert seen.steps == 0
    trainer(swapped(), tmp_path, PosswapCallback(max_length=257), data=data).train()


def test_packed_rows_count_by_their_positions_and_evaluation_may_read_farther(tmp_path: Path) -> None:
    long = [row | {"position_ids": [*range(150), *range(150)]} for row in rows(length=300)]
    model = swapped()
    run = trainer(model, tmp_path, PosswapCallback(), data=long, eval_strategy="steps", eval_steps=2)
    run.train()
    far = [row | {"position_ids": [*range(300, 400)]} for row in rows(length=100)]
    with pytest.raises(PositionRangeError, match="has 400 positions"):
        trainer(swapped(), tmp_path, PosswapCallback(), data=far).train()
    assert not model._forward_pre_hooks  # nothing stays behind


@pytest.mark.parametrize("restored", [False, True], ids=["", "callbacks restored"])
def test_a_resumed_run_is_proved_again_and_continues_its_record(restored: bool, tmp_path: Path) -> None:
    first = PosswapCallback("yarn")
    trainer(swapped(), tmp_path, first).train()
    again = PosswapCallback("yarn")
    run = trainer(swapped(), tmp_path, again, max_steps=6, restore_callback_states_from_checkpoint=restored)
    run.train(resume_from_checkpoint=True)
    proof = next(one for one in run.callback_handler.callbacks if isinstance(one, PosswapCallback))
    assert proof.verification is not None
    assert first.record is not None
    assert proof.record is not None
    assert (proof.record.steps, proof.record.tokens) == (6, 6 * 2 * LENGTH)
    assert proof.record.base_weights == first.record.base_weights
    assert proof.first_loss is not None
    assert training_of(load(tmp_path / "checkpoint-6").config) == proof.record


@pytest.mark.parametrize(("event", "steps"), [("on_optimizer_step", 3), ("on_substep_end", 2), ("on_log", 2)])
def test_a_checkpoint_that_sigterm_asks_for_records_the_steps_and_tokens_of_its_weights(
    event: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer saves it at the next event, before the callbacks that it was given see that event."""
    from transformers.trainer_jit_checkpoint import CheckpointManager

    monkeypatch.setattr(CheckpointManager.__init__, "__defaults__", (0,))  # seconds that it waits after SIGTERM

    class Ended(TrainerCallback):
        """Sends SIGTERM at an event of the third step, or at the end of the second."""

    def send(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            while not any(getattr(each, "is_checkpoint_requested", False) for each in managers):
                time.sleep(0.001)

    setattr(Ended, event, send)
    options = {"gradient_accumulation_steps": 2, "save_steps": 100, "logging_steps": 1, "data": rows(16)}
    run = trainer(swapped("alibi"), tmp_path, PosswapCallback(), Ended(), enable_jit_checkpoint=True, **options)
    managers = [getattr(callback, "jit_manager", None) for callback in run.callback_handler.callbacks]
    run.train()
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    recorded = json.loads((checkpoint / "config.json").read_text())["posswap_training"]
    stored = state["stateful_callbacks"]["PosswapCallback"]["attributes"]["resumed"]["record"]
    expected = (steps, steps * 4 * LENGTH)
    assert state["global_step"] == steps
    assert (recorded["steps"], recorded["tokens"]) == (stored["steps"], stored["tokens"]) == expected
    proof = PosswapCallback()
    again = trainer(swapped("alibi"), tmp_path / "again", proof, **options)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert proof.record is not None
    assert (proof.record.steps, proof.record.tokens) == (4, 4 * 4 * LENGTH)


def test_the_best_model_records_its_own_steps_and_tokens_and_not_those_of_the_whole_training(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    proof, kept = PosswapCallback(), 2
    # the metric is the step, so that the best one is known
    run = trainer(swapped("alibi"), tmp_path, proof, metric_for_best_model="nearness", greater_is_better=True, **best)
    run.compute_metrics = lambda _: {"nearness": -abs(run.state.global_step - kept)}
    run.train()
    assert str(run.state.best_model_checkpoint).endswith(f"checkpoint-{kept}")
    run.save_model(str(tmp_path / "saved"))
    recorded = json.loads((tmp_path / "saved" / "config.json").read_text())["posswap_training"]
    at_best = json.loads((tmp_path / f"checkpoint-{kept}" / "config.json").read_text())["posswap_training"]
    assert recorded == at_best
    assert (recorded["steps"], recorded["tokens"]) == (kept, kept * 2 * LENGTH)


def test_a_resumed_run_with_another_swap_or_none_is_refused(tmp_path: Path) -> None:
    trainer(swapped(), tmp_path, PosswapCallback()).train()
    other = patch_model(tiny("llama"), "linear", factor=4)  # whose weights have the same names and shapes
    with pytest.raises(TrainingError, match=r"step 4 was trained with .*yarn.*the model now has .*linear"):
        trainer(other, tmp_path, PosswapCallback(), max_steps=6).train(resume_from_checkpoint=True)
    with pytest.raises(TrainingError, match="the model now has no swap"):
        trainer(tiny("llama"), tmp_path, PosswapCallback(require=False), max_steps=6).train(resume_from_checkpoint=True)


def test_a_blend_may_advance(tmp_path: Path) -> None:
    model = patch_model(tiny("gpt2"), hf_posswap.Blend(hf_posswap.Rope(), 0.2), max_length=WINDOW)
    advance = At(2, lambda model: hf_posswap.set_blend(model, 0.6))
    trainer(model, tmp_path, PosswapCallback("blend"), advance).train()
    assert load(tmp_path / "checkpoint-4").config.posswap["scheme"]["weight"] == 0.6


class Advance(TrainerCallback):
    """Moves a blend at the end of each step, a quarter on."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        hf_posswap.set_blend(model, state.global_step / 4)


def blended() -> Any:
    return patch_model(tiny("gpt2"), hf_posswap.Blend(new=hf_posswap.Kerple()))


def weight_of(model: Any) -> float:
    return hf_posswap.swap_plan(model).scheme.weight


def test_a_blend_is_resumed_where_its_checkpoint_had_it(tmp_path: Path) -> None:
    """Its weight is no weight of the model, so the Trainer does not load it."""
    whole = blended()
    trainer(whole, tmp_path, PosswapCallback(), Advance()).train()
    assert weight_of(load(tmp_path / "checkpoint-2")) == 0.5
    resumed, seen = blended(), []
    started = At(2, lambda model: None)
    started.on_step_begin = lambda *args, **kwargs: seen.append(weight_of(resumed))  # type: ignore[method-assign]
    run = trainer(resumed, tmp_path, PosswapCallback(), Advance(), started)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert seen == [0.5, 0.75]
    assert (logits(resumed) - logits(whole)).abs().max() == 0


def test_the_best_checkpoint_is_loaded_with_its_blend(tmp_path: Path) -> None:
    model, losses = blended(), itertools.count(1.0)
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": False}
    run = trainer(model, tmp_path, PosswapCallback(), Advance(), metric_for_best_model="eval_made", **best)
    run.evaluate = lambda *args, **kwargs: {"eval_made": next(losses)}  # type: ignore[method-assign]
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert weight_of(model) == 0.5
    assert (logits(model) - logits(load(tmp_path / "checkpoint-2"))).abs().max() == 0


def test_a_blend_into_another_mechanism_is_not_resumed(tmp_path: Path) -> None:
    rope, linear = hf_posswap.Rope(base=500.0), hf_posswap.Linear(factor=2)
    trainer(patch_model(tiny("gpt2"), hf_posswap.Blend(rope, 0.2)), tmp_path, PosswapCallback()).train()
    for new in (linear, hf_posswap.Rope(base=77.0)):
        model = patch_model(tiny("gpt2"), hf_posswap.Blend(new, 0.2))
        with pytest.raises(TrainingError, match=r"blend.*rope.*blend"):
            trainer(model, tmp_path, PosswapCallback(), max_steps=6).train(resume_from_checkpoint=True)
    model = patch_model(tiny("gpt2"), hf_posswap.Blend(rope, 0.7))
    trainer(model, tmp_path, PosswapCallback(), max_steps=6).train(resume_from_checkpoint=True)


def test_a_checkpoint_that_was_written_without_the_swap_is_refused(tmp_path: Path) -> None:
    class Careless(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            path = Path(str(output_dir)) / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "posswap": None}))

    arguments = TrainingArguments(str(tmp_path), max_steps=2, **QUIET)
    run = Careless(swapped(), arguments, train_dataset=rows(), callbacks=[PosswapCallback()])
    with pytest.raises(CheckpointError, match=r"without its swap to yarn: config.json does not name it"):
        run.train()


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_compiled_model_is_proved_and_watched(backend: str, tmp_path: Path) -> None:
    proof = PosswapCallback()
    trainer(swapped(), tmp_path, proof, torch_compile_backend=backend, max_steps=2).train()
    assert proof.verification is not None
    assert proof.record is not None
    assert proof.record.tokens == 2 * 2 * LENGTH
    long = rows(length=4 * WINDOW + 1)
    with pytest.raises(PositionRangeError, match="has 257 positions"):
        trainer(swapped(), tmp_path, PosswapCallback(), torch_compile_backend=backend, data=long).train()


@pytest.mark.parametrize("scheme", ["yarn:factor=4", "alibi"])
def test_mixed_precision_is_proved_in_full_precision(scheme: str, tmp_path: Path) -> None:
    proof = PosswapCallback()
    run = trainer(swapped(scheme), tmp_path, proof, bf16=True)
    run.train()
    assert run.accelerator.native_amp
    assert proof.verification is not None
    again = load(tmp_path / "checkpoint-4")
    assert torch.equal(logits(again), logits(copy_sharing_weights(run.model)))  # without autocast


@pytest.mark.parametrize("scheme", ["yarn:factor=4", "kerple"])
def test_an_adapter_loads_with_its_swap_and_record(scheme: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = tiny(SWAPS[scheme])
    before = weights_digest(base)
    hf_posswap.save(base, tmp_path / "base")
    model = patch_model(load(tmp_path / "base"), scheme, max_length=4 * WINDOW)
    target = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}[SWAPS[scheme]]
    config = peft.LoraConfig(target_modules=target, r=4, init_lora_weights=False, fan_in_fan_out=scheme == "kerple")
    adapted = hf_posswap.add_adapter(model, config)
    proof = PosswapCallback(scheme)
    run = trainer(adapted, tmp_path / "run", proof)
    run.train()
    run.save_model(str(tmp_path / "adapter"))
    assert proof.verification is not None
    for folder in (tmp_path / "run" / "checkpoint-4", tmp_path / "adapter"):
        loaded = load(folder)
        assert torch.equal(logits(loaded), logits(adapted))
        training = training_of(loaded.get_base_model().config)
        assert training is not None
        assert training == proof.record
        assert (training.what, training.base_weights) == ("lora", before)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_that_will_not_be_saved_is_known_before_the_first_step(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    model = patch_model(peft.get_peft_model(tiny("gpt2"), config), "kerple", max_length=4 * WINDOW)
    with pytest.warns(TrainingWarning, match=r"cannot be saved, .*transformer\.posswap: trained position parameters"):
        trainer(model, tmp_path, PosswapCallback(), max_steps=1, save_strategy="no").train()
    with pytest.raises(CheckpointError, match="trained position parameters that are not part of the adapter"):
        model.save_pretrained(tmp_path / "adapter")


def test_two_processes_under_ddp_prove_and_count_alike(tmp_path: Path) -> None:
    def work() -> None:
        torch.set_num_threads(1)
        proof = PosswapCallback("alibi")
        trainer(swapped("alibi"), tmp_path, proof, max_steps=2).train()
        assert proof.verification is not None
        assert proof.record is not None
        assert proof.record.tokens == 2 * 2 * 2 * LENGTH
        (tmp_path / os.environ["RANK"]).write_text(str(proof.first_loss))

    forked.run_ranks(work)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()
    assert training_of(load(tmp_path / "checkpoint-2").config).tokens == 2 * 2 * 2 * LENGTH  # type: ignore[union-attr]


FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["yarn:factor=4", "alibi"])
def test_two_processes_under_fsdp2_prove_before_they_shard(scheme: str, tmp_path: Path) -> None:
    def work() -> None:
        torch.set_num_threads(1)
        proof = PosswapCallback(scheme)
        run = trainer(swapped(scheme), tmp_path, proof, max_steps=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error", TrainingWarning)
            run.train()
        assert is_sharded(model_inside(run.model))
        assert proof.verification is not None
        late = trainer(swapped(scheme), tmp_path / "late", max_steps=1)
        late.add_callback(PosswapCallback(scheme))
        with pytest.warns(TrainingWarning, match="give PosswapCallback to the Trainer's constructor"):
            late.train()
        lost = trainer(swapped(scheme), tmp_path / "lost", At(1, _plain_config), PosswapCallback(scheme), max_steps=2)
        with pytest.raises(SwapVerificationError, match="no longer intact"):
            lost.train()

    forked.run_ranks(work, environment=FSDP)
    training = training_of(load(tmp_path / "checkpoint-2").config)
    assert training is not None
    assert training.tokens == 2 * 2 * 2 * LENGTH
    assert training.base_weights == weights_digest(tiny("llama"))


@TRL_ASKS
@pytest.mark.parametrize(("lora", "half"), [(False, False), (True, False), (False, True)], ids=["full", "lora", "bf16"])
def test_trl_trains_a_swapped_model(lora: bool, half: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    peft, datasets = pytest.importorskip("peft"), pytest.importorskip("datasets")
    from hf_posswap.training import byte_tokenizer

    words = byte_tokenizer()
    words.pad_token = words.eos_token
    texts = datasets.Dataset.from_list([{"text": f"{n} ships at sea, and {n} on the river. " * 8} for n in range(8)])
    hf_posswap.save(tiny("llama"), tmp_path / "base", tokenizer=words)
    model = patch_model(load(tmp_path / "base"), "yarn", factor=4)
    common = {"max_steps": 2, "bf16": half, "max_length": 4 * WINDOW, "per_device_train_batch_size": 2}
    options = {**QUIET, **common, "learning_rate": 1e-3, "output_dir": str(tmp_path / "run")}
    proof = PosswapCallback("yarn:factor=4")
    run = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**options),
        train_dataset=texts,
        processing_class=words,
        peft_config=peft.LoraConfig(target_modules=["q_proj"], r=4) if lora else None,
        callbacks=[proof],
    )
    run.train()
    run.save_model(str(tmp_path / "model"))
    loaded = load(tmp_path / "model")
    assert torch.equal(logits(loaded), logits(copy_sharing_weights(run.model)))
    base = loaded.get_base_model() if lora else loaded
    training = training_of(base.config)
    assert training is not None
    assert training == proof.record
    assert (training.objective, training.what) == ("SFTConfig", "lora" if lora else "full")
    assert training.data is not None
    assert re.fullmatch(r"[0-9a-f]{16}", training.data)
    assert training.software["trl"] == trl.__version__


@TRL_ASKS
def test_an_absurd_first_loss_stops_trl_too(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from hf_posswap.training import byte_tokenizer

    words = byte_tokenizer()
    words.pad_token = words.eos_token
    texts = datasets.Dataset.from_list([{"text": f"{n} ships at sea. " * 8} for n in range(8)])
    arguments = trl.SFTConfig(str(tmp_path), max_steps=4, bf16=False, max_length=64, **QUIET)
    proof, seen = PosswapCallback(max_first_loss=0.5), watch()
    given = {"train_dataset": texts, "processing_class": words, "callbacks": [proof, seen]}
    with pytest.raises(TrainingError, match="above 0.500"):
        trl.SFTTrainer(swapped(), args=arguments, **given).train()
    assert seen.steps == 1


def test_sentence_transformers_train_a_swapped_encoder(tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from tests.patching.apply.test_wrapped import sentences

    encoder = patch_model(sentences(), "alibi", max_length=512)
    pairs = [{"one": f"{n} ships at sea", "other": f"at sea there are {n} ships"} for n in range(8)]
    chosen: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 4}
    arguments = st.SentenceTransformerTrainingArguments(str(tmp_path / "run"), **chosen | QUIET)
    proof = PosswapCallback("alibi")
    data = datasets.Dataset.from_list(pairs)
    loss = MultipleNegativesRankingLoss(encoder)
    st.SentenceTransformerTrainer(encoder, arguments, data, loss=loss, callbacks=[proof]).train()
    encoder.save_pretrained(str(tmp_path / "encoder"))
    assert proof.verification is not None
    assert proof.record is not None
    assert proof.record.objective == "SentenceTransformerTrainingArguments"
    assert proof.record.tokens > 0
    for folder in (tmp_path / "run" / "checkpoint-2", tmp_path / "encoder"):
        again = st.SentenceTransformer(str(folder), device="cpu")
        assert hf_posswap.swap_plan(again).scheme.name == "alibi"
        assert (again.encode(["A ship at sea."]) == encoder.encode(["A ship at sea."])).all()
        assert training_of(load(folder).config) == proof.record
    too_short = PosswapCallback(max_length=4)
    with pytest.raises(PositionRangeError, match="max_seq_length of a SentenceTransformer"):
        st.SentenceTransformerTrainer(encoder, arguments, data, loss=loss, callbacks=[too_short]).train()
    hf_posswap.unpatch_model(encoder)
    with pytest.raises(NotPatchedError, match="carries no swap"):
        st.SentenceTransformerTrainer(encoder, arguments, data, loss=loss, callbacks=[PosswapCallback()]).train()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_inside_an_encoder_that_will_not_be_saved_is_known_before_the_first_step(tmp_path: Path) -> None:
    st, peft = pytest.importorskip("sentence_transformers"), pytest.importorskip("peft")
    datasets = pytest.importorskip("datasets")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from tests.patching.apply.test_wrapped import sentences

    encoder = sentences()
    encoder[0].model = peft.get_peft_model(encoder[0].model, peft.LoraConfig(target_modules=["query"]))
    patch_model(encoder, "t5", max_length=512)
    data = datasets.Dataset.from_list(
        [{"one": f"{n} ships at sea", "other": f"at sea are {n} ships"} for n in range(8)]
    )
    arguments = st.SentenceTransformerTrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", **QUIET)
    given = {"loss": MultipleNegativesRankingLoss(encoder), "callbacks": [PosswapCallback()]}
    with pytest.warns(TrainingWarning, match=r"cannot be saved, .*posswap: trained position parameters"):
        st.SentenceTransformerTrainer(encoder, arguments, data, **given).train()


@pytest.mark.parametrize("kind", ["CrossEncoder", "SparseEncoder"])
def test_encoders_of_pairs_and_of_sparse_vectors_are_proved_too(kind: str, tmp_path: Path) -> None:
    """What is inside them is swapped, and the Trainer trains the whole; its loss is of no next token."""
    st = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets")
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    from hf_posswap.testing.tiny import tiny_model

    base = tiny_model("BertForMaskedLM", meta=False, vocab_size=VOCABULARY)
    base.save_pretrained(tmp_path / "base")
    words = byte_tokenizer()
    words.pad_token = words.eos_token
    words.save_pretrained(tmp_path / "base")
    options = {"num_labels": 1} if kind == "CrossEncoder" else {}
    encoder = getattr(st, kind)(str(tmp_path / "base"), device="cpu", **options)
    patch_model(encoder.get_submodule("0.model"), "alibi", max_length=64)
    encoder.max_seq_length = 64
    rows = {"one": ["a ship", "the sea"] * 4, "other": ["at sea", "a river"] * 4}
    if kind == "CrossEncoder":
        loss: Any = BinaryCrossEntropyLoss(encoder)
        rows["label"] = [0.0, 1.0] * 4  # type: ignore[list-item]
    else:
        inner = SparseMultipleNegativesRankingLoss(encoder, scale=100.0)
        loss = SpladeLoss(encoder, loss=inner, query_regularizer_weight=1.0, document_regularizer_weight=1.0)
    chosen: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 4}
    arguments = getattr(st, f"{kind}TrainingArguments")(str(tmp_path / "run"), **chosen | QUIET)
    proof, data = PosswapCallback("alibi"), datasets.Dataset.from_dict(rows)
    getattr(st, f"{kind}Trainer")(encoder, arguments, data, loss=loss, callbacks=[proof]).train()
    assert proof.verification is not None
    assert proof.record is not None
    assert proof.record.tokens > 0
    assert proof.first_loss is not None
    again = getattr(st, kind)(str(tmp_path / "run" / "checkpoint-2"), device="cpu")
    assert training_of(again.get_submodule("0.model").config) == proof.record
    too_short = PosswapCallback(max_length=4)
    with pytest.raises(PositionRangeError, match="a training sequence has"):
        getattr(st, f"{kind}Trainer")(encoder, arguments, data, loss=loss, callbacks=[too_short]).train()


def test_a_trainer_that_logs_no_first_loss_is_warned_of(tmp_path: Path) -> None:
    class Silent(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log = False

    with pytest.warns(TrainingWarning, match="logged no loss for its first step"):
        trainer(swapped(), tmp_path, PosswapCallback(), Silent()).train()


def test_a_digest_is_that_of_the_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    held = datasets.Dataset.from_list(rows())
    assert dataset_digest(held) == dataset_digest(rows()) == dataset_digest(held.select(range(8)).with_format("torch"))
    assert dataset_digest(held) != dataset_digest(held.select([1, 0, *range(2, 8)]))
    assert dataset_digest(held.with_transform(lambda batch: batch)) is None
    assert dataset_digest(held.to_iterable_dataset()) is None
    assert dataset_digest([{"input_ids": torch.tensor([1, 2])}]) == dataset_digest([{"input_ids": [1, 2]}])
    assert dataset_digest([object()]) is None


class Unknown(Dataset[dict[str, torch.Tensor]]):
    """Rows of a class that may change them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(values) for name, values in rows()[index].items()}


def test_what_is_not_known_is_null(tmp_path: Path) -> None:
    for number, (proof, data) in enumerate([(PosswapCallback(), Unknown()), (PosswapCallback(digests=False), rows())]):
        trainer(swapped(), tmp_path / str(number), proof, data=data).train()
        training = training_of(load(tmp_path / str(number) / "checkpoint-4").config)
        assert training is not None
        assert training.data is None
        assert (training.base_weights is None) == (number == 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_first_loss": 0}, OptionError, "max_first_loss must be a loss above 0, or None, got 0"),
        ({"max_first_loss": float("nan")}, OptionError, "max_first_loss must be"),
        ({"max_length": 0.5}, OptionError, "max_length must be a number of tokens above 0, or None, got 0.5"),
        ({"require": 1}, OptionError, "require and digests must be True or False"),
        ({"require": False, "scheme": "alibi"}, OptionError, "leave one out"),
        ({"scheme": "alibii"}, UnknownNameError, "Did you mean 'alibi'"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PosswapCallback(**arguments)


def test_no_warning_is_given_where_nothing_is_wrong(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        trainer(swapped("alibi"), tmp_path, PosswapCallback()).train()
