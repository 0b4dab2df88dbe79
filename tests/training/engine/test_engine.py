"""The engine: what it trains, against a loop written differently; what it leaves behind; stages and gradual swaps."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler, set_seed
from transformers.utils import logging

import hf_posswap
from hf_posswap.errors import CheckpointError, ConfigError, UnsupportedSwapError
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.adapting import nll_at_lengths
from hf_posswap.training.config import Recipe
from hf_posswap.training.data import build_data
from hf_posswap.training.engine import log, preparing
from hf_posswap.training.engine.log import RunLog
from hf_posswap.training.engine.parallel import Launch, refuse_silent_errors
from hf_posswap.training.engine.preparing import load_model, load_recipe_tokenizer, prepare
from hf_posswap.training.engine.services import Services
from hf_posswap.utils.progress import Reporter
from tests.training.engine_runs import assert_same_weights, cached_tokenizers, recipe, trained, weights_of, write_model


def schedule_of(wanted: Recipe, optimizer: torch.optim.Optimizer) -> Any:
    """Return transformers' own schedule."""
    how = wanted.training
    return get_scheduler(
        how.lr_scheduler_type,
        optimizer,
        num_warmup_steps=int(how.warmup_steps),
        num_training_steps=how.max_steps,
        scheduler_specific_kwargs=how.lr_scheduler_kwargs,  # type: ignore[arg-type]
    )


def plain_loop(wanted: Recipe) -> dict[str, torch.Tensor]:
    """Return the weights after a training loop in a few lines, with the model's own loss."""
    settings = wanted.training
    set_seed(settings.seed)
    prepared = prepare(wanted, Launch(), Services())
    model, data = prepared.model.train(), prepared.data
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas, rows = (settings.adam_beta1, settings.adam_beta2), settings.per_device_train_batch_size
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas)
    schedule = schedule_of(wanted, optimizer)
    windows = data.train.sized(settings.max_steps * rows)
    for step in range(settings.max_steps):
        batch = data.collate([windows[step * rows + row] for row in range(rows)])
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def still(folder: Path, kind: str) -> Path:
    """Write a model of `kind` without dropout."""
    without = {
        "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "llama": (),
    }
    return write_model(folder, kind, **dict.fromkeys(without[kind], 0.0))


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_it_trains_as_a_plain_loop_does(tmp_path: Path, kind: str) -> None:
    more = {"objective": {"kind": "masked"}, "swap": {"max_length": 64}} if kind == "bert" else {}
    settings = ("training.weight_decay=0.1", "objective.chunk=16")
    still(tmp_path / kind, kind)
    expected = plain_loop(recipe(tmp_path, *settings, kind=kind, **more))
    found = weights_of(trained(tmp_path, *settings, kind=kind, **more))
    moved = 0
    start = hf_posswap.load(tmp_path / kind).state_dict()
    for name, weight in found.items():
        torch.testing.assert_close(weight.view_as(expected[name]), expected[name], rtol=0, atol=2e-4)
        moved += int(name in start and not torch.equal(weight, start[name]))
    assert moved > 5


@pytest.mark.slow
def test_the_log_level_of_transformers_is_left_as_it_was(tmp_path: Path) -> None:
    before = logging.get_verbosity()
    try:
        logging.set_verbosity_info()
        trained(tmp_path, kind="llama")
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)


@pytest.mark.slow
def test_accumulated_batches_are_the_big_batch(tmp_path: Path) -> None:
    big = trained(tmp_path, "out=" + str(tmp_path / "big"), kind="llama")
    small = trained(
        tmp_path,
        "training.per_device_train_batch_size=1",
        "training.gradient_accumulation_steps=4",
        "out=" + str(tmp_path / "s"),
        kind="llama",
    )
    for name, weight in weights_of(big).items():
        torch.testing.assert_close(weight, weights_of(small)[name], rtol=0, atol=2e-4)


def test_a_finished_training_is_measured_anew_if_its_evaluation_has_changed(tmp_path: Path) -> None:
    services = Services(lambda model, documents, lengths, limit: {length: float(length) for length in lengths})
    settings = ("training.max_steps=2", "training.warmup_steps=1", "evaluation.lengths=[32]")
    done = trained(tmp_path, *settings, services=services)
    written, weights = (done.folder / "report.json").read_bytes(), (done.model / "model.safetensors").stat().st_mtime_ns
    assert trained(tmp_path, *settings, services=services).report == done.report
    assert (done.folder / "report.json").read_bytes() == written
    again = trained(tmp_path, *settings[:2], "evaluation.lengths=[32,64]", services=services)
    assert again.report["nll"] == {"32": 32.0, "64": 64.0}
    assert json.loads((done.folder / "report.json").read_text()) == again.report
    assert (done.model / "model.safetensors").stat().st_mtime_ns == weights


def test_the_tokenizer_is_of_the_revision_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, newest = cached_tokenizers(tmp_path / "hub", monkeypatch)
    model = {"name": "org/model"}
    for settings, expected in (({}, newest), ({"revision": "v1"}, first), ({"revision": "main"}, newest)):
        assert load_recipe_tokenizer(recipe(tmp_path, model=model | settings)).get_vocab() == expected.get_vocab()
    own = recipe(tmp_path, model=model | {"revision": "v1", "tokenizer": str(tmp_path / "gpt2")})
    assert load_recipe_tokenizer(own).get_vocab() == byte_tokenizer().get_vocab()


def test_another_training_in_the_same_folder_has_its_own_report(tmp_path: Path) -> None:
    """Someone deletes the model and its checkpoints, and trains again there."""
    services = Services(lambda model, documents, lengths, limit: {length: float(length) for length in lengths})
    settings = ("training.max_steps=2", "training.warmup_steps=0", "evaluation.lengths=[32]")
    first = trained(tmp_path, *settings, services=services)

    def again(*changes: str) -> dict[str, Any]:
        shutil.rmtree(first.folder / "checkpoints")
        shutil.rmtree(first.folder / "model")
        report = trained(tmp_path, *settings, *changes, services=services).report
        assert report == json.loads((first.folder / "report.json").read_text())
        assert report["identity"] == json.loads((first.folder / "done.json").read_text())["identity"]
        assert "posswap_training" in json.loads((first.model / "config.json").read_text())
        return report

    other = again("training.learning_rate=5e-3")
    assert other["recipe"]["training"]["learning_rate"] == 5e-3
    assert other["phases"][0]["last_loss"] != first.report["phases"][0]["last_loss"]
    assert again("training.learning_rate=5e-3")["phases"][0]["last_loss"] == other["phases"][0]["last_loss"]
    older = first.folder / "report.json"
    older.write_text(json.dumps({name: value for name, value in other.items() if name != "identity"} | {"nll": {}}))
    assert trained(tmp_path, *settings, "training.learning_rate=5e-3", services=services).report["nll"] == {"32": 32.0}


def test_the_log_has_no_peak_memory_where_the_system_does_not_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where Python has no module resource: training could not be imported."""
    monkeypatch.setitem(sys.modules, "resource", None)
    spec = importlib.util.spec_from_file_location("log_on_windows", log.__file__)
    assert spec is not None
    assert spec.loader is not None
    on_windows = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "log_on_windows", on_windows)
    spec.loader.exec_module(on_windows)
    assert on_windows.peak_memory() is None
    assert log.peak_memory() is not None
    monkeypatch.setattr(log, "resource", on_windows.resource)
    done = trained(tmp_path, "training.max_steps=1", "training.warmup_steps=0")
    (entry,) = (json.loads(line) for line in (done.folder / "log.jsonl").read_text().splitlines())
    assert entry["loss"] > 0
    assert "peak_memory" not in entry


def test_the_config_of_the_finished_model_has_the_cache_as_the_base_had_it(tmp_path: Path) -> None:
    for use_cache in (False, True):
        place = tmp_path / str(use_cache)
        write_model(place / "gpt2")
        config = json.loads((place / "gpt2" / "config.json").read_text()) | {"use_cache": use_cache}
        (place / "gpt2" / "config.json").write_text(json.dumps(config))
        done = trained(place, "training.max_steps=1", "training.warmup_steps=0")
        assert json.loads((done.model / "config.json").read_text())["use_cache"] is use_cache
    done = trained(tmp_path, "training.max_steps=1", "training.warmup_steps=0", "objective.kind=masked", kind="bert")
    base, after = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "bert", done.model))
    assert after.get("use_cache") == base.get("use_cache")


@pytest.mark.slow
def test_the_log_the_report_and_the_model_are_left_behind(tmp_path: Path) -> None:
    def evaluate(model: Any, documents: Any, lengths: Any, limit: int) -> dict[int, float]:
        model(torch.zeros((1, max(lengths)), dtype=torch.long))
        return {length: float(length) for length in lengths}

    settings = ("evaluation.lengths=[32,128]", "training.eval_strategy=steps", "training.eval_steps=3")
    done = trained(tmp_path, *settings, "training.report_to=[tensorboard]", services=Services(evaluate))
    entries = [json.loads(line) for line in (done.folder / "log.jsonl").read_text().splitlines()]
    losses = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in losses] == [1, 2, 3, 4, 5, 6]
    assert [entry["tokens"] for entry in losses] == [128 * step for step in range(1, 7)]
    assert [entry["step"] for entry in entries if "nll" in entry] == [3, 6]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2)
    schedule, rates = schedule_of(recipe(tmp_path), optimizer), []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [entry["learning_rate"] for entry in losses] == pytest.approx(rates)
    assert losses[-1]["loss"] < losses[0]["loss"] - 0.3
    assert done.report["nll"] == {"32": 32.0, "128": 128.0}
    assert done.report["verified"]["edits"]
    assert "| training | 6 | 768 |" in (done.folder / "report.md").read_text()
    for left in ("loss.png", "loss.svg", "recipe.json", "report.json"):
        assert (done.folder / left).stat().st_size > 0
    assert list((done.folder / "tensorboard").glob("events.*"))
    assert {path.name for path in (done.folder / "checkpoints").iterdir()} == {"checkpoint-3", "checkpoint-6"}
    model = hf_posswap.load(done.model)
    assert model.config.posswap["scheme"]["name"] == "rope"
    assert model.config.use_cache is True
    assert model(torch.zeros((1, 200), dtype=torch.long)).logits.shape == (1, 200, 300)


@pytest.mark.slow
def test_a_terminal_shows_speed_loss_rate_time_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Console(file=io.StringIO(), force_terminal=True, width=200, legacy_windows=False)
    trained(tmp_path, services=Services(reporter=Reporter(screen)))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"training .* 6/6 .* tokens/s  loss \d\.\d{3}  lr 0\.\d+  [\d.]+ [MG]iB .*\d:\d\d:\d\d", shown)
    assert "swap verified: edits" in shown
    assert "# Swapped to rope, for 256 tokens" in shown


@pytest.mark.slow
def test_the_tokenizer_reads_as_far_as_the_swapped_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder)
    done = trained(tmp_path, "training.max_steps=2", "swap.gradual_steps=1")
    assert AutoTokenizer.from_pretrained(done.model).model_max_length == 256


@pytest.mark.slow
def test_what_is_done_is_not_done_again_and_another_training_is_refused(tmp_path: Path) -> None:
    first = trained(tmp_path)
    before = (first.folder / "done.json").stat().st_mtime_ns
    assert trained(tmp_path).report == json.loads(json.dumps(first.report))
    assert (first.folder / "done.json").stat().st_mtime_ns == before
    with pytest.raises(
        CheckpointError, match=r"finished training \(training.max_steps: 6, now 7\). Choose another folder"
    ):
        trained(tmp_path, "training.max_steps=7")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [list, dict, {"identity": []}, {"result": {"a": 1}}], ids=str)
def test_a_damaged_note_of_a_finished_training_is_named(tmp_path: Path, damage: Any) -> None:
    note = trained(tmp_path).folder / "done.json"
    held = damage() if callable(damage) else json.loads(note.read_text()) | damage
    note.write_text(json.dumps(held))
    with pytest.raises(CheckpointError, match=r"done.json (must hold|holds no result of a phase).*Delete"):
        trained(tmp_path)


@pytest.mark.slow
def test_a_control_is_trained_without_a_swap(tmp_path: Path) -> None:
    done = trained(tmp_path, "swap.scheme=null", "swap.max_length=null")
    assert done.report["phases"][0]["plan"] is None
    assert not hasattr(hf_posswap.load(done.model).config, "posswap")


def test_on_a_quantized_model_an_adapter_alone_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = recipe(tmp_path, "swap.scheme=null", "swap.max_length=null")
    model = load_model(wanted)
    model.hf_quantizer = object()  # type: ignore[assignment]
    monkeypatch.setattr(preparing, "load", lambda *_, **__: model)
    with pytest.raises(ConfigError, match=r"model.name: .* is quantized, .*set peft.r=16, for an adapter"):
        load_model(wanted)
    adapted = recipe(tmp_path, "swap.scheme=null", "swap.max_length=null", "peft.peft_type=LORA", "peft.r=2")
    assert load_model(adapted) is model


@pytest.mark.slow
def test_an_adapter_carries_the_swap(tmp_path: Path) -> None:
    done = trained(tmp_path, "peft.peft_type=LORA", "peft.r=2", kind="llama", swap={"scheme": {"name": "kerple"}})
    names = sorted(weights_of(done))
    assert any("lora_A" in name for name in names)
    assert any("posswap" in name for name in names)
    assert all("lora" in name or "posswap" in name for name in names)
    loaded = hf_posswap.load(done.model)
    assert loaded.get_base_model().config.posswap["scheme"]["name"] == "kerple"


@pytest.mark.slow
def test_a_gradual_swap_begins_at_the_old_model_and_ends_at_the_new_one(tmp_path: Path) -> None:
    done = trained(tmp_path, "swap.gradual_steps=4")
    gate = done.report["phases"][0]["gates"][1]
    found = re.match(r"first loss ([\d.]+), ([\d.]+) before the swap", gate)
    assert found is not None
    assert float(found[1]) == pytest.approx(float(found[2]), abs=2e-3)
    model = hf_posswap.load(done.model)
    assert model.config.posswap["scheme"]["name"] == "rope"
    assert model.config.posswap["max_length"] == 256


STAGES: list[dict[str, Any]] = [
    {"max_steps": 4, "length": 32, "scheme": {"base": 1e4}},
    {"max_steps": 3, "length": 64, "scheme": {"base": 5e5}, "learning_rate": 1e-3},
]


@pytest.mark.slow
def test_stages_grow_length_and_base_and_go_on_with_the_weights(tmp_path: Path) -> None:
    done = trained(tmp_path, kind="llama", stages=STAGES)
    assert [phase["steps"] for phase in done.report["phases"]] == [4, 3]
    assert [phase["tokens"] for phase in done.report["phases"]] == [4 * 4 * 32, 3 * 4 * 64]
    assert done.model == done.folder / "stage-2" / "model"
    last = hf_posswap.load(done.model)
    assert last.config.posswap["scheme"]["base"] == 5e5
    between = hf_posswap.load(done.folder / "stage-1" / "model")
    assert between.config.posswap["scheme"]["base"] == 1e4
    log = (done.folder / "stage-2" / "log.jsonl").read_text().splitlines()
    # the second stage begins where the first one ended, not at the start
    assert json.loads(log[0])["loss"] < done.report["phases"][0]["first_loss"] - 0.3


def test_the_base_is_measured_where_a_stage_ends_by_it_and_nowhere_else(tmp_path: Path) -> None:
    wanted = recipe(tmp_path)
    assert prepare(wanted, Launch(), Services()).recovery is None
    found = prepare(wanted, Launch(), Services(), recovers=True).recovery
    assert found is not None
    assert found[0]["input_ids"].shape[1] == wanted.data.length < 64, "no more than the recipe trains on"
    base = AutoModelForCausalLM.from_pretrained(wanted.model.name).eval()
    with torch.no_grad():
        assert found[1] == pytest.approx(base(**found[0]).loss.item(), rel=1e-5)


@pytest.mark.slow
def test_a_stage_ends_once_short_text_has_recovered(tmp_path: Path) -> None:
    ready = [{"max_steps": 40, "recovered": 50.0, "least_steps": 3, "check_every": 2}, {"max_steps": 2}]
    never = [{"max_steps": 5, "recovered": 0.0, "check_every": 2}, {"max_steps": 2}]
    soon = trained(tmp_path, kind="llama", stages=ready)
    assert [phase["steps"] for phase in soon.report["phases"]] == [4, 2]
    # a model that has learned the texts, at a rate that destroys it: a swap may lower the loss of a random model
    learned = trained(
        tmp_path,
        "training.max_steps=40",
        f"out={tmp_path / 'learned'}",
        kind="llama",
        swap={"scheme": None, "max_length": None},
    )
    settings = ("training.learning_rate=1.0", "gates.explosion=0", f"out={tmp_path / 'never'}")
    late = trained(tmp_path, f"model.name={learned.model}", *settings, kind="llama", stages=never)
    assert [phase["steps"] for phase in late.report["phases"]] == [5, 2]
    looks = [json.loads(line) for line in (late.folder / "stage-1" / "log.jsonl").read_text().splitlines()]
    assert [look["step"] for look in looks if "short_loss" in look] == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("relations", "lengths", "measured"),
    [
        (0.0, [32], [(32,)] * 2),  # once each: the swapped model, the base
        (1.0, [16], [(16,), (32,), (32,)]),
    ],
)
def test_the_unswapped_model_teaches(
    tmp_path: Path, relations: float, lengths: list[int], measured: list[tuple[int, ...]]
) -> None:
    calls = []

    def evaluate(model: Any, documents: Any, lengths: Any, *args: Any, **kwargs: Any) -> dict[int, float]:
        calls.append(tuple(lengths))
        return nll_at_lengths(model, documents, lengths, *args, **kwargs)

    settings = ("objective.kind=distill", "objective.distill.weight=1.0", f"objective.distill.relations={relations}")
    settings += ("training.max_steps=30", f"evaluation.lengths={lengths}")
    done = trained(tmp_path, *settings, services=Services(evaluate=evaluate))
    assert calls == measured
    phase = done.report["phases"][0]
    assert phase["last_loss"] < 0.7 * phase["first_loss"]
    kept, model = done.report["kept"], hf_posswap.load(done.folder / "model")
    wanted = recipe(tmp_path)
    data = build_data(wanted.data, byte_tokenizer(), causal=True, scheme_length=256)
    rows = torch.tensor(np.stack([text[:32] for text in data.held_out]).astype(np.int64))
    with torch.no_grad():
        losses = [float(each(rows, labels=rows).loss) for each in (hf_posswap.load(tmp_path / "gpt2"), model)]
    assert (kept["length"], kept["documents"], kept["tokens"]) == (32, len(rows), 30 * 4 * 32)
    assert kept["kept"] == pytest.approx(math.exp(losses[0] - losses[1]), rel=1e-4)
    assert f"**Keeps {kept['kept']:.1%} of the base in its window**" in (done.folder / "report.md").read_text()


@pytest.mark.slow
def test_longce_trains_and_needs_windows_longer_than_its_context(tmp_path: Path) -> None:
    settings = ("objective.kind=longce", "training.max_steps=30", "data.length=128")
    with pytest.raises(ConfigError, match="longce.context: weighs what text beyond 4096 tokens helps, and"):
        trained(tmp_path, *settings)
    done = trained(tmp_path, *settings, "objective.longce.context=16")
    phase = done.report["phases"][0]
    assert phase["last_loss"] < 0.9 * phase["first_loss"]
    assert "kept" not in (done.folder / "report.md").read_text()


MIXED = (
    "data.length=128",
    "data.cut=[4, 1]",
    "objective.chunk=16",
    "training.per_device_train_batch_size=2",
    "training.max_steps=4",
)


def mixed_loop(wanted: Recipe) -> dict[str, torch.Tensor]:
    """Return the weights after a loop over four windows for each long one, by turns, with the model's own loss."""
    settings = wanted.training
    set_seed(settings.seed)
    prepared = prepare(wanted, Launch(), Services())
    model, data = prepared.model.train(), prepared.data
    betas = (settings.adam_beta1, settings.adam_beta2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=betas, weight_decay=0.0)
    schedule = schedule_of(wanted, optimizer)
    items = [
        [data.shorter[4][k] for k in range(8)], [data.train[0], data.train[1]],
        [data.shorter[4][k] for k in range(8, 16)], [data.train[2], data.train[3]],
    ]  # fmt: skip
    for windows in items:
        model(**data.collate(windows)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.slow
def test_mixed_lengths_train_as_a_plain_loop_over_both_does(tmp_path: Path) -> None:
    still(tmp_path / "llama", "llama")
    expected = mixed_loop(recipe(tmp_path, *MIXED, kind="llama"))
    done = trained(tmp_path, *MIXED, kind="llama")
    for name, weight in weights_of(done).items():
        torch.testing.assert_close(weight.view_as(expected[name]), expected[name], rtol=0, atol=2e-4)
    (phase,) = done.report["phases"]
    assert (phase["steps"], phase["tokens"], phase["data"]["cut"]) == (4, 4 * 2 * 128, [4, 1])
    assert "data.packing none verified on one batch of each length: 128, 32" in phase["gates"]
    small = trained(tmp_path, *MIXED, "training.per_device_train_batch_size=1",
                    "training.gradient_accumulation_steps=2", "out=" + str(tmp_path / "small"),
                    kind="llama")  # fmt: skip
    for name, weight in weights_of(small).items():
        torch.testing.assert_close(weight.view_as(expected[name]), expected[name], rtol=0, atol=2e-4)


@pytest.mark.slow
def test_the_sliding_teacher_teaches_beyond_the_window(tmp_path: Path) -> None:
    """With the divergence alone, what is learned beyond the window can come from the windows of the teacher only."""
    how = ("objective.kind=distill", "objective.distill.weight=1.0", "data.length=128", "data.cut=[2, 1]",
           "training.max_steps=30", "training.per_device_train_batch_size=2")  # fmt: skip
    done = trained(tmp_path, *how, "objective.distill.teacher=sliding")
    (phase,) = done.report["phases"]
    assert phase["last_loss"] < 0.7 * phase["first_loss"]


@pytest.mark.parametrize(
    ("values", "kind", "says"),
    [
        (
            {"objective": {"kind": "masked"}},
            "gpt2",
            r"masked, and this model is causal: .* Use next-token, longce or distill",
        ),
        ({}, "bert", r"next-token, and this model is an encoder: .* Use masked, embedding or contrastive"),
        ({"evaluation": {"lengths": [8]}}, "gpt2", r"evaluation.lengths needs Services.evaluate"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, values: dict[str, Any], kind: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trained(tmp_path, kind=kind, **{"swap": {"max_length": 64}} | values)
    assert not (tmp_path / "run" / "model").exists()


def test_two_trainings_in_one_folder_are_refused(tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(CheckpointError, match=r"another training writes to"):
        trained(tmp_path)


CONTEXT, ULYSSES = Launch(8, fsdp=2, context=4), Launch(8, deepspeed=3, ulysses=8)


@pytest.mark.parametrize(
    ("scheme", "settings", "launch", "says"),
    [
        (hf_posswap.Alibi(), (), CONTEXT, r"alibi cannot be trained under context parallelism: .* drops the mask"),
        (hf_posswap.SelfExtend(), (), CONTEXT, r"self_extend cannot .* a shard would need all of it"),
        (hf_posswap.Kerple(), (), ULYSSES, r"kerple cannot be trained under Ulysses"),
        (hf_posswap.Dynamic(), (), CONTEXT, r"dynamic cannot .* angles depend on the length that a process sees"),
        (hf_posswap.LongRope(long_factor=(1.0,)), (), ULYSSES, r"longrope cannot .* angles depend on the length"),
        (hf_posswap.Rope(), ("objective.chunk=8",), CONTEXT, r"objective.chunk must be 0 under context"),
        (hf_posswap.Rope(), ("data.packing=documents",), CONTEXT, r"data.packing documents cannot be trained under"),
        (hf_posswap.Rope(), ("data.length=36",), CONTEXT, r"data.length 36 must be a multiple of 8 under"),
        (
            hf_posswap.Rope(),
            ("data.length=32", "data.cut=[8, 1]"),
            CONTEXT,
            r"data.length 32, cut into windows of 4, must be a multiple of 8 under",
        ),
        (hf_posswap.Rope(), ("objective.kind=distill",), CONTEXT, r"objective.kind distill cannot be trained under"),
        (hf_posswap.Rope(), (), Launch(8, fsdp=1), r"FSDP version 1 is not supported"),
        (
            hf_posswap.Rope(),
            ("swap.gradual_steps=2",),
            Launch(8, fsdp=2),
            r"gradual swap cannot end on sharded weights",
        ),
        (hf_posswap.Rope(), ("trainable.what=new_rows",), Launch(8, deepspeed=3), r"new_rows masks rows of a gradient"),
        (
            hf_posswap.Rope(),
            ("training.eval_strategy=steps",),
            Launch(8, fsdp=2),
            r"training.eval_strategy needs unsharded weights",
        ),
        (hf_posswap.Rope(), ("objective.kind=distill",), Launch(8, fsdp=2), r"distill needs an unsharded teacher"),
    ],
)
def test_what_would_go_wrong_silently_is_refused_by_name(
    tmp_path: Path, scheme: Any, settings: tuple[str, ...], launch: Launch, says: str
) -> None:
    wanted = recipe(tmp_path, "objective.chunk=0", *settings)
    with pytest.raises(UnsupportedSwapError, match=says):
        refuse_silent_errors(wanted, scheme, launch)
    refuse_silent_errors(
        recipe(tmp_path, "objective.chunk=0"), hf_posswap.Rope(), launch if launch.fsdp != 1 else Launch()
    )


@pytest.mark.slow
def test_the_same_recipe_twice_gives_the_same_weights(tmp_path: Path) -> None:
    one = trained(tmp_path)
    other = trained(tmp_path, "out=" + str(tmp_path / "again"))
    assert_same_weights(one, other)


@pytest.mark.slow
def test_compiled_layers_train_alike(tmp_path: Path) -> None:
    kind = "gpt2"
    settings = ("training.learning_rate=1e-3", "training.max_steps=3", "training.save_steps=9")
    plain = trained(tmp_path, *settings, kind=kind, model={"name": str(still(tmp_path / "still", kind))})
    compiled = ("training.torch_compile=true", f"out={tmp_path / 'compiled'}", f"model.name={tmp_path / 'still'}")
    done = trained(tmp_path, *settings, *compiled, kind=kind)
    assert "2 layers are compiled, each separately" in done.report["phases"][0]["gates"]
    assert done.report["phases"][0]["last_loss"] == pytest.approx(plain.report["phases"][0]["last_loss"], abs=1e-4)
    assert hf_posswap.load(done.model).config.posswap["scheme"]["name"] == "rope"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("training.gradient_checkpointing=true",),
        ("training.gradient_checkpointing=true", "training.gradient_checkpointing_kwargs.offload=true"),
        ("training.dataloader_num_workers=1",),
    ],
)
def test_how_it_is_computed_has_no_part_in_the_weights(tmp_path: Path, settings: tuple[str, ...]) -> None:
    folder = still(tmp_path / "still", "llama")
    one = trained(tmp_path, f"model.name={folder}", "training.max_steps=2", kind="llama")
    other = trained(
        tmp_path, f"model.name={folder}", "training.max_steps=2", *settings, f"out={tmp_path / 'other'}", kind="llama"
    )
    assert_same_weights(one, other)


@pytest.mark.slow
def test_bfloat16_computes_and_keeps_float32_weights(tmp_path: Path) -> None:
    done = trained(tmp_path, "training.bf16=true", "training.max_steps=20", "training.save_steps=20", kind="llama")
    assert {weight.dtype for weight in weights_of(done).values()} == {torch.float32}
    phase = done.report["phases"][0]
    assert phase["last_loss"] < phase["first_loss"] - 0.3


def test_a_log_that_a_crash_tore_is_read_without_the_torn_lines(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    log.write({"step": 1, "loss": 2.0})
    with log.path.open("ab") as file:
        file.write(b'\x00\xff\xfe{"st\n' + b"[" * 9999 + b"\n3\n{}\n")
    log.write({"step": 2, "loss": 1.0})
    assert [entry["step"] for entry in log.entries()] == [1, 2]
    log.go_back_to(1)
    assert [entry["step"] for entry in log.entries()] == [1]
