"""`posswap train`: its keys, its recipe as it would run, a training, and its errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.errors import DataError
from hf_posswap.testing.tiny import tiny_model
from hf_posswap.training.adapting import nll_at_lengths
from hf_posswap.training.config import Recipe, load_recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.config.settings import keys_of
from tests.checkpoints.loopback import TOKEN, running
from tests.cli.conftest import Posswap, says
from tests.training.engine_runs import recipe
from tests.training.tiny_models import tiny

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"


def test_every_key_is_listed_with_its_meaning() -> None:
    done = CliRunner().invoke(app, ["train", "--keys"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for key in keys_of(Recipe):
        assert (f"{key.name}=" if key.name != "training" else "training.* ") in done.stdout
    assert re.search(r"training.max_steps=1000 +a default of hf_posswap; transformers has -1", done.stdout)
    assert re.search(r"training.output_dir +fixed: the recipe's `out` says the folder", done.stdout)
    assert "transformers.TrainingArguments" in done.stdout


def test_show_prints_the_recipe_as_it_would_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {name: any}\nswap: {scheme: rope}")
    done = CliRunner().invoke(app, ["train", "-c", str(path), "--show", "training.max_steps=70"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert (shown["model"]["name"], shown["training"]["max_steps"]) == ("any", 70)


@pytest.mark.slow
def test_a_training_and_the_same_command_again(tmp_path: Path, posswap: Posswap) -> None:
    recipe(tmp_path)  # writes model and texts
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"model: {{name: {tmp_path / 'gpt2'}}}\nswap: {{scheme: rope, max_length: 128}}\n"
        f"data: {{length: 32, held_out: 0.3, cache: {tmp_path / 'cache'}, sources: [{{path: {tmp_path / 'texts'}}}]}}\n"
        "training: {max_steps: 3, warmup_steps: 1, report_to: none}\nevaluation: {lengths: [32, 256]}"
    )
    out = tmp_path / "done"
    run = posswap("train", "-c", path, f"out={out}")
    assert run.returncode == 0, run.stderr
    assert "swap verified: edits, finite" in run.stdout
    assert says(run.stdout, f"Saved to {out / 'model'}; the report is {out / 'report.md'}.")
    nll = json.loads((out / "report.json").read_text())["nll"]
    assert nll["32"] > 0
    assert nll["256"] is None or nll["256"] > 0
    again = posswap("train", "-c", path, f"out={out}", "training.max_steps=4")
    assert again.returncode == 4
    assert "finished training (training.max_steps: 3, now 4)" in " ".join(again.stderr.split())


@pytest.mark.slow
def test_ctrl_c_tells_what_is_saved_and_the_same_command_tells_where_it_resumes(tmp_path: Path) -> None:
    path, out = tmp_path / "mine.json", tmp_path / "run"
    path.write_text(json.dumps(to_dict(recipe(tmp_path, "training.max_steps=100000", "training.save_steps=20"))))
    command = [sys.executable, "-m", "hf_posswap", "train", str(path)]

    def interrupted(when: Callable[[], bool]) -> tuple[str, str]:
        with subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, start_new_session=True,
            stdout=(tmp_path / "stdout").open("w"), stderr=(tmp_path / "stderr").open("w"),
        ) as process:  # fmt: skip
            deadline = time.monotonic() + 120
            while not when() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130, (tmp_path / "stderr").read_text()
        return (tmp_path / "stdout").read_text(), (tmp_path / "stderr").read_text()

    _, stderr = interrupted(lambda: (tmp_path / "stdout").stat().st_size > 0 or (out / "recipe.json").exists())
    assert "Interrupted: nothing is saved yet, and the same command starts again." in stderr
    assert "A checkpoint is written every 20 steps (training.save_steps)." in stderr
    _, stderr = interrupted(lambda: any((out / "checkpoints").glob("checkpoint-*")))
    saved = re.search(r"Interrupted\. Saved: step (\d+) of 100000, in (.*)\. The same command resumes at step", stderr)
    assert saved is not None, stderr
    assert Path(saved[2]) == out / "checkpoints" / f"checkpoint-{saved[1]}"
    stdout, stderr = interrupted(lambda: "resuming" in (tmp_path / "stdout").read_text())
    assert f"resuming after step {saved[1]} of 100000, from {saved[2]}" in stdout
    assert "missing keys" not in stderr


@pytest.mark.slow
def test_the_finished_model_is_pushed_without_a_path_of_this_machine(tmp_path: Path, posswap: Posswap) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(to_dict(recipe(tmp_path, "data.packing=pose", "evaluation.lengths=[32]"))))
    with running(use_lfs=False) as hub:
        online = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        hub.faults["commit"] = [403]
        failed = posswap("train", "-c", path, "training.push_to_hub=true", "training.hub_model_id=me/tiny", **online)
        assert failed.returncode == 4, failed.stderr
        assert (tmp_path / "run" / "report.md").is_file()
        run = posswap("train", "-c", path, "training.push_to_hub=true", "training.hub_model_id=me/tiny", **online)
        assert run.returncode == 0, run.stderr
        files = hub.files("me/tiny")
        changes = ("training.push_to_hub=true", "training.hub_model_id=me/other")
        for more in ((), ("training.learning_rate=5e-3",)):  # another repository; and another training in this folder
            run = posswap("train", "-c", path, *changes, *more, **online)
            assert run.returncode == 0, run.stderr
            model = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
            assert hub.files("me/other")["model.safetensors"] == model
            shutil.rmtree(tmp_path / "run" / "model")
            shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert {"config.json", "model.safetensors", "README.md"} <= files.keys()
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    assert b"nll_32" in files["README.md"]
    assert json.loads((tmp_path / "run" / "report.json").read_text())["pushed"].startswith(hub.url)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), r"give a recipe first: posswap train yarn, or a file; posswap recipes lists the names"),
        (("training.max_steps=3",), r"give a recipe first"),
        (("-c", "none.yaml"), r"none.yaml cannot be read: No such file"),
        (("none.yaml",), r"none.yaml cannot be read: No such file"),
        (("yran",), r"unknown recipe 'yran'\. Did you mean 'yarn'\?"),
        (("-c", "yarn", "abf"), r"two recipes: --config yarn, and 'abf', which is not KEY=VALUE"),
        (("yarn", "abf"), r"'abf': expected KEY=VALUE, for example training.max_steps=100"),
        (
            ("yarn", "model.name=any"),
            r"no text to train on: give --text books, .*; .*--text python trains",
        ),
        (
            ("yarn", "--text", "a", "data.sources.0.path=b"),
            r"--text sets data.sources, and so does .data.sources.0",
        ),
        (
            ("yarn", "model.name=any", "--column", "body"),
            r"--column body is the column of --text: give --text",
        ),
        (("yarn", "--max-length", "9", "swap.max_length=8"), r"--max-length sets swap.max_length, and so does"),
        (("yarn", "training.max_stepz=3"), r"yarn has 1 problem: \(1\) training.max_stepz: no such key. Did you mean"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(app, ["train", *arguments])
    assert done.exit_code == 2
    assert re.search(says, done.stderr)


@pytest.mark.parametrize("given", [("yarn",), ("-c", "yarn"), (str(RECIPES / "yarn.yaml"),)])
def test_a_recipe_is_given_by_name_or_path_as_an_argument_or_an_option(given: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["train", *given, "model.name=any", "--show", "training.max_steps=70"])
    assert done.exit_code == 0, done.output
    expected = load_recipe(RECIPES / "yarn.yaml", ["model.name=any", "training.max_steps=70"])
    assert json.loads(done.stdout) == to_dict(expected)


def test_options_are_the_keys_that_they_name() -> None:
    options = ["--text", "my books", "--text", "org/set:train", "--max-length", "4096", "--show", "--column", "body"]
    done = CliRunner().invoke(app, ["train", "yarn", "model.name=any", *options])
    assert done.exit_code == 0, done.output
    keys = ["data.sources.0.path=my books", "data.sources.1.path=org/set:train", "swap.max_length=4096"]
    keys += ["data.sources.0.column=body", "data.sources.1.column=body"]
    assert json.loads(done.stdout) == to_dict(load_recipe("yarn", ["model.name=any", *keys]))


def test_a_path_with_an_equals_sign_is_no_setting(tmp_path: Path) -> None:
    (tmp_path / "lr=3").mkdir()
    path = tmp_path / "lr=3" / "mine.yaml"
    path.write_text("include: yarn\nmodel: {name: any}")
    done = CliRunner().invoke(app, ["train", str(path), "--show"])
    assert json.loads(done.stdout)["name"] == "mine", done.output


def test_the_loss_at_lengths_is_the_models_own(tmp_path: Path) -> None:
    model = tiny("gpt2")
    documents = [np.arange(60, dtype=np.int32) * k % 300 for k in (1, 3, 7)] + [np.arange(20, dtype=np.int32)]
    found = nll_at_lengths(model, documents, (16, 48), 2)
    for length in (16, 48):
        rows = torch.from_numpy(np.stack([document[:length] for document in documents[:2]]).astype(np.int64))
        with torch.no_grad():
            assert found[length] == pytest.approx(float(model(input_ids=rows, labels=rows).loss), rel=1e-5)
    hf_posswap.patch_model(model, "learned", max_length=100)
    with pytest.raises(DataError, match=r"no held-out document has 200 tokens \(the longest has 60\)"):
        nll_at_lengths(model, documents, (16, 200), 2)
    long = [np.arange(200, dtype=np.int32) % 300] * 2
    assert list(nll_at_lengths(model, long, (16, 200), 2)) == [16]


def test_a_recipe_from_a_pipe_is_refused_and_says_what_to_do() -> None:
    """As the shell's process substitution, `posswap train <(...)`, gives it."""
    reading, writing = os.pipe()
    try:
        os.write(writing, b"include: yarn\n")
        done = CliRunner().invoke(app, ["train", f"/dev/fd/{reading}", "--dry-run"])
        assert done.exit_code == 2, done.output
        assert says(done.stderr, f"/dev/fd/{reading} is a pipe, which can be read only once")
        assert says(done.stderr, "Write it to a file and give that")
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        ("llama", ("swap.centre=true",), "swap.centre: centre_table needs a position table"),
        (
            "llama",
            ("swap.scheme=rope:partial=0.5",),
            "swap.fit: fit_rotation fits a rotation to a learned position table",
        ),
        ("gemma2", (), "Gemma2ForCausalLM changes its scores after that (attn_logit_softcapping)"),
        ("llama", (), None),
        ("gpt2", (), None),
    ],
)
def test_a_dry_run_refuses_a_fit_that_the_training_would_refuse(
    tmp_path: Path, kind: str, settings: tuple[str, ...], problem: str | None
) -> None:
    tiny_model(kind, meta=False, vocab_size=300).save_pretrained(tmp_path / "base")
    given = ["to-alibi", f"model.name={tmp_path / 'base'}", "data.length=32", "data.cut=[1]", "swap.max_length=32"]
    done = CliRunner().invoke(app, ["train", *given, "swap.centre=false", *settings, "--dry-run", "--json"])
    assert (done.exit_code == 0) is (problem is None), done.output
    assert problem is None or says(done.output, problem), done.output
