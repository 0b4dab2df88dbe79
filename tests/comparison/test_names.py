"""Models go by the run's folder, by as much of a path as tells them apart, or by the name that they were given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap.cli.comparing import parse_candidates
from hf_posswap.comparison import Candidate, EvalSettings, compare
from hf_posswap.comparison.names import candidate_names, reference_name, source_names
from hf_posswap.errors import CheckpointError, OptionError, UnknownNameError
from hf_posswap.training import byte_tokenizer

TEXTS = [f"{number}: " + " ".join(str((number * 7 + i) ** 2) for i in range(60)) for number in range(8)]


def folders(root: Path, *names: str) -> list[str]:
    for name in names:
        (root / name).mkdir(parents=True)
    return [str(root / name) for name in names]


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 256, "eos_token_id": 256}
    return GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=32, initializer_range=0.3, **shape)).eval()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["control/model", "rope/model"], ["control", "rope"]),
        (["small/control/model", "large/control/model"], ["small/control", "large/control"]),
        (["a/x/run/model", "b/x/run/model", "c/run"], ["a/x/run", "b/x/run", "c/run"]),
        (["models/alibi", "rope/model"], ["alibi", "rope"]),
    ],
)
def test_a_model_goes_by_its_run_and_by_more_of_its_path_where_that_is_anothers(
    tmp_path: Path, given: list[str], wanted: list[str]
) -> None:
    sources = folders(tmp_path, *given)
    assert list(source_names(sources).values()) == wanted
    assert candidate_names([Candidate(source) for source in sources]) == wanted
    assert [candidate.name for candidate in parse_candidates(sources, None)] == wanted


def test_a_folder_is_called_alike_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, "rope/model", "control/model")
    monkeypatch.chdir(tmp_path / "rope")
    assert source_names(["model", "../control/model"]) == {"model": "rope", "../control/model": "control"}
    monkeypatch.chdir(tmp_path / "rope" / "model")
    assert source_names([".", "me/gpt2"]) == {".": "rope", "me/gpt2": "gpt2"}


def test_names_are_given_before_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, "control/model", "lr=3/model")
    monkeypatch.chdir(tmp_path)
    found = parse_candidates(
        ["base=org/gpt2", "mine=control/model", "lr=3/model", "+rope:base=500", "far=+yarn:factor=4"], 64
    )
    assert [c.name for c in found] == ["base", "mine", "lr=3", "base+rope:base=500", "far"]
    assert [c.source for c in found] == ["org/gpt2", "control/model", "lr=3/model", "org/gpt2", "org/gpt2"]


@pytest.mark.parametrize(
    ("given", "against", "error", "message"),
    [
        (["a/run/model", "a/run/model"], None, OptionError, r"got \['run', 'run'\]: .* NAME=MODEL on the command line"),
        (["x=a/run/model", "x=b"], None, OptionError, r"got \['x', 'x'\]"),
        (["=a/run/model"], None, OptionError, "'=a/run/model': expected NAME=MODEL, for example rope=runs/rope/model"),
        (["x="], None, OptionError, "'x=': expected NAME=MODEL"),
        (["a/run/model+"], None, OptionError, "expected a scheme after"),
        (["+rope", "a/b"], None, OptionError, r"'\+rope' puts a scheme into the first .*: write MODEL \+rope."),
        (["x=+rope", "a/b"], None, OptionError, r"'x=\+rope' puts a scheme into the first model, and none is before"),
        (["x=/nowhere/at/all"], None, CheckpointError, "'/nowhere/at/all' does not exist"),
        (["a/run/model", "+rope"], "rpe", UnknownNameError, "unknown baseline model 'rpe'"),
    ],
)
def test_what_is_wrong_with_names_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], against: str | None, error: type, message: str
) -> None:
    folders(tmp_path, "a/run/model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        parse_candidates(given, None, against)


def test_names_are_checked_before_torch_is_loaded(tmp_path: Path) -> None:
    folders(tmp_path, "a/run/model")
    code = """
import sys
from hf_posswap.cli.comparing import parse_candidates
from hf_posswap.errors import PosswapError
for given, against in ((["a/run/model"] * 2, None), (["a/run/model"], "none")):
    try:
        parse_candidates(given, None, against)
    except PosswapError:
        assert "torch" not in sys.modules
    else:
        sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_control_is_what_the_others_are_held_against_unless_another_is_asked_for() -> None:
    assert reference_name(["base", "rope"]) == "base"
    assert reference_name(["base", "small/control", "control"]) == "small/control"
    assert reference_name(["base", "control", "rope"], "rope") == "rope"
    candidates = [Candidate(gpt2(seed), name=name) for seed, name in enumerate(("base", "control", "rope"))]
    settings = EvalSettings(lengths=(16, 32), metrics=("ppl_prefix", "short_reg"))
    for against, wanted in ((None, "control"), ("base", "base")):
        results = compare(
            candidates, documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings, baseline=against
        ).results
        others = {"base", "control", "rope"} - {wanted}
        assert results["base"] == wanted
        assert list(results["models"]) == ["base", "control", "rope"]  # the order is the user's
        assert set(results["comparisons"]) == others
        assert {name for name, model in results["models"].items() if "short_reg" in model} == others
    with pytest.raises(UnknownNameError, match="unknown baseline model 'alibi'"):
        compare(candidates, baseline="alibi")
