"""One whole quickstart, read from outside; then stopped, killed, repeated, and refused."""

from __future__ import annotations

import copy
import csv
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

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import hf_posswap
from hf_posswap.errors import CheckpointError, DataError, OptionError
from hf_posswap.quickstart import QuickstartResult, QuickstartSettings, run_quickstart
from hf_posswap.quickstart.run import run
from hf_posswap.training import byte_tokenizer, python_corpus

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["base", "control", "rope", "alibi", "sinusoidal", "learned"]


def without_times(value: Any) -> Any:
    """Return `value` without what differs from run to run: seconds, folders, and whether the base was kept."""
    if isinstance(value, dict):
        skipped = {"seconds", "folder", "from_cache"}
        return {key: without_times(item) for key, item in value.items() if key not in skipped}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def test_it_leaves_what_it_promises(finished: QuickstartResult) -> None:
    files = {path.name for path in finished.out.iterdir() if path.is_file()}
    drawn = ("perplexity-by-length", "loss-by-position", "passkey")
    pictures = {f"{name}.{kind}" for name in drawn for kind in ("png", "svg")}
    assert files == {"results.json", "curves.csv", "report.md", "quickstart.json", *pictures}
    assert set(finished.files) == files - {"quickstart.json"}
    assert sorted(path.name for path in (finished.out / "models").iterdir()) == sorted(NAMES[1:])
    assert not [path for path in finished.out.rglob("*") if path.name.startswith(".partial") or path.suffix == ".pt"]
    assert json.loads((finished.out / "results.json").read_text()) == finished.results


def test_every_number_follows_from_the_stored_losses_and_the_models(finished: QuickstartResult) -> None:
    results, tokenizer = finished.results, byte_tokenizer()
    texts = {document.name: document.text for document in python_corpus().held_out}
    ids = torch.tensor([[256, *tokenizer(texts[n])["input_ids"][:127]] for n in results["data"]["held_out_names"]])
    for name in NAMES[1:]:
        model = hf_posswap.load(finished.out / "models" / name).eval()
        for row in results["models"][name]["lengths"]:
            if "cannot_run" not in row:
                part = ids[:, : row["length"]]
                with torch.no_grad():
                    assert row["perplexity"] == pytest.approx(math.exp(model(part, labels=part).loss.item()), rel=1e-4)
        longest = max(row["length"] for row in results["models"][name]["lengths"] if "cannot_run" not in row)
        losses = np.load(finished.out / "nll" / f"{name}-{longest}.npy")
        assert losses.shape == (4, longest - 1)
        first = results["models"][name]["lengths"][0]
        assert first["perplexity"] == pytest.approx(math.exp(losses[:, :15].mean()), rel=1e-5)


def test_a_table_that_ends_gives_a_reason_and_no_number(finished: QuickstartResult) -> None:
    for name in ("base", "control"):
        rows = finished.results["models"][name]["lengths"]
        assert [row.get("cannot_run") for row in rows] == [None, *["table ends at 16"] * 3]
    report = (finished.out / "report.md").read_text()
    assert "**control**: table ends at 16: no number beyond it." in report
    assert all(row.get("perplexity") for row in finished.results["models"]["rope"]["lengths"])


def test_the_best_is_the_best_and_loads_with_its_tokenizer(finished: QuickstartResult) -> None:
    models = finished.results["models"]
    at_longest = {name: models[name]["lengths"][-1]["perplexity"] for name in NAMES[2:]}
    best = finished.results["best"]
    assert best["name"] == min(at_longest, key=at_longest.__getitem__)
    assert finished.best == finished.out / "models" / best["name"]
    assert AutoTokenizer.from_pretrained(finished.best)("ab")["input_ids"] == [97, 98]
    reload = finished.results["reload"]
    assert reload["max_logit_difference"] <= 1e-5
    assert reload["prompt_tokens"] + reload["new_tokens"] > 16


def test_the_csv_holds_the_same_numbers(finished: QuickstartResult) -> None:
    with (finished.out / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    models = finished.results["models"]
    for name, entry in {**models, "control, sliding window": models["control"]["sliding"]}.items():
        own = [row for row in rows if row["model"] == name]
        for row, wanted in zip([r for r in own if r["metric"] == "perplexity"], entry["lengths"], strict=True):
            assert row["note"] == wanted.get("cannot_run", "")
            assert row["value"] == str(wanted.get("perplexity", ""))
        assert [float(r["value"]) for r in own if r["metric"] == "loss"] == [r["loss"] for r in entry["positions"]]


def test_the_control_and_the_swapped_got_the_same_training(finished: QuickstartResult) -> None:
    notes = [finished.results["models"][name]["adaptation"] for name in NAMES[1:]]
    assert all(note["training"] == notes[0]["training"] and note["tokens"] == 3 * 64 for note in notes)
    assert [note["scheme"] and note["scheme"]["name"] for note in notes] == [None, *NAMES[2:]]
    assert finished.results["models"]["base"]["adaptation"]["steps"] == 0


def test_a_second_run_repeats_nothing_and_says_the_same(
    finished: QuickstartResult, cache: Path, tmp_path: Path, console: Console, tiny: QuickstartSettings
) -> None:
    out = tmp_path / "again"
    shutil.copytree(finished.out, out)
    before = {path: path.stat().st_mtime_ns for path in (out / "models").rglob("*.safetensors")}
    again = run(out, tiny, cache=cache, console=console)
    assert without_times(again.results) == without_times(finished.results)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    said = console.file.getvalue()
    assert all(f"{name}: measured earlier" in said for name in NAMES)


_CHILD = """
import sys
sys.path[:0] = [{here!r}, {root!r}]
from pathlib import Path
from conftest import TINY
from hf_posswap.quickstart.run import run
run(Path({out!r}), TINY, cache=Path({cache!r}))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_and_started_again_it_finds_the_same(
    finished: QuickstartResult,
    cache: Path,
    tmp_path: Path,
    how: signal.Signals,
    console: Console,
    tiny: QuickstartSettings,
) -> None:
    out = tmp_path / "out"
    code = _CHILD.format(here=str(Path(__file__).parent), root=str(ROOT), out=str(out), cache=str(cache))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for _ in range(600):
        if (out / "models" / "rope" / "adaptation.json").exists():
            break
        time.sleep(0.1)
    child.send_signal(how)
    said, _ = child.communicate(timeout=60)
    assert child.returncode != 0
    assert not (out / "results.json").exists()
    if how is signal.SIGINT:
        assert "the same command goes on from here" in said
        assert not list(out.rglob(".partial*"))
    again = run(out, tiny, cache=cache, console=console)
    assert "rope: adapted earlier" in console.file.getvalue()
    assert without_times(again.results) == without_times(finished.results)
    assert not list(out.rglob(".partial*"))


def test_other_settings_in_the_same_folder_are_refused(
    finished: QuickstartResult, cache: Path, tiny: QuickstartSettings
) -> None:
    other = dataclasses.replace(tiny, steps=4, seed=7)
    with pytest.raises(
        CheckpointError, match=r"other settings \(settings.seed was 0 and is 7; settings.steps was 3 and is 4"
    ):
        run(finished.out, other, cache=cache)


def test_a_folder_of_something_else_and_a_file_are_refused(
    tmp_path: Path, cache: Path, tiny: QuickstartSettings
) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="is not empty and holds no quickstart"):
        run(tmp_path, tiny, cache=cache)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(CheckpointError, match="cannot write to the folder .*Choose another"):
        run(tmp_path / "thesis.tex", tiny, cache=cache)


def test_a_damaged_part_is_named(
    finished: QuickstartResult, cache: Path, tmp_path: Path, console: Console, tiny: QuickstartSettings
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished.out, out)
    (out / "parts" / "alibi.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*alibi.json.*Delete it"):
        run(out, tiny, cache=cache, console=console)


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


def save_model(folder: Path, **options: Any) -> str:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, bos_token_id=256, eos_token_id=256, **options))
    model.save_pretrained(folder)
    return str(folder)


def test_a_model_that_cannot_be_used_is_one_clear_error(
    tmp_path: Path, console: Console, tiny: QuickstartSettings
) -> None:
    def refused(model: str) -> str:
        with pytest.raises((CheckpointError, DataError)) as caught:
            run(tmp_path / "out", dataclasses.replace(tiny, model=model), console=console)
        assert list((tmp_path / "out").iterdir()) == []  # so that the corrected command may use it
        return str(caught.value)

    assert "'nowhere/at-all' holds no readable" in refused("nowhere/at-all")
    plain = save_model(tmp_path / "plain", n_positions=16, vocab_size=257)
    assert "has no tokenizer that can be read" in refused(plain)
    small = save_model(tmp_path / "small", n_positions=16, vocab_size=100)
    byte_tokenizer().save_pretrained(small)
    assert "use the tokenizer that belongs to the model" in refused(small)
    swapped = GPT2LMHeadModel.from_pretrained(plain)
    hf_posswap.patch_model(swapped, "rope", max_length=64)
    hf_posswap.save(swapped, tmp_path / "swapped", tokenizer=byte_tokenizer())
    assert "already carries a swap (rope(" in refused(str(tmp_path / "swapped"))


def test_a_given_model_with_a_longer_window_is_capped_and_said_so(
    tmp_path: Path, console: Console, tiny: QuickstartSettings
) -> None:
    name = save_model(tmp_path / "model", n_positions=64, vocab_size=257)
    byte_tokenizer().save_pretrained(name)
    settings = dataclasses.replace(tiny, model=name, largest_window=16, steps=1)
    results = run(tmp_path / "out", settings, console=console).results
    assert (results["model"]["window"], results["lengths"]) == (16, [16, 32, 64, 128])
    assert "own window is 64 tokens" in results["notes"][0]
    assert "own window is 64 tokens" in (tmp_path / "out" / "report.md").read_text()
    assert [row.get("cannot_run") for row in results["models"]["base"]["lengths"]][2:] == [None, "table ends at 64"]


@pytest.mark.parametrize("name", ["stories260K", "gpt2-books-256"])
def test_real_checkpoints_of_both_kinds(shared_checkpoints: Path, tmp_path: Path, console: Console, name: str) -> None:
    settings = QuickstartSettings(
        model=str(shared_checkpoints / name),
        steps=1,
        documents=2,
        multiples=(1, 2),
        passkey_trials=1,
        largest_window=128,
        stream_tokens=20_000,
    )
    results = run(tmp_path / "out", settings, console=console).results
    rotary = ["yarn", "ntk", "alibi", "nope"]
    wanted = rotary if name == "stories260K" else ["rope", "alibi", "sinusoidal", "learned"]
    assert [*results["models"], *results["left_out"]][:2] == ["base", "control"]
    assert {*results["models"], *results["left_out"]} - {"base", "control"} == set(wanted)
    assert all(results["left_out"].values())
    assert results["reload"]["max_logit_difference"] <= 1e-4
    runs_on = [row for row in results["models"]["base"]["lengths"] if "perplexity" in row]
    assert len(runs_on) == 2  # 128 and 256 are within the window of both


def test_a_run_is_the_same_from_nothing_twice(
    finished: QuickstartResult, tmp_path: Path, tiny: QuickstartSettings
) -> None:
    again = run(tmp_path / "out", tiny, cache=tmp_path / "other-cache", console=Console(file=io.StringIO()))
    assert without_times(again.results) == without_times(finished.results)
    assert copy.deepcopy(again.results)["model"]["source"]["from_cache"] is False


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_one_shows_what_it_must(tmp_path: Path) -> None:
    done = os.environ.get("HF_POSSWAP_QUICKSTART_DONE")  # .ci/run has just run it: it goes on there, with nothing to do
    results = (
        run_quickstart(Path(done)) if done else run_quickstart(tmp_path / "out", cache=tmp_path / "cache")
    ).results
    models = results["models"]
    base = models["base"]["lengths"][0]["perplexity"]
    assert base < 12  # of 257 symbols: a language model
    assert models["control"]["lengths"][0]["perplexity"] < base
    assert all(models[name]["lengths"][0]["perplexity"] < 2 * base for name in NAMES)
    changes = {name: models[name]["change"] for name in NAMES[2:]}
    assert changes["alibi"]["high"] < 1.0  # better at 8x than at 1x
    assert changes["learned"]["low"] > 2.0  # far worse
    assert changes["rope"]["high"] < 1.25 < changes["learned"]["low"]
    assert results["reload"]["max_logit_difference"] <= 1e-5


def test_a_full_disk_is_one_clear_error_that_names_the_file(tmp_path: Path) -> None:
    # a limit on the size of files stands for the full disk; Python ignores its signal, so the write fails
    limits = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    places = {"out": str(tmp_path / "out"), "cache": str(tmp_path / "cache")}
    code = _CHILD.format(here=str(Path(__file__).parent), root=str(ROOT), **places)
    done = subprocess.run([sys.executable, "-c", limits + code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"hf_posswap.errors.CheckpointError: cannot write {tmp_path / 'cache'}/base-")
    assert "Free some space or choose another folder" in last
    assert not list(tmp_path.rglob(".partial*"))
