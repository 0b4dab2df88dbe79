"""Recipes run dry: memory, work, launches, cards, and what makes them fit."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification
from typer.testing import CliRunner

import hf_posswap
from hf_posswap import patch_model, run_recipe
from hf_posswap.cli import app
from hf_posswap.compat.accelerate_state import no_launch
from hf_posswap.compat.torch_processes import can_be_fake
from hf_posswap.compat.torch_tensors import fake_mode
from hf_posswap.errors import ConfigError, OptionError, UnknownNameError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.patching.sites.attention import backends
from hf_posswap.training.config import Recipe, make_recipe
from hf_posswap.training.dryrun import CARDS, DryRun, Prediction, card_of, dry_run, launch_file, launching
from hf_posswap.training.dryrun.launching import launched
from hf_posswap.training.dryrun.meter import Work
from hf_posswap.training.dryrun.modelling import fake_model
from hf_posswap.training.dryrun.run import ladders
from hf_posswap.training.dryrun.unreal import FakeStep
from hf_posswap.training.engine.parallel import Launch
from hf_posswap.training.trainable import prepare_trainable
from tests.training.tiny_models import tiny

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
KINDS = ("gpt2", "llama", "bert")
LENGTH, ROWS, WIDTH, LAYERS = 64, 2, 32, 2
of_processes = pytest.mark.skipif(not can_be_fake(), reason="this torch cannot communicate fake tensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that hold config.json and nothing else."""
    place = tmp_path_factory.mktemp("configs")
    for kind in KINDS:
        model = tiny(kind)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(place / kind)
    return {kind: place / kind for kind in KINDS}


def recipe(folder: Path, **values: Any) -> Recipe:
    held: dict[str, Any] = {
        "model": {"name": str(folder)},
        "swap": {"scheme": "yarn" if folder.name == "llama" else "rope", "max_length": 256},
        "data": {"length": LENGTH},
        "training": {"per_device_train_batch_size": ROWS, "report_to": "none"},
    }
    return make_recipe(held | {key: held.get(key, {}) | value for key, value in values.items()})


def one(found: DryRun) -> Prediction:
    (prediction,) = found.predictions
    return prediction


def weights_of(kind: str) -> int:
    return sum(p.numel() for p in tiny(kind).parameters())


def test_weights_gradients_and_optimizer_are_those_of_the_model(folders: dict[str, Path]) -> None:
    found = one(dry_run(recipe(folders["llama"])))
    weights = 4 * weights_of("llama")
    assert found.held["weights"] == weights
    assert 2 * weights <= found.held["optimizer"] < 2.1 * weights  # and a count of steps for each
    assert sum(found.held.values()) == found.peak
    assert found.tokens == ROWS * LENGTH


@pytest.mark.parametrize("scheme", ["rope", "sinusoidal", "t5"])
def test_what_is_trained_dry_is_what_is_trained(folders: dict[str, Path], scheme: str) -> None:
    """Tied weights are one, the old table is gone, and a table that takes its scale from the old one is there."""
    wanted = recipe(folders["gpt2"], swap={"scheme": scheme})
    real = prepare_trainable(patch_model(tiny("gpt2"), scheme, max_length=256), wanted.trainable, wanted.peft)
    dry = fake_model(wanted, Launch()).model
    assert real.config.tie_word_embeddings
    assert shapes_of(dry) == shapes_of(real)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in model.named_parameters() if weight.requires_grad}


def test_operations_are_those_of_the_formula(folders: dict[str, Path]) -> None:
    found = one(dry_run(recipe(folders["llama"], objective={"chunk": 0})))
    model = tiny("llama")
    multiplied = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    # forward and twice that backward, of matrices; and of causal scores, half of them, with the scores made again
    expected = 6 * multiplied + LAYERS * (4 + 10) * WIDTH * LENGTH / 2
    assert found.flops == pytest.approx(expected, rel=0.05)


def test_a_batch_cut_into_smaller_ones_does_the_same_work(folders: dict[str, Path]) -> None:
    whole = one(dry_run(recipe(folders["llama"], training={"per_device_train_batch_size": 8})))
    cut = one(
        dry_run(recipe(folders["llama"], training={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}))
    )
    assert cut.tokens == whole.tokens
    assert cut.flops == pytest.approx(whole.flops, rel=0.01)
    assert cut.peak < whole.peak


@of_processes
@pytest.mark.parametrize("processes", [2, 4])
def test_fsdp2_shares_weights_gradients_and_optimizer(folders: dict[str, Path], processes: int) -> None:
    alone = one(dry_run(recipe(folders["llama"])))
    shared = one(dry_run(recipe(folders["llama"]), accelerate=launch_file("fsdp2"), processes=processes))
    assert shared.processes == processes
    for kind in ("weights", "optimizer"):
        assert shared.held[kind] == pytest.approx(alone.held[kind] / processes, rel=0.05)
    # gathered in bfloat16 in forward and mostly in backward, scattered in bfloat16, all but its own share
    others = 2 * weights_of("llama") * (processes - 1) / processes
    assert 2 * others < shared.sent < 3.1 * others


@of_processes
def test_ddp_holds_all_and_sends_gradients_twice(folders: dict[str, Path]) -> None:
    alone, both = one(dry_run(recipe(folders["llama"]))), one(dry_run(recipe(folders["llama"]), processes=2))
    assert both.held["weights"] == alone.held["weights"]
    assert both.peak >= alone.peak
    assert both.peak - alone.peak == pytest.approx(4 * weights_of("llama"), rel=0.1)  # the buckets
    assert both.sent == pytest.approx(2 * 4 * weights_of("llama") / 2, rel=0.01)  # half of it by each


@pytest.mark.slow
def test_checkpointing_and_adapters_hold_less(folders: dict[str, Path]) -> None:
    full = one(dry_run(recipe(folders["llama"], training={"per_device_train_batch_size": 16})))
    again = {"per_device_train_batch_size": 16, "gradient_checkpointing": True}
    made_again = one(dry_run(recipe(folders["llama"], training=again)))
    adapted = one(dry_run(recipe(folders["llama"], peft={"peft_type": "LORA"})))
    assert made_again.peak < full.peak
    assert made_again.flops > full.flops * 1.1
    assert adapted.held.get("optimizer", 0) < full.held["optimizer"] / 4


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("gpt2", {"objective": {"kind": "distill", "distill": {"teacher": "sliding", "states": 1.0}}}),
        ("gpt2", {"data": {"packing": "documents"}, "swap": {"scheme": "alibi"}}),
        ("gpt2", {"data": {"packing": "pose"}}),
        ("gpt2", {"data": {"cut": [4, 1]}}),
        ("gpt2", {"swap": {"scheme": "self_extend", "max_length": 256}}),
        ("gpt2", {"swap": {"scheme": "rope", "gradual_steps": 5, "max_length": None}}),
        ("gpt2", {"training": {"bf16": True}}),
        ("gpt2", {"training": {"optim": "adafactor"}}),
        ("gpt2", {"trainable": {"what": "norms_qk", "layer_decay": 0.9}}),
        ("bert", {"objective": {"kind": "masked"}, "data": {"packing": "documents"}}),
        ("llama", {"swap": {"scheme": None, "max_length": None}}),
        ("llama", {"model": {"dtype": "bfloat16"}}),
        ("llama", {"model": {"attention": "eager"}}),
    ],
)
@pytest.mark.parametrize("gpu", [None, "a100"])
def test_every_kind_of_recipe_runs_dry(
    folders: dict[str, Path], kind: str, values: dict[str, Any], gpu: str | None
) -> None:
    values = {key: {**({"name": str(folders[kind])} if key == "model" else {}), **v} for key, v in values.items()}
    found = dry_run(recipe(folders[kind], **values), gpu=None if gpu is None else card_of(gpu))
    assert found.fits is (None if gpu is None else True)
    assert one(found).peak > 0
    assert one(found).flops > 0


def test_a_gpu_and_a_launch_file_go_by_their_names(folders: dict[str, Path]) -> None:
    by_name = dry_run(recipe(folders["gpt2"]), gpu="24GB")
    assert by_name == dry_run(recipe(folders["gpt2"]), gpu=card_of("24GB"))
    with pytest.raises(UnknownNameError, match="unknown GPU 'h1000'"):
        dry_run(recipe(folders["gpt2"]), gpu="h1000")
    with pytest.raises(UnknownNameError, match="unknown file of accelerate 'fsdp3'"):
        dry_run(recipe(folders["gpt2"]), accelerate="fsdp3")


@pytest.mark.parametrize("given", ["yarn", {"model": {"name": "gpt2"}}, None])
def test_what_is_no_recipe_is_refused_with_what_to_call(given: Any) -> None:
    for function in (dry_run, run_recipe):
        with pytest.raises(ConfigError, match=rf"{function.__name__} takes what load_recipe returns, got .*: call"):
            function(given)


@pytest.mark.slow
def test_dropout_holds_no_scores_on_a_gpu(folders: dict[str, Path]) -> None:
    long = recipe(folders["gpt2"], data={"length": 2048}, swap={"scheme": "rope", "max_length": 2048})
    scores = 4 * ROWS * 4 * 2048**2 * LAYERS
    assert tiny("gpt2").config.attn_pdrop > 0
    on_cpu = dataclasses.replace(long, training=dataclasses.replace(long.training, use_cpu=True))
    assert one(dry_run(on_cpu)).peak > scores
    assert one(dry_run(long)).peak < scores


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "length", "values", "way"),
    [
        ("alibi", 1024, {}, "plain"),  # flex takes long to compile, and begins at 2048
        ("alibi", 2048, {}, "flex"),
        ("t5", 2048, {"training": {"bf16": True}}, "flex"),
        ("self_extend", 1024, {}, "plain"),  # the fused calls of a GPU take no float32
        ("self_extend", 1024, {"model": {"dtype": "bfloat16"}}, "merge"),
        ("alibi", 1024, {"training": {"use_cpu": True}}, "row"),
        ("self_extend", 1024, {"training": {"use_cpu": True}}, "merge"),
    ],
)
def test_attention_goes_the_way_it_goes_there(
    scheme: str, length: int, values: dict[str, Any], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("llama").config
    config.architectures, config.num_attention_heads, config.head_dim = ["LlamaForCausalLM"], 2, 16
    config.num_key_value_heads = 2
    config.save_pretrained(tmp_path)
    taken = set()

    def choose(request: Any) -> str:
        taken.add(name := original(request))
        return name

    original = backends.choose
    monkeypatch.setattr(backends, "choose", choose)
    chosen = {"swap": {"scheme": scheme, "max_length": length}, "data": {"length": length}}
    assert one(dry_run(recipe(tmp_path, **chosen, **values))).peak > 0
    assert taken == {way}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_that_of_a_gpu(folders: dict[str, Path], precision: str) -> None:
    """Products and attention are in half precision, whatever the dtype of what the rotation gives."""
    found = one(dry_run(recipe(folders["llama"], training={precision: True})))
    assert {kind for kind, flops, _ in found.steps[0].items if flops} == {torch.bfloat16}


@pytest.mark.slow
@of_processes
def test_batches_of_a_step_keep_whole_gradients_under_fsdp2(folders: dict[str, Path]) -> None:
    fsdp: dict[str, Any] = {"accelerate": launch_file("fsdp2"), "processes": 4}
    several = {"training": {"gradient_accumulation_steps": 2}}
    alone, summed = (one(dry_run(recipe(folders["llama"], **more), **fsdp)) for more in ({}, several))
    whole = 2 * weights_of("llama")  # in bfloat16
    assert summed.held["gradients"] - alone.held.get("gradients", 0) > 0.5 * whole


@of_processes
def test_threads_dry_run_one_after_the_other(folders: dict[str, Path]) -> None:
    """A launch is one of the whole process; models that other threads load meanwhile keep their dtype."""
    stock = tiny("llama")
    dry = recipe(folders["llama"], model={"name": str(folders["llama"]), "dtype": "bfloat16"})
    fsdp2 = lambda: one(dry_run(dry, accelerate=launch_file("fsdp2"), processes=2)).to_dict()  # noqa: E731
    expected, before = fsdp2(), dict(os.environ)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(fsdp2) for _ in range(3)]
        while not all(each.done() for each in asked):
            copied = hf_posswap.to_native(patch_model(copy.deepcopy(stock), "yarn", factor=2.0))
            assert copied.dtype == torch.float32
    assert [each.result() for each in asked] == [expected] * 3
    assert dict(os.environ) == before
    assert torch.get_default_dtype() == torch.float32


def test_a_card_is_no_cpu(folders: dict[str, Path]) -> None:
    on_cpu = recipe(folders["llama"], training={"use_cpu": True})
    with pytest.raises(ConfigError, match="--gpu is given, and training.use_cpu"):
        dry_run(on_cpu, gpu=CARDS["h100"])
    with pytest.raises(ConfigError, match="--gpu is given, and training.use_cpu"):
        dry_run(recipe(folders["llama"]), gpu=CARDS["h100"], accelerate=launch_file("cpu"))


def test_stages_are_told_apart(folders: dict[str, Path]) -> None:
    found = dry_run(dataclasses.replace(recipe(folders["llama"]), stages=make_recipe(_staged(folders["llama"])).stages))
    short, long = found.predictions
    assert (short.phase, long.phase) == ("stage-1", "stage-2")
    assert short.tokens * 2 == long.tokens
    assert short.peak < long.peak


def _staged(folder: Path) -> dict[str, Any]:
    stages = [{"length": 64, "max_steps": 2}, {"length": 128, "max_steps": 2}]
    return {"model": {"name": str(folder)}, "swap": {"scheme": "yarn", "max_length": 256}, "stages": stages}


@pytest.mark.slow
def test_the_smallest_change_is_found(folders: dict[str, Path]) -> None:
    large = recipe(folders["llama"], training={"per_device_train_batch_size": 8}, objective={"chunk": 256})
    needs = one(dry_run(large, gpu=CARDS["h100"])).peak
    half = dataclasses.replace(large, training=dataclasses.replace(large.training, per_device_train_batch_size=4))
    least = one(dry_run(half, gpu=CARDS["h100"])).peak
    room = (needs + least) // 2
    card = dataclasses.replace(CARDS["h100"], memory=int((room + (1 << 30)) / 0.96) + 1)
    lines: list[str] = []
    found = dry_run(large, gpu=card, say=lines.append)
    assert found.fits is False
    assert found.change is not None
    assert found.change.said == "training.per_device_train_batch_size=4 training.gradient_accumulation_steps=2"
    assert found.changed[0].fits
    assert found.changed[0].tokens == found.predictions[0].tokens
    assert lines


@pytest.mark.slow
def test_what_never_fits_is_said(folders: dict[str, Path]) -> None:
    none = dataclasses.replace(CARDS["h100"], memory=int((1 << 30) / 0.96) + 1000)
    found = dry_run(recipe(folders["llama"]), gpu=none)
    assert (found.fits, found.change, found.changed) == (False, None, ())


def test_each_ladder_goes_from_what_changes_least(folders: dict[str, Path]) -> None:
    same, shared, adapted = ladders(recipe(folders["llama"], objective={"chunk": 0}), None, None)
    assert [change.said for change in same] == [
        "objective.chunk=1024",
        "objective.chunk=1024 training.per_device_train_batch_size=1 training.gradient_accumulation_steps=2",
        "objective.chunk=1024 training.per_device_train_batch_size=1 training.gradient_accumulation_steps=2 "
        "training.gradient_checkpointing=true",
    ]
    assert "--processes 2" in shared[0].said
    assert shared[0].processes == 2
    assert shared[0].recipe.training.gradient_accumulation_steps == 1
    assert [change.said.split()[-1] for change in adapted] == ["peft.peft_type=LORA"] * 2


def test_whole_batches_are_kept_at_first_where_weights_are_shared(folders: dict[str, Path]) -> None:
    """Of several batches FSDP2 keeps whole gradients, which may weigh more than what smaller batches save."""
    first, same, _, _ = ladders(recipe(folders["llama"]), launch_file("fsdp2"), 2)
    assert [change.said for change in first] == ["training.gradient_checkpointing=true"]
    assert same[0].recipe.training.per_device_train_batch_size == 1


def _state() -> dict[str, Any]:
    """Return what a dry run may not change in its process."""
    chance = (random.getstate(), tuple(np.random.get_state()[1]), torch.get_rng_state().tolist())
    return {
        "environment": dict(os.environ),
        "chance": chance,
        "threads": torch.get_num_threads(),
        "attention": torch.nn.functional.scaled_dot_product_attention,
        "connected": torch.distributed.is_initialized(),
        "accelerate": dict(AcceleratorState._shared_state),
    }


@pytest.mark.slow
@of_processes
@pytest.mark.parametrize("connected", [False, True])
def test_the_process_is_left_as_it_was(folders: dict[str, Path], connected: bool) -> None:
    """Also where accelerate was used before, as after a training in the same notebook."""
    with no_launch():
        if connected:
            Accelerator(cpu=True)
        before = _state()
        dry_run(recipe(folders["llama"]), accelerate=launch_file("fsdp2"), processes=2)
        assert _state() == before


@pytest.mark.slow
def test_a_torch_that_cannot_send_fake_tensors_is_named(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "can_be_fake", lambda: False)
    with pytest.raises(
        UnsupportedModelError, match=r"a dry run of 2 processes needs a torch that .* Dry-run one process, or"
    ):
        dry_run(recipe(folders["llama"]), processes=2)
    assert one(dry_run(recipe(folders["llama"]), processes=1)).peak > 0


@pytest.mark.slow
def test_weights_are_never_read(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    assert one(dry_run(dataclasses.replace(recipe(folders["llama"]), model=recipe(tmp_path).model))).peak > 0


@pytest.mark.parametrize("name", ["deepspeed-zero3", "deepspeed-ulysses", "fsdp2-cp"])
def test_engines_that_cannot_be_run_dry_are_refused_by_name(folders: dict[str, Path], name: str) -> None:
    what = "context parallelism" if name == "fsdp2-cp" else "DeepSpeed"
    with pytest.raises(ConfigError, match=rf"{name}.yaml asks for .*{what}.*It supports one process, DDP and FSDP2"):
        dry_run(recipe(folders["llama"]), accelerate=launch_file(name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a readable accelerate file"),
        ("- ddp", "is not a readable accelerate file"),
        ("{distributed_type: MULTI_GPU, num_processes: eight}", "is not a readable accelerate file: .*'eight'"),
        ("{distributed_type: MULTI_GPU, num_processes: 0}", "starts 0 processes: give num_processes there, or --proc"),
        ("{distributed_type: MULTI_GPU, num_processes: 2, mixed_precision: fp8}", "asks for float8"),
    ],
)
def test_files_that_are_no_launch_are_refused(
    folders: dict[str, Path], tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"launch.yaml {message}"):
        dry_run(recipe(folders["llama"]), accelerate=file)


@of_processes
def test_a_teacher_is_not_shared(folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedSwapError, match="objective.kind distill needs an unsharded teacher"):
        dry_run(recipe(folders["gpt2"], objective={"kind": "distill"}), accelerate=launch_file("fsdp2"))


def test_other_refusals(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("num_processes: [")
    with pytest.raises(ConfigError, match=r"bad.yaml is not a readable accelerate file"):
        dry_run(recipe(folders["llama"]), accelerate=bad)
    with pytest.raises(OptionError, match="--processes is a whole number of at least 1, got 0"):
        dry_run(recipe(folders["llama"]), processes=0)
    with pytest.raises(ConfigError, match="objective.kind embedding cannot be dry-run: next-token, longce, masked"):
        dry_run(recipe(folders["bert"], objective={"kind": "embedding"}))
    zero = {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match="training.deepspeed: DeepSpeed's engine .* cannot be dry-run"):
        dry_run(recipe(folders["llama"], training={"deepspeed": zero}))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(OptionError, match="a dry run takes one process, and a launcher started this one"):
        dry_run(recipe(folders["llama"]))


def test_a_card_is_a_name_or_a_size() -> None:
    assert card_of("H100 ") is CARDS["h100"]
    assert card_of("24GB").memory == card_of("4090").memory == 24 << 30
    assert card_of("24GB").seconds(Work()) is None
    with pytest.raises(UnknownNameError, match=r"unknown GPU 'h10'. Did you mean 'h100'\? Known: 4090, a size such as"):
        card_of("h10")
    with pytest.raises(UnknownNameError, match="unknown GPU '999"):
        card_of("9" * 400 + "GB")
    with pytest.raises(OptionError, match="--gpu 500MB: CUDA itself takes about 1 GB"):
        card_of("500MB")
    with pytest.raises(UnknownNameError, match="unknown file of accelerate 'fsdp3'. Did you mean 'fsdp2'"):
        launch_file("fsdp3")


def test_a_roofline_is_the_slower_of_counting_and_moving() -> None:
    card = CARDS["h100"]
    counting, moving = Work(), Work()
    counting.items[torch.bfloat16, 10**15, 10**6] = 2
    moving.items[None, 0, 10**12] = 1
    assert card.seconds(counting) == pytest.approx(2 * 10**15 / card.half)
    assert card.seconds(moving) == pytest.approx(10**12 / card.bandwidth)
    sending = Work(sent=10**13)
    assert card.seconds(sending) == pytest.approx(10**13 / card.link)


def test_a_number_that_weights_give_is_refused_in_a_step() -> None:
    mode = fake_mode()
    with mode:
        weight = torch.ones(3)
    unreal = FakeStep(mode)
    with unreal:
        assert torch.arange(3).sum().item() == 3  # what no weight has a part in is real
        assert weight.sum().item() == 0
        with unreal.in_step(), pytest.raises(UnsupportedModelError, match="a dry run has no weights, and the step"):
            weight.sum().item()


@pytest.mark.slow
def test_the_command(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"model: {{name: {folders['llama']}}}\nswap: {{scheme: yarn, max_length: 256}}\ndata: {{length: 64}}"
    )
    arguments = ["train", "-c", str(path), "--dry-run", "--gpu", "24GB"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert "memory: weights" in done.stdout
    assert "it fits: 22.04 GiB of 24 GiB are left for tensors" in done.stdout
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(done.stdout)["phases"][0]["fits"] is True
    assert not (tmp_path / "posswap-run").exists()
    launch = ["--gpu", "h100", "--accelerate", "fsdp2", "--processes", "2", "training.max_steps=7200"]
    done = CliRunner().invoke(app, [*arguments[:-2], *launch], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert "mine: running 2 steps of one of 2 GPUs on tensors without values" in done.stderr
    (phase,) = json.loads(CliRunner().invoke(app, [*arguments[:-2], *launch, "--json"]).stdout)["phases"]
    assert phase["least_hours"] == pytest.approx(2 * phase["least_seconds_a_step"])
    assert phase["tokens"] == 7200 * 2 * phase["tokens_a_step"]
    seconds, gpu_hours = f"{3600 * phase['least_hours']:.3g}", f"{2 * phase['least_hours']:,.3g}"
    assert re.search(rf"in all +7,200 steps, .* tokens: at least {seconds} seconds, {gpu_hours} GPU hours", done.stdout)
    for words in (["--gpu", "24GB"], ["--dry-run", "--show"], ["--dry-run", "--processes", "1000000"]):
        done = CliRunner().invoke(app, ["train", "-c", str(path), *words])
        assert done.exit_code == 2, words
    with launched(None, 1):  # a launch of one is no launch
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (tiny("t5"), "is an encoder-decoder, .* with transformers' Seq2SeqTrainer"),
        (ViTForImageClassification(ViTConfig(**SMALL)), "reads pixel_values, and recipes train text models"),
        (BertForSequenceClassification(BertConfig(**SMALL)), "has no head over the vocabulary, which .* next-token"),
    ],
)
def test_what_recipes_do_not_train_is_refused_by_name(model: Any, said: str, tmp_path: Path) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__} {said}"):
        dry_run(recipe(tmp_path, swap={"scheme": "alibi"}))
