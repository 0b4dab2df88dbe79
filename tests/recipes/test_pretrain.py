"""The pretraining recipe, as its user runs it: every kind of model, a few steps; stopped, it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.errors import CheckpointError
from hf_posswap.training.config import make_recipe
from hf_posswap.training.engine.trainer import PosswapTrainer
from hf_posswap.training.fresh import FreshSettings
from hf_posswap.utils.atomic_io import read_json
from recipes import pretrain

STEPS = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of texts that are easy to learn."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"one two three {number % 3} " * (3 + number))
    return folder


def run(kind: str, out: Path, text: Path, *more: str) -> Any:
    sizes = {"tokens": STEPS * 4 * 32, "window": 32, "layers": 1, "width": 32, "heads": 2, "vocabulary": 0, "batch": 4}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    quiet = ("training.report_to=none", "training.logging_steps=1", f"data.cache={text / 'cache'}")
    options += [part for value in (*quiet, *more) for part in ("--set", value)]
    return CliRunner().invoke(pretrain.app, [kind, str(out), "--text", str(text), "--learning-rate", "0.01", *options])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return hf_posswap.load(folder).state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_every_kind_learns(kind: str, text: Path, tmp_path: Path) -> None:
    done = run(kind, tmp_path / "out", text)
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert f"M tokens in {STEPS} steps" in done.output
    assert "s in this run; the model is in" in done.output.replace("\n", " ")
    model = hf_posswap.load(tmp_path / "out" / "model")
    assert model.config.model_type == kind
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out" / "model")) == model.config.vocab_size
    losses = read_json(tmp_path / "out" / "report.json")["phases"][0]
    assert losses["last_loss"] < losses["first_loss"] - 0.5


@pytest.mark.slow
def test_stopped_it_goes_on_to_the_same_weights(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("gpt2", tmp_path / "whole", text, "training.save_steps=3").exit_code == 0
    step, taken = PosswapTrainer.training_step, []

    def stops(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken.append(1)
        if len(taken) == 8:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(PosswapTrainer, "training_step", stops)
    assert run("gpt2", tmp_path / "cut", text, "training.save_steps=3").exit_code != 0
    assert not (tmp_path / "cut" / "model").exists()
    assert run("gpt2", tmp_path / "cut", text, "training.save_steps=3").exit_code == 0
    assert 8 < len(taken) < 2 * STEPS
    expected, found = weights(tmp_path / "whole" / "model"), weights(tmp_path / "cut" / "model")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_another_pretraining_in_the_same_folder_is_refused(text: Path, tmp_path: Path) -> None:
    recipe = make_recipe({"model": {"name": "any"}, "data": {"sources": [{"path": str(text)}], "length": 32}})
    size = pretrain._start(FreshSettings(width=32, heads=2, layers=1, vocabulary=0), recipe, tmp_path / "start")
    assert size == hf_posswap.load(tmp_path / "start").num_parameters()
    with pytest.raises(CheckpointError, match=r"holds another pretraining, of {'model': {'kind': 'gpt2'"):
        pretrain._start(FreshSettings("llama", width=32, heads=2, layers=1), recipe, tmp_path / "start")
