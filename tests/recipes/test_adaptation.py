"""The study of adaptation: what it measures, when a goal is reached, and the whole of it on a tiny base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.comparison import EvalDocuments
from hf_posswap.errors import OptionError
from hf_posswap.evaluation import RunStore
from hf_posswap.training import byte_tokenizer
from hf_posswap.utils.atomic_io import read_json
from recipes.studies import adaptation
from recipes.studies.goals import Subject, judge, markdown, row_name
from recipes.studies.measuring import LAST, LAST_ALONE, WINDOW, Means, Texts, sliding_means
from recipes.studies.running import RECIPES, check_device
from tests.training.engine_runs import write_model, write_texts
from tests.training.tiny_models import tiny

SIZE = 16


def test_the_sliding_window_is_the_mean_of_each_token_in_its_window() -> None:
    """Token by token: the first window's, then those of windows half of one apart, each with its own forward."""
    model = tiny("gpt2", n_positions=SIZE)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 8 * SIZE)).astype(np.int32)
    texts = Texts(EvalDocuments("random", ("a", "b"), tokens), SIZE, byte_tokenizer())
    with RunStore(None) as store:
        found = sliding_means(model, texts, store)
    for document, mean in zip(tokens, found, strict=True):
        losses = []
        for index in range(1, 8 * SIZE):
            start = next(s for s in range(0, 8 * SIZE, SIZE // 2) if index < s + SIZE)
            ids = torch.from_numpy(document[start:index].astype(np.int64))[None]
            with torch.no_grad():
                losses.append(-model(ids).logits[0, -1].log_softmax(-1)[int(document[index])])
        assert mean == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)


NOISE = np.linspace(3.0, 4.0, 12)


def means(window: float, last: float, alone: float, longest: float) -> Means:
    values = {WINDOW: window, LAST: last, LAST_ALONE: alone, "1": window, "8": longest}
    return {key: NOISE + value for key, value in values.items()}


def goals(scheme: str, **changed: float) -> list[bool]:
    """Return which goals an adapted model reaches beside a control at 0.01 and a base at 0, but for what differs."""
    values = {"window": 0.0, "last": -0.03, "alone": 0.0, "longest": -0.02} | changed
    base, control = (Subject(means(level, 0.0, 0.0, 0.0), NOISE + level - 0.015) for level in (0.0, 0.01))
    found = means(**values)
    return [goal["reached"] for goal in judge(scheme, base, control, found, [found])["goals"]]


@pytest.mark.parametrize(
    ("scheme", "changed", "reached"),
    [
        ("rope", {}, [True, True, True]),
        ("rope", {"window": 0.006}, [False, True, True]),
        ("alibi", {"window": 0.006}, [True, True, True]),
        ("alibi", {"window": 0.011}, [False, True, True]),
        ("rope", {"last": -0.019}, [True, False, True]),
        ("longrope", {"last": -0.019}, [True, True, True]),
        ("longrope", {"last": 0.001}, [True, False, True]),
        ("sinusoidal", {"last": 0.019}, [True, True, True]),
        ("sinusoidal", {"last": 0.021}, [True, False, True]),
        ("rope", {"longest": -0.004}, [True, True, False]),
    ],
)
def test_a_goal_is_reached_or_missed(scheme: str, changed: dict[str, float], reached: list[bool]) -> None:
    assert goals(scheme, **changed) == reached


def test_what_is_uncertain_is_missed() -> None:
    """A mean that is good enough is not, where the documents disagree so much that its bound is on the other side."""
    base = Subject(means(0.0, 0.0, 0.0, 0.0), NOISE)
    after = means(0.0, -0.03, 0.0, -0.02)
    for key in (LAST, "8"):
        after[key] = after[key] + np.tile([-1.0, 1.0], 6)
    found = judge("rope", base, base, after, [after])
    assert found["far_text"]["difference"] == pytest.approx(-0.03)
    assert [goal["reached"] for goal in found["goals"]] == [True, False, False]


def test_under_eight_documents_there_is_no_verdict() -> None:
    few = {key: values[:7] for key, values in means(0.0, -0.03, 0.0, -0.02).items()}
    base = Subject({key: values[:7] for key, values in means(0.0, 0.0, 0.0, 0.0).items()}, NOISE[:7])
    assert [goal["reached"] for goal in judge("rope", base, base, few, [few])["goals"]] == [None] * 3


@pytest.mark.slow
def test_it_runs_from_end_to_end_and_finds_what_is_done(tmp_path: Path) -> None:
    write_model(tmp_path / "gpt2", n_positions=32)
    write_texts(tmp_path / "train", count=12)
    write_texts(tmp_path / "valid", count=9)
    options: list[str] = ["--base", tmp_path / "gpt2", "--train", tmp_path / "train", "--valid", tmp_path / "valid",
               "--tokens", 1100, "--step", 512, "--seeds", 2, "--set", f"data.cache={tmp_path / 'cache'}",
               "--work", tmp_path / "work", "--recipe", RECIPES / "learned-to-rope.yaml",
               "--recipe", RECIPES / "to-alibi.yaml", "--out", tmp_path / "out"]  # type: ignore[list-item]  # fmt: skip
    done = CliRunner().invoke(adaptation.app, list(map(str, options)))
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = read_json(tmp_path / "out" / "adaptation.json")
    assert [(row["recipe"], row["scheme"]) for row in found["rows"]] == [
        ("learned-to-rope", "rope"),
        ("to-alibi", "alibi"),
    ]
    assert (found["tokens"], found["seeds"]) == (1024, 2)
    assert all(len(row["goals"]) == 3 and len(row["by_seed"]) == 2 for row in found["rows"])
    assert str(tmp_path) not in " ".join([found["command"], *found["commands"]])
    assert found["command"].startswith("python -m recipes.studies.adaptation --base $BASE --train $TEXT/train --valid ")
    assert (tmp_path / "out" / "adaptation.md").read_text() == markdown(found)
    assert (tmp_path / "out" / "adaptation.png").stat().st_size > 10_000
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "work" / "runs").glob("*/report.json")}
    assert len(runs) == 2 * 3, "two recipes and one control, two seeds"
    again = CliRunner().invoke(adaptation.app, list(map(str, options)))
    assert again.exit_code == 0, again.output
    assert read_json(tmp_path / "out" / "adaptation.json") == found
    assert {path: path.stat().st_mtime_ns for path in runs} == runs


@pytest.mark.slow
def test_rows_by_tokens_and_by_ablation(tmp_path: Path) -> None:
    """The same recipe after one step, after two, and after two with another start."""
    write_model(tmp_path / "gpt2", n_positions=32)
    write_texts(tmp_path / "train", count=12)
    write_texts(tmp_path / "valid", count=9)
    options = ["--base", tmp_path / "gpt2", "--train", tmp_path / "train", "--valid", tmp_path / "valid",
               "--tokens", 600, "--tokens", 1100, "--step", 512, "--ablate", "swap.fit=0", "--work", tmp_path / "work",
               "--set", f"data.cache={tmp_path / 'cache'}", "--out", tmp_path / "out"]  # fmt: skip
    done = CliRunner().invoke(adaptation.app, list(map(str, options)))
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = read_json(tmp_path / "out" / "adaptation.json")
    assert [(row_name(row), row["tokens"]) for row in found["rows"]] == [
        ("learned-to-rope, 600 tokens", 512),
        ("learned-to-rope, 1,100 tokens", 1024),
        ("learned-to-rope, swap.fit=0", 1024),
    ]
    assert len({row["losses"]["recipe"] for row in found["rows"]}) == 3
    assert len({row["losses"]["control"] for row in found["rows"]}) == 2, "an ablation has the recipe's control"
    assert sum("swap.fit=0" in command for command in found["commands"]) == 1
    assert found["tokens"] == 1024


@pytest.mark.parametrize(
    ("kind", "scheme", "name"),
    [("gpt2", "rope", "rope"), ("llama", "rope:base=500000", "abf"), ("llama", "yarn:factor=2", "yarn")],
)
def test_rope_in_the_place_of_rope_is_another_base(kind: str, scheme: str, name: str) -> None:
    model = tiny(kind)
    hf_posswap.patch_model(model, scheme)
    assert adaptation._name(model.config.posswap) == name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(OptionError, match="^--device cuda: there is no CUDA device here; leave it out for the CPU.$"):
        check_device("cuda")
    with pytest.raises(OptionError, match="^--device tpu: there are cpu and cuda.$"):
        check_device("tpu")


def test_steps_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "gpt2", n_positions=32)
    write_texts(tmp_path / "valid", count=9)
    options = ["--base", str(tmp_path / "gpt2"), "--valid", str(tmp_path / "valid"), "--out", str(tmp_path / "out"),
               "--work", str(tmp_path / "work"), "--tokens", "1100"]  # fmt: skip
    for step in ("300", "2048"):
        done = CliRunner().invoke(adaptation.app, [*options, "--step", step])
        assert done.exit_code != 0
        assert (
            f"1100 tokens in steps of {step}: give at least one step, and as --step a multiple of the 256"
            in " ".join(done.output.split())
        )
