"""The study of encoders: questions that one document alone answers, ranks by sorting, rows by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.errors import DataError
from hf_posswap.training import byte_tokenizer
from hf_posswap.utils.atomic_io import read_json
from recipes.studies import encoders, encoders_reading, encoders_scores, long_texts
from recipes.studies.encoders_scores import CUT, MEAN, TaskResult
from recipes.studies.long_texts import PASSAGE, Question, Task, gains, passages, passkeys, ranks, windows
from tests.training.engine_runs import write_model, write_texts

WORDS = byte_tokenizer()
FRAMED = ([1, 2], [3])


@pytest.fixture
def framed(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Have the tasks put two special tokens before a text and one after it, as a byte tokenizer does not."""
    monkeypatch.setattr(long_texts, "special_frame", lambda tokenizer: FRAMED)
    return FRAMED


@pytest.mark.parametrize("questions", [1, 3])
def test_a_passkey_is_asked_for_by_a_name_that_stands_in_one_document_alone(questions: int) -> None:
    task = passkeys(WORDS, 700, documents=4, questions=questions)
    texts = [bytes(document).decode() for document in task.documents]
    assert {len(text) for text in texts} == {700}
    assert [question.document for question in task.questions] == sorted(list(range(4)) * questions)
    for question in task.questions:
        name = bytes(question.tokens).decode().removeprefix("What is the pass key for ").removesuffix("?")
        assert [f"{name}'s pass key is" in text for text in texts] == [i == question.document for i in range(4)]
        assert texts[question.document][question.place :].startswith(f" {name}'s pass key is")


def test_keys_stand_in_all_parts_of_a_document() -> None:
    task = passkeys(WORDS, 4000, documents=20, questions=4)
    shares = np.array([question.place / 4000 for question in task.questions]).reshape(20, 4)
    assert (np.diff(shares, axis=1) > 0).all()
    for part, column in enumerate(shares.T):
        assert np.ptp(column) > 0.1
        assert abs(column.mean() - (part + 0.5) / 4) < 0.08


def test_a_passage_put_back_gives_the_text_it_came_from(framed: tuple[list[int], list[int]]) -> None:
    rows = np.random.default_rng(0).integers(10, 99, (3, 400))
    task = passages(WORDS, rows, 256, questions=4)
    for number, document in enumerate(task.documents):
        assert len(document) == 256
        text = list(document)
        mine = [question for question in task.questions if question.document == number]
        for question in reversed(mine):
            assert [*question.tokens[:2], question.tokens[-1]] == [1, 2, 3]
            text[question.place : question.place] = question.tokens[2:-1]
        assert len(mine) == 4
        assert text == [1, 2, *rows[number, : 256 - 3 + 4 * PASSAGE].tolist(), 3]


@given(st.integers(1, 60), st.integers(4, 20))
def test_windows_hold_every_token_once_in_order(count: int, window: int) -> None:
    text = list(range(10, 10 + count))
    found = list(windows([1, 2, *text, 3], window, FRAMED))
    assert all(part[:2] == (1, 2) and part[-1] == 3 and 3 < len(part) <= window for part in found)
    assert [token for part in found for token in part[2:-1]] == text
    assert all(len(part) == window for part in found[:-1])


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 9))
def test_ranks_are_places_in_a_sorted_list(documents: int, vectors: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    held, asked = random.normal(size=(documents, vectors, 4)), random.normal(size=(5, 4))
    right = random.integers(0, documents, 5).tolist()
    for vector, number, rank in zip(asked, right, ranks(asked, held, right), strict=True):
        nearness = [max(float(vector @ one) for one in of_document) for of_document in held]
        assert sorted(nearness, reverse=True).index(nearness[number]) + 1 == rank


def test_vectors_that_are_all_the_same_find_nothing() -> None:
    same = np.ones((4, 1, 3)) / math.sqrt(3)
    assert ranks(same[:, 0], same, [0, 1, 2, 3]).tolist() == [4, 4, 4, 4]
    np.testing.assert_allclose(gains(np.array([1, 2, 7, 10, 11])), [1, 1 / math.log2(3), 1 / 3, 1 / math.log2(11), 0])


def test_impossible_tasks_are_refused() -> None:
    with pytest.raises(DataError, match=r"3 pass keys take \d+ tokens here, got documents of 64"):
        passkeys(WORDS, 64, documents=2, questions=3)
    with pytest.raises(DataError, match="2 passages of 32 tokens from documents of 64 take texts of 128 tokens"):
        passages(WORDS, np.zeros((2, 127), dtype=int), 64, questions=2)


def found_of(places: list[int], hits: list[int], vectors: np.ndarray | None = None) -> TaskResult:
    """Return what was found of two documents by two questions each, `hits` being ranks."""
    asked = tuple(Question((0,), i // 2, place) for i, place in enumerate(places))
    return TaskResult(Task("passkey", 8, ((0,) * 8, (0,) * 8), asked), np.array(hits), vectors)


def test_cells_are_means_over_seeds_and_differences_by_document() -> None:
    places = [0, 5, 1, 6]
    seeds = [[found_of(places, [1, 1, 1, 3])], [found_of(places, [1, 12, 1, 1])]]
    cut, mean = [found_of(places, [1, 3, 3, 1])], [found_of(places, [3, 3, 3, 3])]
    (cell,) = encoders_scores.cells_of(seeds, cut, mean, window=4)
    assert cell["by_document"] == [0.75, 0.75]
    assert cell["accuracy"]["mean"] == 6 / 8
    assert cell["by_seed"] == [3 / 4, 3 / 4]
    assert (cell["inside"], cell["beyond"]) == (1.0, 0.5)
    assert cell["ndcg"]["mean"] == pytest.approx((6 + 0.5) / 8)
    assert cell["recall"]["mean"] == 7 / 8
    assert cell["by_part"] == [1.0, 0.5]
    assert cell["less_cut"]["difference"] == pytest.approx(0.25)
    assert cell["less_mean"]["difference"] == pytest.approx(0.75)


def test_nearness_is_the_cosine_at_one_window() -> None:
    ours = np.array([[1.0, 0.0], [0.6, 0.8]])
    theirs = np.array([[1.0, 0.0], [1.0, 0.0]])
    both = [found_of([0] * 4, [1] * 4, vectors) for vectors in (ours, theirs)]
    assert encoders_scores.near_the_base([both[:1]], both[1:], window=8) == pytest.approx(0.8)
    assert encoders_scores.near_the_base([both[:1]], both[1:], window=4) is None


@pytest.mark.parametrize(("better", "verdict"), [(1.0, "holds"), (0.5, "undecided"), (0.0, "the opposite holds")])
def test_claims_are_judged_by_the_interval(better: float, verdict: str) -> None:
    def row(way: str, mean: float) -> dict[str, Any]:
        return {"way": way, "cells": [{"task": "passkey", "length": 8, "by_document": [mean + 0.1, mean - 0.1] * 6}]}

    names = {name for _, *pair in encoders_scores.CLAIMS for name in pair}
    for _, ours, other in encoders_scores.CLAIMS:
        rows = [row(name, better if name == ours else 0.5) for name in names]
        said = {(v["way"], v["other"]): v["verdict"] for v in encoders_scores.verdicts(rows, 8)}
        assert said[ours, other] == verdict


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny encoder of 256 positions and texts."""
    folder = tmp_path_factory.mktemp("encoders")
    write_model(folder / "bert", "bert", max_position_embeddings=WINDOW)
    write_texts(folder / "train", words=300)
    for number in range(9):
        text = " ".join(f"w{word}" for word in np.random.default_rng(number).integers(0, 999, 600))
        (folder / "valid").mkdir(exist_ok=True)
        (folder / "valid" / f"{number}.txt").write_text(text)
    return folder


WINDOW = 256
TINY = encoders.Size(documents=3, steps=2, batch=2, rate=1e-3, fit=2, seeds=2, device="cpu")


def make_small(patched: pytest.MonkeyPatch) -> None:
    """Have the study know the size, and ask two questions of a document: eight keys of bytes fill many windows."""
    patched.setitem(encoders.SIZES, "tiny", TINY)
    patched.setattr(encoders, "QUESTIONS", 2)


def study(place: Path, *words: str, code: int = 0, out: str = "out") -> Any:
    """Run the study as its user does, and return its results, or what it says where it ends with an error."""
    given = {"base": "bert", "train": "train", "valid": "valid", "out": out, "work": "work"}
    arguments = [part for name, value in given.items() for part in (f"--{name}", str(place / value))]
    found = CliRunner().invoke(encoders.app, [*arguments, "--size", "tiny", *words])
    assert found.exit_code == code, found.output
    return read_json(place / out / "encoders.json") if code == 0 else " ".join(found.output.split())


@pytest.fixture(scope="module")
def result(place: Path) -> Any:
    """Return the results of the study on the tiny encoder."""
    with pytest.MonkeyPatch.context() as patched:
        make_small(patched)
        return study(place)


@pytest.mark.slow
def test_the_study_reads_in_all_ways_and_resumes(place: Path, result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row["way"] for row in result["rows"]] == [way.name for way in encoders.WAYS]
    lengths = [("passkey", m * WINDOW) for m in (1, 2, 4, 8)] + [("passage", m * WINDOW) for m in (1, 2, 4, 8)]
    for row in result["rows"]:
        assert [(cell["task"], cell["length"]) for cell in row["cells"]] == lengths
        assert all(len(cell["by_seed"]) == (2 if row["distilled"] else 1) for cell in row["cells"])
    by_name = {row["way"]: row for row in result["rows"]}
    for name in ("table, tiled", "table, hierarchical", MEAN):
        assert by_name[name]["near"] == pytest.approx(1.0, abs=1e-5)  # in the window these are the base itself
    assert by_name["rope, distilled"]["near"] < 0.9999
    page = (place / "out" / "encoders.md").read_text(encoding="utf-8")
    assert all(f"| {way.name} |" in page for way in encoders.WAYS)
    assert str(place) not in page
    assert (place / "out" / "encoders.png").read_bytes().startswith(b"\x89PNG")

    make_small(monkeypatch)
    monkeypatch.setattr(encoders_reading, "embed", None)  # all of it was read before
    runs = {path: path.stat().st_mtime_ns for path in (place / "work").rglob("report.json")}
    assert len(runs) == 4
    assert study(place) == result
    assert runs == {path: path.stat().st_mtime_ns for path in (place / "work").rglob("report.json")}


@pytest.mark.slow
def test_what_cutting_finds_is_what_transformers_gives(place: Path, result: Any) -> None:
    model = hf_posswap.load(place / "bert").eval()
    task = passkeys(WORDS, 2 * WINDOW, documents=3, questions=2)

    def vector(ids: Any) -> torch.Tensor:
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True).hidden_states[-1]
        return torch.nn.functional.normalize(hidden[0].mean(0), dim=0)

    held = torch.stack([vector(document[:WINDOW]) for document in task.documents])
    right = [int((vector(question.tokens) @ held.T).argmax()) == question.document for question in task.questions]
    cells = next(row["cells"] for row in result["rows"] if row["way"] == CUT)
    cell = next(cell for cell in cells if (cell["task"], cell["length"]) == ("passkey", 2 * WINDOW))
    assert cell["accuracy"]["mean"] == pytest.approx(np.mean(right))


@pytest.mark.slow
def test_some_ways_stand_beside_cutting_and_the_mean_of_windows(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    result = study(place, "--only", "table, tiled", out="some")
    assert [row["way"] for row in result["rows"]] == [CUT, MEAN, "table, tiled"]
    assert result["verdicts"] == []
    assert "--only 'table, tiled'" in result["command"]


def test_unknown_names_and_causal_models_are_refused(place: Path) -> None:
    assert "unknown size 'tiny'" in study(place, code=2)
    assert "unknown way 'cutting'" in study(place, "--size", "cpu", "--only", "cutting", code=2)
    assert "unknown pooling 'max'" in study(place, "--size", "cpu", "--pooling", "max", code=2)
    if not torch.cuda.is_available():
        assert "reads on a GPU, and torch finds none here: use --size cpu" in study(place, "--size", "gpu", code=2)
    write_model(place / "gpt2", "gpt2")
    words = ["--size", "cpu", "--base", str(place / "gpt2")]
    assert "the study is of encoders with a learned table, got GPT2LMHeadModel" in study(place, *words, code=3)
