"""Killed anywhere, the same call ends with the same weights; torn checkpoints are skipped, others' are refused."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file

from hf_posswap.errors import CheckpointError, ConfigError, TrainingError, TrainingStoppedError, TrainingWarning
from hf_posswap.training.adapting import nll_at_lengths
from hf_posswap.training.config import Recipe
from hf_posswap.training.config.reading import merge
from hf_posswap.training.engine import Finished, Services, run_recipe
from hf_posswap.training.engine.checkpoints import (
    SEAL,
    checkpoints_in,
    differences,
    newest,
    problem_of,
    rotate,
    seal,
    step_of,
    take_place,
)
from hf_posswap.training.engine.log import RunLog
from hf_posswap.training.engine.run import resume_note
from hf_posswap.training.engine.trainer import PosswapTrainer
from hf_posswap.utils.progress import Reporter
from tests import forked
from tests.training.engine_runs import assert_same_weights, recipe, trained

STAGES = [{"max_steps": 6, "recovered": 50.0, "least_steps": 4, "check_every": 2}, {"max_steps": 5, "length": 64}]
TRAININGS: dict[str, dict[str, Any]] = {
    "full": {"training": {"max_steps": 12}},
    "adapter": {"peft": {"r": 2, "lora_dropout": 0.2}, "swap": {"scheme": {"name": "kerple"}}},
    "gradual": {
        "swap": {"gradual_steps": 5},
        "training": {"max_steps": 8, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    },
    "measured": {
        "training": {"max_steps": 9, "eval_on_start": True, "eval_strategy": "steps", "eval_steps": 3},
        "evaluation": {"lengths": [32, 64]},
    },
    "stages": {"stages": STAGES},
    "mixed": {
        "data": {"length": 128, "cut": [4, 1, 2]},
        "objective": {"kind": "distill", "distill": {"teacher": "sliding", "weight": 0.9}},
        "training": {"max_steps": 12, "per_device_train_batch_size": 2},
    },
    "fitted": {"swap": {"scheme": {"name": "rope", "partial": 0.5}, "fit": 4}, "objective": {"kind": "distill"}},
    "bloom": {},
    "gptj": {"swap": {"scheme": {"name": "alibi"}}},
}
MEASURING = Services(evaluate=nll_at_lengths)
TIMES = {"seconds", "tokens_per_second", "peak_memory", "train_runtime"}
SLOW = ("adapter", "gradual", "stages", "fitted")
KINDS = {"stages": "llama", "adapter": "llama", "bloom": "bloom", "gptj": "gptj"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Train on one thread here, as in forked processes: the last bits of sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _run_silently(wanted: Recipe) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    run_recipe(wanted, MEASURING)


def start(wanted: Recipe) -> Any:
    """Start a training in a new process."""
    return forked.start(lambda: _run_silently(wanted))


def kill_when(process: Any, due: Callable[[], bool]) -> bool:
    """Kill `process` by SIGKILL once `due`, and return whether it was still running."""
    while process.is_alive() and not due():
        time.sleep(0.002)
    running = process.is_alive()
    if running:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return running


def logged(folder: Path) -> int:
    """Return the lines in the logs of a run, whose folders come and go meanwhile."""
    lines = 0
    for root, _, files in os.walk(folder):
        if "log.jsonl" in files:
            with suppress(FileNotFoundError):
                lines += len((Path(root) / "log.jsonl").read_bytes().splitlines())
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "full",
        "bloom",
        "gptj",
        "mixed",
        "measured",
        *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW),
    ],
)
def test_killed_and_called_again_it_ends_with_the_same_weights_and_logs(tmp_path: Path, kind: str) -> None:
    values = merge({"training": {"save_steps": 2}}, TRAININGS[kind])
    model = KINDS.get(kind, "gpt2")
    whole = trained(tmp_path, "out=" + str(tmp_path / "whole"), kind=model, services=MEASURING, **values)
    wanted = recipe(tmp_path, kind=model, **values)
    folder = Path(wanted.out)
    for lines in (2, 3, 6):  # before the first checkpoint, and after it
        assert kill_when(start(wanted), lambda: logged(folder) >= lines)  # noqa: B023
    done = run_recipe(wanted, MEASURING)
    assert_same_weights(whole, done)
    for left, right in zip(sorted(whole.folder.rglob("log.jsonl")), sorted(folder.rglob("log.jsonl")), strict=True):
        assert _timeless(RunLog(left).entries()) == _timeless(RunLog(right).entries())
    assert _timeless(whole.report) == _timeless(done.report)


def _timeless(value: Any) -> Any:
    """Return `value`, of a log or a report, without what differs between two runs of one recipe.

    That is times, places, and what libraries have in the memory of a process.
    """
    if isinstance(value, dict):
        return {key: _timeless(held) for key, held in value.items() if key not in {*TIMES, "out"}}
    if isinstance(value, str):
        return re.sub(r"with the libraries, [\d.]+ \w+, about [\d.]+ \w+", "with the libraries", value)
    return [_timeless(held) for held in value] if isinstance(value, list) else value


def _run_until_told(wanted: Recipe) -> None:
    try:
        _run_silently(wanted)
    except TrainingError as error:
        (Path(wanted.out) / "error.txt").write_text(str(error), encoding="utf-8")


def test_a_training_that_sigterm_ends_is_not_taken_for_a_finished_one_and_ends_with_the_same_weights(
    tmp_path: Path,
) -> None:
    """Saved in the middle of a step, as transformers does it, the masks of its dropout would be drawn again."""
    settings = {"max_steps": 12, "save_steps": 10}
    whole = trained(tmp_path, training=settings, out=str(tmp_path / "whole"))
    before = signal.getsignal(signal.SIGTERM)
    wanted = recipe(tmp_path, training={**settings, "enable_jit_checkpoint": True})
    folder = Path(wanted.out)
    process = forked.start(lambda: _run_until_told(wanted))
    while process.is_alive() and logged(folder) < 3:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    checkpoint = checkpoints_in(folder / "checkpoints")[0]
    assert 0 < step_of(checkpoint) < 10
    message = (folder / "error.txt").read_text("utf-8")
    assert re.search(r"asked to stop after step \d of 12, and is not finished", message)
    assert f"{checkpoint.name}. The same command resumes" in message
    assert not (folder / "done.json").exists()
    assert not (folder / "model").exists()
    done = run_recipe(wanted, MEASURING)
    assert [phase["steps"] for phase in done.report["phases"]] == [12]
    steps = [entry["step"] for entry in RunLog(folder / "log.jsonl").entries() if "loss" in entry]
    assert steps == list(range(1, 13))
    assert_same_weights(done, whole)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("call", "number"), [("compute_loss", 3), ("write_checkpoint", 1)])
def test_sigterm_in_the_last_step_of_a_stage_or_while_it_is_saved_begins_no_further_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    values = {"stages": [{"max_steps": 3}, {"max_steps": 2}]}
    whole = trained(tmp_path, "out=" + str(tmp_path / "whole"), **values)
    wanted = recipe(tmp_path, "training.enable_jit_checkpoint=true", **values)
    calls, inherited = itertools.count(1), getattr(PosswapTrainer, call)

    def asked(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        return inherited(*args, **kwargs)

    monkeypatch.setattr(PosswapTrainer, call, asked)
    with pytest.raises(TrainingStoppedError, match=r"after step 3 of 3.*checkpoint-3"):
        run_recipe(wanted)
    assert not list(Path(wanted.out).rglob("done.json"))
    assert resume_note(wanted).endswith("checkpoint-3. The same command resumes after it, and writes the model.")
    done = run_recipe(wanted)
    assert [phase["steps"] for phase in done.report["phases"]] == [3, 2]
    assert_same_weights(done, whole)


def test_sigterm_is_refused_in_a_thread_that_gets_no_signals(tmp_path: Path) -> None:
    wanted = recipe(tmp_path, training={"max_steps": 3, "enable_jit_checkpoint": True})
    with ThreadPoolExecutor(1) as threads, pytest.raises(ConfigError, match="enable_jit_checkpoint.*main thread alone"):
        threads.submit(run_recipe, wanted).result()


@pytest.mark.slow
def test_tensorboard_shows_no_step_of_a_killed_run_twice(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    wanted = recipe(tmp_path, training={"max_steps": 8, "save_steps": 3, "report_to": "tensorboard"})
    folder = Path(wanted.out)
    assert kill_when(start(wanted), lambda: logged(folder) >= 5)
    run_recipe(wanted)
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))


@pytest.mark.slow
def test_twenty_random_kills_change_no_bit_of_the_result(tmp_path: Path) -> None:
    values = {"training": {"max_steps": 60, "save_steps": 3}}
    whole = trained(tmp_path, "out=" + str(tmp_path / "whole"), **values)
    wanted = recipe(tmp_path, **values)
    chance, kills = random.Random(0), 0
    for _ in range(200):
        process = start(wanted)
        ends = time.monotonic() + chance.uniform(0.2, 2.5)
        kills += kill_when(process, lambda: time.monotonic() > ends)  # noqa: B023
        if kills == 20 or (Path(wanted.out) / "report.json").exists():
            break
    assert kills >= 20 or (Path(wanted.out) / "report.json").exists()
    assert_same_weights(whole, run_recipe(wanted))


@pytest.mark.slow
def test_a_stage_that_was_found_done_does_no_step_more(tmp_path: Path) -> None:
    """Killed between the checkpoint of a stage's last step and its end, the stage ends at that step all the same."""
    values = {"training": {"save_steps": 2}, "stages": STAGES}
    whole = trained(tmp_path, "out=" + str(tmp_path / "whole"), kind="llama", **values)
    cut = tmp_path / "run"
    shutil.copytree(whole.folder, cut)
    for path in (cut / "report.json", cut / "stage-1" / "done.json"):
        path.unlink()
    for path in (cut / "stage-1" / "model", cut / "stage-2"):
        shutil.rmtree(path)
    done = trained(tmp_path, kind="llama", **values)
    assert [phase["steps"] for phase in done.report["phases"]] == [4, 5]
    assert_same_weights(whole, done)


def test_a_gradual_swap_that_was_stopped_behind_its_last_step_ends_with_the_same_weights(tmp_path: Path) -> None:
    values = {"swap": {"gradual_steps": 2}, "training": {"max_steps": 3}}
    whole = trained(tmp_path, "out=" + str(tmp_path / "whole"), **values)
    cut = tmp_path / "run"
    shutil.copytree(whole.folder, cut)
    for path in (cut / "report.json", cut / "done.json"):
        path.unlink()
    shutil.rmtree(cut / "model")
    assert_same_weights(trained(tmp_path, **values), whole)


@pytest.mark.slow
def test_a_torn_newest_checkpoint_is_skipped_with_a_warning(tmp_path: Path) -> None:
    whole = trained(tmp_path)
    for left in ("report.json", "done.json"):
        (whole.folder / left).unlink()
    torn = whole.folder / "checkpoints" / "checkpoint-6" / "optimizer.pt"
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.warns(TrainingWarning, match=r"checkpoint-6 is incomplete \(optimizer.pt is damaged\): it is skipped"):
        done = trained(tmp_path)
    assert done.report["phases"][0]["steps"] == 6
    assert problem_of(whole.folder / "checkpoints" / "checkpoint-6") is None


@pytest.mark.slow
def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    first = trained(tmp_path)
    (first.folder / "done.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"belongs to another training \(training.learning_rate: 0.01, now 0.02\)"
    ):
        trained(tmp_path, "training.learning_rate=0.02")
    again = trained(tmp_path, "training.save_steps=1", "training.logging_steps=2")  # which have no part in the weights
    assert_same_weights(first, again)


def stopped(done: Finished) -> None:
    """Leave of a finished training what one has that was stopped before its end: checkpoints alone."""
    for path in (done.folder / "report.json", done.folder / "done.json"):
        path.unlink()
    shutil.rmtree(done.model)


def change_texts(place: Path) -> None:
    """Turn the words of one text around: as long as before, in files of the same size."""
    path = place / "texts" / "3.txt"
    path.write_text(" ".join(reversed(path.read_text().split())))


def change_weight(folder: Path) -> None:
    """Change one number of one matrix of the base, and nothing else."""
    file = folder / "model.safetensors"
    state = load_file(file)
    name = next(name for name, tensor in state.items() if tensor.ndim == 2)
    state[name][-1, -1] += 1.0
    save_file(state, file, metadata={"format": "pt"})


@pytest.mark.slow
def test_other_documents_are_another_training(tmp_path: Path) -> None:
    stopped(trained(tmp_path))
    change_texts(tmp_path)
    texts = re.escape(str(tmp_path / "texts"))
    with pytest.raises(
        CheckpointError, match=rf"another training \(documents of {texts}: '\w+', now '\w+'\). Undo these"
    ):
        trained(tmp_path)


def test_the_loss_of_the_first_step_and_of_the_last_is_reported_also_after_a_stop(tmp_path: Path) -> None:
    """Both were the mean of the first ten steps in a short training, and after a stop the first was another."""
    settings = ("training.max_steps=7", "training.save_steps=2", "training.logging_steps=5")
    whole = trained(tmp_path, *settings)
    logged = [json.loads(line) for line in (whole.folder / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in logged if "loss" in entry] == [1, 5, 7]
    stopped(whole)
    shutil.rmtree(whole.folder / "checkpoints" / "checkpoint-6", ignore_errors=True)
    (again,) = trained(tmp_path, *settings).report["phases"]
    (phase,) = whole.report["phases"]
    assert again["first_loss"] == phase["first_loss"] == pytest.approx(logged[0]["loss"])
    assert "| 7 | 896 |" in (whole.folder / "report.md").read_text()


@pytest.mark.slow
def test_what_is_written_down_of_a_training_is_read_as_the_same(tmp_path: Path) -> None:
    """JSON knows neither tuples nor numbers as keys; an encoder's special tokens and its config have them."""
    values: dict[str, Any] = {"kind": "bert", "objective": {"kind": "masked"}}
    whole = trained(tmp_path, **values)
    stopped(whole)
    (phase,) = trained(tmp_path, **values).report["phases"]
    assert phase["last_loss"] == whole.report["phases"][0]["last_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trainable.what=full", "peft.peft_type=LORA"])
def test_another_base_is_another_training(tmp_path: Path, what: str) -> None:
    stopped(trained(tmp_path, what))
    change_weight(tmp_path / "gpt2")
    with pytest.raises(
        CheckpointError, match=r"another training \(weights of the base: '\w+', now '\w+'\). Undo these changes"
    ):
        trained(tmp_path, what)


@pytest.mark.slow
def test_another_config_of_the_base_is_named_by_its_key(tmp_path: Path) -> None:
    stopped(trained(tmp_path))
    path = tmp_path / "gpt2" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_norm_epsilon": 0.1}))
    with pytest.raises(
        CheckpointError, match=r"another training \(config of the base.layer_norm_epsilon: 1e-05, now 0.1\)"
    ):
        trained(tmp_path)


@pytest.mark.slow
def test_the_same_files_written_again_are_the_same_training(tmp_path: Path) -> None:
    whole = trained(tmp_path, "out=" + str(tmp_path / "whole"))
    stopped(trained(tmp_path))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-6")
    for folder in ("texts", "gpt2"):
        for path in (tmp_path / folder).iterdir():
            held = path.read_bytes()
            path.unlink()
            path.write_bytes(held)
    shutil.rmtree(tmp_path / "cache")
    assert_same_weights(whole, trained(tmp_path))


@pytest.mark.slow
def test_a_stage_goes_on_from_one_with_the_same_documents_alone(tmp_path: Path) -> None:
    """The first stage is finished, the second not begun: there is no checkpoint that would say what it read."""
    values: dict[str, Any] = {"stages": [{"max_steps": 2}, {"max_steps": 2}]}
    done = trained(tmp_path, **values)
    (done.folder / "report.json").unlink()
    shutil.rmtree(done.folder / "stage-2")
    change_texts(tmp_path)
    with pytest.raises(CheckpointError, match=r"stage-1 .* \(documents of .*texts"):
        trained(tmp_path, **values)


@pytest.mark.slow
def test_a_finished_training_is_said_to_be_so(tmp_path: Path) -> None:
    trained(tmp_path)
    shown = io.StringIO()
    trained(tmp_path, services=Services(reporter=Reporter(Console(file=shown, width=60))))
    assert "is finished: it is not trained again, and its data and base are not checked" in shown.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("largest", [1_000, 30_000, 110_000, 150_000, 250_000])
def test_a_full_disk_is_said_and_the_same_call_goes_on_when_there_is_space(tmp_path: Path, largest: int) -> None:
    """Files that may not grow beyond a size stand for a disk that is full in the middle of one."""
    whole = trained(tmp_path, "out=" + str(tmp_path / "whole"))
    wanted = recipe(tmp_path)

    def with_little_space() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        try:
            _run_silently(wanted)
        except Exception as error:
            (tmp_path / "said").write_text(f"{type(error).__name__}: {error}")

    process = forked.start(with_little_space)
    process.join()
    said = (tmp_path / "said").read_text()
    assert said.startswith("CheckpointError: cannot write "), said
    assert "File too large" in said or "iostream" in said or "PytorchStreamWriter" in said or "unexpected pos" in said
    assert not list(Path(wanted.out).rglob(".unfinished"))
    assert_same_weights(whole, run_recipe(wanted))


IDENTITY = {"a": 1}


def written(folder: Path, step: int) -> Path:
    """Write a sealed checkpoint with two files."""
    unfinished = folder / ".unfinished" / f"checkpoint-{step}"
    (unfinished / "below").mkdir(parents=True)
    (unfinished / "weights").write_bytes(bytes(range(99)))
    (unfinished / "below" / "state").write_text("state")
    seal(unfinished, step, IDENTITY)
    take_place(unfinished, folder / f"checkpoint-{step}")
    return folder / f"checkpoint-{step}"


def test_the_newest_few_are_kept_by_number(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100):
        written(tmp_path, step)
    rotate(tmp_path, 2)
    assert [step_of(path) for path in checkpoints_in(tmp_path)] == [100, 10]
    found = newest(tmp_path, IDENTITY)
    assert found is not None
    assert step_of(found) == 100
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-100", "checkpoint-10"}
    with pytest.raises(CheckpointError, match="not a training checkpoint: expected a name like checkpoint-100"):
        step_of(tmp_path)


@settings(max_examples=20)
@given(place=st.integers(0, 98), mask=st.integers(1, 255))
def test_any_changed_byte_is_found(tmp_path_factory: pytest.TempPathFactory, place: int, mask: int) -> None:
    path = written(tmp_path_factory.mktemp("torn"), 1)
    assert problem_of(path) is None
    data = bytearray((path / "weights").read_bytes())
    data[place] ^= mask
    (path / "weights").write_bytes(data)
    assert problem_of(path) == "weights is damaged"


def test_a_missing_file_or_seal_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    (path / "below" / "state").unlink()
    assert problem_of(path) == "below/state is missing"
    (path / SEAL).write_text("{")
    assert problem_of(path) == f"no readable {SEAL}"
    with pytest.warns(TrainingWarning, match="is incomplete"):
        assert newest(tmp_path, IDENTITY) is None


def test_what_differs_is_named() -> None:
    old, new = {"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"b": 2, "c": [1]}, "e": 3}
    assert differences(old, new) == [("a.b", 1, 2), ("d", 2, None), ("e", None, 3)]
