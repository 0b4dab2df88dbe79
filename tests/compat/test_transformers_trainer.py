"""The private methods of the Trainer that is installed, as they are called in a real training of one step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hf_posswap.compat import transformers_trainer

ROWS = [{"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)}] * 4


class Watched(transformers_trainer.SavingTrainer):
    """Notes what is called, and by whom it writes."""

    parent: str | None = None
    written: list[Any]

    def checkpoint_parent(self) -> str | None:
        return self.parent

    def write_checkpoint(self, write: Callable[[], None]) -> None:
        self.written.append("checkpoint begins")
        super().write_checkpoint(write)
        self.written.append("checkpoint ends")

    def write_model_files(self, folder: str | None, weights: dict[str, Any] | None) -> None:
        self.written.append(("files", Path(str(folder)).name, weights))
        super().write_model_files(folder, weights)


@pytest.fixture
def trainer(tmp_path: Path) -> Watched:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=1, save_steps=1, use_cpu=True, report_to=[], learning_rate=0.125,
        disable_tqdm=True, lr_scheduler_type="constant_with_warmup", warmup_steps=2,
    )  # fmt: skip
    made = Watched(model, arguments, train_dataset=ROWS)
    made.written = []
    return made


def test_write_checkpoint(trainer: Watched, tmp_path: Path) -> None:
    trainer.train()
    assert trainer.written == ["checkpoint begins", ("files", "checkpoint-1", None), "checkpoint ends"]
    assert (tmp_path / "run" / "checkpoint-1" / "optimizer.pt").is_file()


def test_save_checkpoint(trainer: Watched, tmp_path: Path) -> None:
    trainer.train()
    first, second = (tmp_path / "run" / "checkpoint-1" / name for name in ("optimizer.pt", "trainer_state.json"))
    first.unlink()
    trainer.save_checkpoint()
    assert first.is_file()
    assert second.is_file()
    assert trainer.written[3:] == trainer.written[:3]


def test_warnings_after_load(
    trainer: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output weights are tied to the embeddings: a checkpoint stores one of both, the Trainer misses the other."""
    trainer.train()
    checkpoint, logger = tmp_path / "run" / "checkpoint-1", logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)

    def resumed(of: type[Trainer]) -> str:
        caplog.clear()
        again = of(trainer.model, trainer.args, train_dataset=ROWS)
        again._load_from_checkpoint(str(checkpoint))
        return caplog.text

    assert "missing keys" in resumed(Trainer), "stock transformers has mended it: drop the override"
    assert "missing keys" not in resumed(Watched)
    weights = load_file(checkpoint / "model.safetensors")
    save_file({name: weights[name] for name in weights if "ln_f" not in name}, checkpoint / "model.safetensors")
    text = resumed(Watched)
    assert "ln_f.weight" in text
    assert "lm_head" not in text


def test_write_model_files(trainer: Watched, tmp_path: Path) -> None:
    trainer.save_model(str(tmp_path / "model"))
    assert trainer.written == [("files", "model", None)]
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_checkpoint_parent(trainer: Watched, tmp_path: Path) -> None:
    trainer.parent = str(tmp_path / "elsewhere")
    trainer.train()
    assert (tmp_path / "elsewhere" / "checkpoint-1" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "checkpoint-1").exists()


def test_current_learning_rate(trainer: Watched) -> None:
    trainer.train()
    assert trainer.current_learning_rate() == 0.125 / 2


def test_torch_compile_is_left_to_the_engine(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    arguments = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], torch_compile=True)
    ours = transformers_trainer.SavingTrainer(model, arguments)
    assert ours.args.torch_compile
    assert ours.accelerator.state.dynamo_plugin.backend.value == "NO"


def test_use_one_gpu(trainer: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = trainer.args
    arguments._n_gpu = 2  # as a process without a launcher finds on a machine of two
    assert arguments.n_gpu == 2
    transformers_trainer.use_one_gpu(arguments)
    assert arguments.n_gpu == 1


def test_checkpointing_argument(tmp_path: Path) -> None:
    name = transformers_trainer.checkpointing_argument()
    given: dict[str, Any] = {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True, **given
    )
    Trainer(model, arguments, train_dataset=ROWS).train()
    assert model.transformer.h[0].gradient_checkpointing
