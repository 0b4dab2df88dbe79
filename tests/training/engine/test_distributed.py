"""Two processes on the CPU, DDP and FSDP2 for real: the losses of one process, saved, resumed, and loaded again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import hf_posswap
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.adapting import nll_at_lengths
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.data import build_data
from hf_posswap.training.engine import Finished, Services, run_recipe
from hf_posswap.training.engine.checkpoints import problem_of, step_of
from hf_posswap.training.engine.parallel import Launch, collator_of, launch_of_environment
from tests import forked
from tests.training.engine_runs import WORDS, assert_same_weights, recipe, weights_of
from tests.training.tiny_models import tiny

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "recipes" / "train.py"
LAUNCHERS = ROOT / "recipes" / "accelerate"
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
HALVES = ("training.per_device_train_batch_size=2", "training.use_cpu=true")
STAGES = [
    {"max_steps": 6, "length": 32, "recovered": 50.0, "least_steps": 4, "check_every": 2},
    {"max_steps": 5, "length": 64, "scheme": {"base": 5e5}},
]


def written(place: Path, name: str, *settings: str, kind: str = "llama", **values: Any) -> Path:
    """Write a recipe for each of two processes, which goes to the folder `name`, and return its file."""
    wanted = recipe(place, *HALVES, *settings, f"out={place / name}", kind=kind, **values)
    path = place / f"{name}.json"  # which is YAML too
    path.write_text(json.dumps(to_dict(wanted)))
    return path


def torchrun(config: Path) -> subprocess.Popen[str]:
    """Start a recipe by torchrun in two processes."""
    return _started("torch.distributed.run", "--standalone", "--nproc_per_node", "2", config=config)


def accelerate_launch(config: Path) -> subprocess.Popen[str]:
    """Start a recipe by accelerate launch in two processes under FSDP2, as the file that is shipped says."""
    how = ("--num_processes", "2", "--main_process_port", str(forked.free_port()), "--mixed_precision", "no")
    return _started("accelerate.commands.launch", "--config_file", str(LAUNCHERS / "fsdp2.yaml"), *how, config=config)


def _started(launcher: str, *how: str, config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", launcher, *how, str(SCRIPT), "--config", str(config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def launch(config: Path, environment: dict[str, str] | None = None) -> Finished:
    """Run a recipe in two processes that find what torchrun would tell them, and return what it left behind."""
    forked.run_ranks(lambda: forked.run_script(SCRIPT, "--config", str(config)), environment=environment)
    return finished(config)


def finished(config: Path) -> Finished:
    """Return what the run of a recipe left behind."""
    folder = config.with_suffix("")
    report = json.loads((folder / "report.json").read_text())
    return Finished(folder, folder / report["saved"], report)


def one_process(place: Path, *settings: str, kind: str = "llama", **values: Any) -> Finished:
    """Run the same recipe in this process, with batches twice as large."""
    wanted = recipe(place, "training.use_cpu=true", *settings, f"out={place / 'one'}", kind=kind, **values)
    return run_recipe(wanted)


def losses(done: Finished) -> list[float]:
    return logged(done, "loss")


def logged(done: Finished, name: str) -> list[float]:
    lines = [line for path in sorted(done.folder.rglob("log.jsonl")) for line in path.read_text().splitlines()]
    return [entry[name] for line in lines if name in (entry := json.loads(line))]


def assert_alike(two: Finished, one: Finished) -> None:
    """Check that two processes have trained as one: the same losses but for rounding, and nearly the same weights."""
    assert losses(two) == pytest.approx(losses(one), abs=2e-5)
    assert losses(one)[-1] < losses(one)[0]
    held = weights_of(one)
    for name, weight in weights_of(two).items():
        torch.testing.assert_close(weight, held[name], rtol=0, atol=1e-3)


def assert_goes_on(
    place: Path, whole: Finished, environment: dict[str, str], *settings: str, kind: str = "llama", **values: Any
) -> None:
    """Check that a training whose last checkpoint and all after it are gone ends as the `whole` one did."""
    cut = place / "cut"
    shutil.copytree(whole.folder, cut)
    for left in ("report.json", "done.json"):
        (cut / left).unlink()
    shutil.rmtree(cut / "model")
    shutil.rmtree(cut / "checkpoints" / "checkpoint-6")
    again = launch(written(place, "cut", *settings, kind=kind, **values), environment)
    assert losses(again) == losses(whole)
    assert_same_weights(again, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, ("swap.gradual_steps=4",)),
        ({}, ("training.gradient_accumulation_steps=2", "peft.peft_type=LORA", "peft.r=2")),
        (FSDP, ()),
        (FSDP, ("peft.peft_type=LORA", "peft.r=2", "trainable.norms=true")),
    ],
    ids=["ddp-gradual", "ddp-lora-accumulated", "fsdp2", "fsdp2-lora"],
)
def test_two_processes_are_one(tmp_path: Path, environment: dict[str, str], settings: tuple[str, ...]) -> None:
    one = one_process(tmp_path, *settings)
    two = launch(written(tmp_path, "two", *settings), environment)
    assert_alike(two, one)
    model = hf_posswap.load(two.model)
    assert model.config.posswap["scheme"]["name"] == "rope"
    assert type(unwrap(model)).__name__.endswith("LlamaForCausalLM")

    assert_goes_on(tmp_path, two, environment, *settings)


def chat_source(place: Path) -> dict[str, Any]:
    """Write a model with a chat template, and chats whose answers are short and long, and return them as values."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role[0] }}:{% if message.role == 'assistant' %}{% generation %}"
        "{{ message.content }}\n{% endgeneration %}{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    )
    hf_posswap.save(tiny("llama"), place / "llama", tokenizer=tokenizer)
    rows = [
        [("user", f"say {word} once" if number % 2 else f"{word}!"), ("assistant", word * (1 if number % 2 else 9))]
        for number, word in enumerate(WORDS * 2)
    ]
    lines = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    (place / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"sources": [{"path": str(place / "chats.jsonl")}], "assistant_only_loss": True, "length": 48}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, ("data.packing=documents",)),
        ({}, ("training.gradient_accumulation_steps=2", "peft.peft_type=LORA", "peft.r=2")),
        ({}, ("objective.kind=distill",)),
        ({}, ("objective.kind=longce", "objective.longce.context=16")),
        (FSDP, ()),
        (None, ("peft.peft_type=LORA", "peft.r=2")),
    ],
    ids=["ddp-packed", "ddp-lora-accumulated", "ddp-distill", "ddp-longce", "fsdp2", "accelerate-fsdp2-lora"],
)
def test_chats_in_two_processes_are_trained_as_in_one(
    tmp_path: Path, environment: dict[str, str] | None, settings: tuple[str, ...]
) -> None:
    """Loss and gradients are means over the counted tokens of both, which have very different numbers of them.

    An environment of None is that of accelerate launch.
    """
    data = chat_source(tmp_path)
    settings = (*settings, "evaluation.lengths=[48]")  # a model in shards is measured where lengths are given alone
    services = Services(evaluate=nll_at_lengths)
    wanted = recipe(tmp_path, "training.use_cpu=true", *settings, f"out={tmp_path / 'one'}", kind="llama", data=data)
    rows = build_data(wanted.data, load_tokenizer(tmp_path / "llama", instead=""), causal=True, scheme_length=256)
    counts = [(rows.train.sized(24)[item]["labels"] >= 0).sum() for item in range(24)]
    halves = torch.tensor(counts).reshape(-1, 2, 2).sum(-1)  # of each batch, by process
    assert (halves.amax(1) > 1.5 * halves.amin(1)).sum() > 1
    one = run_recipe(wanted, services)
    if environment is None:
        config = written(tmp_path, "two", *settings, data=data)
        run = accelerate_launch(config)
        _, said = run.communicate(timeout=200)
        assert run.returncode == 0, said[-4000:]
        two = finished(config)
    else:
        two = launch(written(tmp_path, "two", *settings, data=data), environment)
    assert_alike(two, one)
    assert logged(two, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-3)
    assert two.report["nll"] == pytest.approx(one.report["nll"], rel=1e-3)  # of the answers alone


@pytest.mark.slow
@pytest.mark.timeout(900)  # each launcher loads everything in three processes
@pytest.mark.parametrize(
    ("start", "environment", "settings"),
    [(torchrun, {}, ()), (accelerate_launch, FSDP, ("peft.peft_type=LORA", "peft.r=2"))],
    ids=["torchrun-ddp", "accelerate-fsdp2-lora"],
)
def test_killed_as_a_whole_and_then_in_one_process_it_ends_as_if_nothing_had_been(
    tmp_path: Path,
    start: Callable[[Path], subprocess.Popen[str]],
    environment: dict[str, str],
    settings: tuple[str, ...],
) -> None:
    """Two stages, the first of which ends early: SIGKILL in each, and the same command again."""
    settings = ("training.save_steps=2", *settings)
    config = written(tmp_path, "whole", *settings, stages=STAGES)
    run = start(config)
    _, said = run.communicate(timeout=400)
    assert run.returncode == 0, said[-4000:]
    whole = finished(config)
    assert [phase["steps"] for phase in whole.report["phases"]] == [4, 5]
    cut = written(tmp_path, "cut", *settings, stages=STAGES)
    for stage, at_once in (("stage-1", True), ("stage-2", False)):
        _kill(start(cut), after=tmp_path / "cut" / stage / "log.jsonl", whole=at_once)
        assert not (tmp_path / "cut" / "report.json").exists()
        checkpoints = list((tmp_path / "cut" / stage / "checkpoints").glob("checkpoint-*"))
        assert checkpoints
        assert [problem_of(checkpoint) for checkpoint in checkpoints] == [None] * len(checkpoints)
    again = launch(cut, environment)
    assert losses(again) == losses(whole)
    assert_same_weights(again, whole)
    assert_alike(again, one_process(tmp_path, *settings, stages=STAGES))
    hf_posswap.verify_swap(hf_posswap.load(again.model))


@pytest.mark.slow
def test_sigterm_to_one_process_stops_both_after_the_same_step_and_they_end_with_the_same_weights(
    tmp_path: Path,
) -> None:
    """With dropout, so that the generators of both processes must be saved at the same step."""
    settings = ("training.save_steps=20", "training.max_steps=9", "swap.gradual_steps=7")
    whole = launch(written(tmp_path, "whole", *settings, kind="gpt2"))
    cut = written(tmp_path, "cut", *settings, "training.enable_jit_checkpoint=true", kind="gpt2")
    log, checkpoints = tmp_path / "cut" / "log.jsonl", tmp_path / "cut" / "checkpoints"

    def end_early() -> None:
        def send() -> None:
            while not (log.exists() and log.read_bytes().count(b'"loss"') >= 3):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)

        if os.environ["RANK"] == "1":
            threading.Thread(target=send, daemon=True).start()
        with pytest.raises(SystemExit):
            forked.run_script(SCRIPT, "--config", str(cut))

    forked.run_ranks(end_early)
    (checkpoint,) = checkpoints.iterdir()
    assert problem_of(checkpoint) is None
    assert 3 <= step_of(checkpoint) < 9
    assert len(list(checkpoint.glob("rng_state_*.pth"))) == 2
    again = launch(cut)
    assert losses(again) == losses(whole)
    assert_same_weights(again, whole)


def _kill(run: subprocess.Popen[str], *, after: Path, whole: bool) -> None:
    """Kill a launch, or one of its two processes, once three steps of a stage are in its log; all of them end."""
    while run.poll() is None and not (after.exists() and after.read_bytes().count(b'"loss"') >= 3):
        time.sleep(0.02)
    launcher = psutil.Process(run.pid)
    workers = launcher.children(recursive=True)
    assert len([worker for worker in workers if "--config" in worker.cmdline()]) == 2
    doomed = [launcher, *workers] if whole else [worker for worker in workers if worker.environ().get("RANK") == "1"]
    for process in doomed:
        process.kill()
    run.communicate(timeout=100)
    assert run.returncode != 0
    assert psutil.wait_procs(workers, timeout=60)[1] == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch()),
        ({"WORLD_SIZE": "4"}, Launch(4)),
        (FSDP | {"WORLD_SIZE": "2"}, Launch(2, fsdp=2)),
        ({"ACCELERATE_USE_FSDP": "true"}, Launch(fsdp=1)),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, Launch(deepspeed=3)),
        (
            {
                "WORLD_SIZE": "8",
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                "PARALLELISM_CONFIG_CP_SIZE": "4",
                "PARALLELISM_CONFIG_SP_SIZE": "1",
            },
            Launch(8, context=4),
        ),
    ],
)
def test_the_launch_is_read_from_the_environment(
    environment: dict[str, str], expected: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", *FSDP):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launch_of_environment() == expected


def test_what_a_launch_cannot_train_is_refused_before_anything_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2", "WORLD_SIZE": "2"}
    for name, value in (FSDP | split).items():
        monkeypatch.setenv(name, value)
    wanted = recipe(tmp_path, "model.name=not-there", "objective.chunk=0", swap={"scheme": {"name": "alibi"}})
    with pytest.raises(UnsupportedSwapError, match=r"alibi cannot be trained under context parallelism"):
        run_recipe(wanted)
    can = recipe(tmp_path, "model.name=not-there", "objective.chunk=0", "training.use_cpu=true")
    with pytest.raises(UnsupportedSwapError, match=r"context parallelism is not possible on a CPU"):
        run_recipe(can)
    assert not (tmp_path / "run").exists()


def test_processes_that_share_a_sequence_read_the_same_windows() -> None:
    assert Launch(8, context=4).replicas == 2
    assert Launch(8, ulysses=8).replicas == 1
    assert Launch(8).replicas == 8
    assert (Launch(8).shards, Launch(8, fsdp=2).shards, Launch(8, deepspeed=2).shards) == (False, True, False)


def test_only_processes_that_share_a_sequence_by_deepspeed_are_told_positions() -> None:
    def collate(items: list[Any]) -> dict[str, Any]:
        return {"input_ids": torch.tensor(items)}

    items = [[5, 6, 7], [8, 9, 5]]
    assert collator_of(Launch(8, context=4), collate) is collate
    batch = collator_of(Launch(8, deepspeed=3, ulysses=8), collate)(items)
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch["input_ids"].tolist() == items
    far = collator_of(Launch(2, ulysses=2), lambda items: collate(items) | {"position_ids": "its own"})(items)
    assert far["position_ids"] == "its own"
