"""One whole quickstart, read from outside; then stopped, killed, repeated, and refused."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.errors import CheckpointError, DataError, OptionError
from hf_posswap.quickstart import QuickstartResult, QuickstartSettings, run_quickstart
from hf_posswap.quickstart.base import LOCK
from hf_posswap.quickstart.run import run
from hf_posswap.training import byte_tokenizer, python_corpus
from hf_posswap.utils.atomic_io import alone_in
from tests.quickstart.conftest import write_gpt2

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["base", "control", "rope", "sinusoidal"]


def weights(out: Path) -> dict[str, bytes]:
    """Return the weights of each finished model, as they lie on the disk."""
    return {path.parents[1].name: path.read_bytes() for path in out.glob("*/model/model.safetensors")}


def numbers(found: QuickstartResult) -> Any:
    """Return all that was measured."""
    return {key: found.results[key] for key in ("lengths", "data", "comparisons", "sliding")} | {
        name: {key: value for key, value in model.items() if key != "plan"}
        for name, model in found.results["models"].items()
    }


def test_it_leaves_what_it_promises(finished: QuickstartResult) -> None:
    files = {path.name for path in finished.out.iterdir() if path.is_file() and not path.name.startswith(".")}
    names = ("difference-by-length", "perplexity-by-length", "loss-by-position")
    pictures = {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    tables = {"results.json", "results.csv", "curves.csv", "needle.csv", "table.md", "table.tex", "report.html"}
    assert files - {"per_doc.jsonl"} == tables | pictures | {"quickstart.json", "reload.json"}
    assert json.loads((finished.out / "results.json").read_text()) == finished.results
    assert list(finished.results["models"]) == NAMES
    assert finished.results["base"] == "control"
    assert finished.results["sliding"]["of"] == "control"
    for name in NAMES[1:]:
        assert (finished.out / name / "report.md").is_file()
    assert not [path for path in finished.out.rglob("*") if path.name.startswith(".partial")]


def test_every_perplexity_follows_from_the_models(finished: QuickstartResult) -> None:
    tokenizer = byte_tokenizer()
    texts = {document.name: document.text for document in python_corpus().held_out}
    ids = torch.tensor(
        [[256, *tokenizer(texts[name])["input_ids"][:127]] for name in finished.results["data"]["names"]]
    )
    for name in NAMES[1:]:
        model = hf_posswap.load(finished.out / name / "model").eval()
        for row in finished.results["models"][name]["ppl_prefix"]:
            part = ids[:, : row["length"]]
            with torch.no_grad():
                assert row["perplexity"] == pytest.approx(math.exp(model(part, labels=part).loss.item()), rel=1e-4)


def test_the_posswap_commands_read_its_folder(finished: QuickstartResult, small: str, tmp_path: Path) -> None:
    def posswap(*arguments: object) -> str:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    posswap("report", finished.out, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == (finished.out / "report.html").read_text()
    models = [f"base={small}", *(finished.out / name / "model" for name in NAMES[1:])]
    how = [
        "--text",
        "python",
        "--lengths",
        "16,32,64,128",
        "--metrics",
        "ppl_prefix,nll_pos",
        "--documents",
        "4",
        "--no-pictures",
    ]
    again = json.loads(posswap("compare", *models, *how, "--json"))
    for name in NAMES:
        assert again["models"][name]["ppl_prefix"] == finished.results["models"][name]["ppl_prefix"]
    assert again["sliding"] == finished.results["sliding"]
    pushed = hf_posswap.push(finished.model, "me/my-model", dry_run=True)
    assert finished.best in pushed.card
    assert "pictures/perplexity-by-length.png" in pushed.files


def test_a_training_is_that_of_posswap_train(finished: QuickstartResult, tmp_path: Path) -> None:
    recipe = json.loads((finished.out / "rope" / "recipe.json").read_text())
    recipe["out"] = str(tmp_path / "rope")
    (tmp_path / "rope.yaml").write_text(json.dumps(recipe))
    done = CliRunner().invoke(app, ["train", str(tmp_path / "rope.yaml")])
    assert done.exit_code == 0, done.output
    assert weights(tmp_path)["rope"] == weights(finished.out)["rope"]


def test_the_best_is_the_best_and_loads_with_its_tokenizer(finished: QuickstartResult) -> None:
    models = finished.results["models"]
    at_longest = {name: models[name]["ppl_prefix"][-1]["perplexity"] for name in NAMES[2:]}
    assert finished.best == min(at_longest, key=at_longest.__getitem__)
    assert AutoTokenizer.from_pretrained(finished.model)("ab")["input_ids"] == [97, 98]
    assert finished.reload["max_logit_difference"] <= 1e-5
    assert finished.reload["prompt_tokens"] + finished.reload["new_tokens"] > 16


def test_a_second_run_repeats_nothing_and_says_the_same(
    finished: QuickstartResult, cache: Path, tmp_path: Path, console: Console, tiny: QuickstartSettings
) -> None:
    out = tmp_path / "again"
    shutil.copytree(finished.out, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    kept = (out / "per_doc.jsonl").read_bytes()
    again = run(out, tiny, cache=cache, console=console)
    assert numbers(again) == numbers(finished)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (out / "per_doc.jsonl").read_bytes() == kept  # no unit was measured again
    assert console.file.getvalue().count("is finished: it is not trained again") == 3  # type: ignore[attr-defined]


_CHILD = """
import sys
from pathlib import Path
from hf_posswap.quickstart import QuickstartSettings
from hf_posswap.quickstart.run import run
settings = {settings!r}
settings |= {{name: tuple(value) for name, value in settings.items() if isinstance(value, list)}}
run(Path({out!r}), QuickstartSettings(**settings), cache=Path({cache!r}))
"""


def child(out: Path, settings: QuickstartSettings, cache: Path, before: str = "") -> list[str]:
    return [sys.executable, "-c", before + _CHILD.format(settings=settings.to_dict(), out=str(out), cache=str(cache))]


@pytest.mark.parametrize("after", ["checkpoints/checkpoint-2", pytest.param("report.json", marks=pytest.mark.slow)])
def test_killed_and_started_again_it_ends_with_the_same_bits(
    finished: QuickstartResult, cache: Path, tmp_path: Path, console: Console, tiny: QuickstartSettings, after: str
) -> None:
    out = tmp_path / "out"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(child(out, tiny, cache), stdout=subprocess.DEVNULL, env=env)
    while not (out / "rope" / after).exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (out / "results.json").exists()
    again = run(out, tiny, cache=cache, console=console)
    assert weights(out) == weights(finished.out)
    assert numbers(again) == numbers(finished)
    assert not list(out.rglob(".partial*"))


def test_other_settings_in_the_same_folder_are_refused(
    finished: QuickstartResult, cache: Path, tiny: QuickstartSettings
) -> None:
    other = dataclasses.replace(tiny, steps=4, seed=7)
    with pytest.raises(
        CheckpointError, match=r"other settings \(settings.seed was 0 and is 7; settings.steps was 3 and is 4"
    ):
        run(finished.out, other, cache=cache)


def test_other_code_or_other_weights_in_the_same_folder_are_refused(
    finished: QuickstartResult,
    cache: Path,
    tiny: QuickstartSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A finished training is not trained again, so the comparison would be of a new base and the old one's children."""
    with monkeypatch.context() as patch:
        patch.setattr("hf_posswap.quickstart.run.package_digest", lambda: "0123456789abcdef")
        with pytest.raises(CheckpointError, match=r"other settings \(hf_posswap was .* code 0123456789abcdef"):
            run(finished.out, tiny, cache=cache)
    mine, out = Path(write_gpt2(tmp_path / "mine")), tmp_path / "out"
    settings = dataclasses.replace(tiny, model=str(mine), schemes=("rope",))
    monkeypatch.setattr("hf_posswap.quickstart.run._train", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(out, settings, cache=cache)
    weights = load_file(mine / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, mine / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"other settings \(weights of the model was '\w+' and is '\w+'\)"):
        run(out, settings, cache=cache)


def stopped(*_: object) -> None:
    raise KeyboardInterrupt


def test_two_at_once_in_one_folder_are_one_and_a_refusal(tmp_path: Path, cache: Path, tiny: QuickstartSettings) -> None:
    with alone_in(tmp_path, "quickstart", LOCK), pytest.raises(CheckpointError, match="another quickstart writes to"):
        run(tmp_path, tiny, cache=cache)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_folder_of_something_else_and_a_file_are_refused(
    tmp_path: Path, cache: Path, tiny: QuickstartSettings
) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="is not empty and holds no quickstart"):
        run(tmp_path, tiny, cache=cache)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(CheckpointError, match="cannot write to the folder .*Choose another"):
        run(tmp_path / "thesis.tex", tiny, cache=cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is a whole number"),
        ({"seed": -1}, "seed is a whole"),
        ({"device": "abacus"}, "'abacus' cannot"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        run_quickstart(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_used_is_one_clear_error(
    tmp_path: Path, console: Console, tiny: QuickstartSettings
) -> None:
    def refused(model: str) -> str:
        with pytest.raises((CheckpointError, DataError)) as caught:
            run(tmp_path / "out", dataclasses.replace(tiny, model=model), console=console)
        assert [path.name for path in (tmp_path / "out").iterdir()] in ([], [LOCK])  # the corrected command may use it
        return str(caught.value)

    def saved(name: str, vocabulary: int) -> str:
        shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
        GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **shape)).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    assert "'nowhere/at-all' holds no readable" in refused("nowhere/at-all")
    plain = saved("plain", 257)
    assert "has no tokenizer that can be read" in refused(plain)
    small = saved("small", 100)
    byte_tokenizer().save_pretrained(small)
    assert "use the tokenizer that belongs to the model" in refused(small)
    swapped = GPT2LMHeadModel.from_pretrained(plain)
    hf_posswap.patch_model(swapped, "rope", max_length=64)
    hf_posswap.save(swapped, tmp_path / "swapped", tokenizer=byte_tokenizer())
    assert "already carries a swap (rope(" in refused(str(tmp_path / "swapped"))


@pytest.mark.slow
def test_a_given_model_with_a_longer_window_is_capped_and_said_so(
    tmp_path: Path, cache: Path, console: Console, tiny: QuickstartSettings
) -> None:
    name = write_gpt2(tmp_path / "model", positions=64)
    settings = dataclasses.replace(tiny, model=name, schemes=("rope",), largest_window=16, steps=1)
    results = run(tmp_path / "out", settings, cache=cache, console=console).results
    assert results["lengths"] == [16, 32, 64, 128]
    assert "own window is 64 tokens" in console.file.getvalue()  # type: ignore[attr-defined]
    assert list(results["models"]["base"]["cannot_run"]) == ["128"]


@pytest.mark.parametrize("name", ["stories260K", "gpt2-books-256"])
def test_real_checkpoints_of_both_kinds(
    shared_checkpoints: Path, tmp_path: Path, cache: Path, console: Console, name: str
) -> None:
    settings = QuickstartSettings(
        model=str(shared_checkpoints / name),
        steps=1,
        documents=2,
        multiples=(1, 2),
        metrics=("ppl_prefix",),
        largest_window=128,
        training_documents=20,
        device="cpu",
    )
    found = run(tmp_path / "out", settings, cache=cache, console=console)
    rotary = ["yarn", "ntk", "alibi", "nope"]
    wanted = rotary if name == "stories260K" else ["rope", "alibi", "sinusoidal"]
    assert {*found.results["models"], *found.left_out} == {"base", "control", *wanted}
    assert all(found.left_out.values())
    assert found.reload["max_logit_difference"] <= 1e-4
    assert len(found.results["models"]["base"]["ppl_prefix"]) == 2  # 128 and 256 are within the window of both


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_one_shows_what_it_must(tmp_path: Path) -> None:
    done = os.environ.get("HF_POSSWAP_QUICKSTART_DONE")  # .ci/run has just run it: it goes on there, with nothing to do
    quiet = Console(file=io.StringIO())
    found = run_quickstart(Path(done)) if done else run_quickstart(tmp_path / "out", console=quiet)
    models = found.results["models"]
    assert list(models) == ["base", "control", "rope", "alibi"]
    window = {name: model["ppl_prefix"][0]["perplexity"] for name, model in models.items()}
    assert window["control"] < window["base"] < 40  # of 1,024 tokens: a language model
    for name, most in (("rope", 0.1), ("alibi", 0.3)):
        far = models[name]["ppl_prefix"][-1]
        assert (far["length"], far["perplexity"] < 1.1 * window[name]) == (8 * 128, True)  # runs on, at a steady loss
        assert models[name]["against_sliding"][-1]["difference"] < most  # nats a token: near, and not yet below
    assert found.reload["max_logit_difference"] <= 1e-5


def test_a_full_disk_is_one_clear_error_that_names_the_file(
    tmp_path: Path, cache: Path, tiny: QuickstartSettings
) -> None:
    # a limit on the size of files stands for the full disk; Python ignores its signal, so the write fails
    limits = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    settings = dataclasses.replace(tiny, model=None)
    command, env = child(tmp_path / "out", settings, cache, limits), os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"hf_posswap.errors.CheckpointError: cannot write {tmp_path / 'out'}/base")
    assert "hoose another folder" in last
    assert not list(tmp_path.rglob(".partial*"))
