"""The study of extension: what it calls an order that holds, and the whole of it on a tiny base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.schemes import SCHEMES
from hf_posswap.utils.atomic_io import read_json
from recipes.studies import extension
from recipes.studies.extension import AFTER, BEFORE, ORDERS, Order, judge
from tests.training.engine_runs import write_model, write_texts

ORDER = Order(("yarn", AFTER), ("ntk", AFTER), 8, "a paper")
DOCUMENTS = 40


def judged(by: float, documents: int = DOCUMENTS, noise: float = 0.01) -> int | None:
    """Return the verdict where the first is `by` above the second, give or take `noise`."""
    random = np.random.default_rng(0)
    higher = random.normal(3.0, 0.5, documents)
    lower = higher + by + random.normal(0.0, noise, documents)
    verdict: int | None = judge(ORDER, {ORDER.lower: {"8": lower}, ORDER.higher: {"8": higher}})["verdict"]
    return verdict


def test_an_order_holds_or_is_reversed_where_the_interval_is_on_one_side_of_0() -> None:
    assert (judged(-0.1), judged(0.1), judged(0.0)) == (1, -1, 0)
    assert judged(-0.001, noise=0.5) == 0


def test_few_documents_decide_nothing() -> None:
    assert judged(-1.0, LEAST_DOCUMENTS - 1) is None
    assert judged(-1.0, LEAST_DOCUMENTS) == 1


def test_the_orders_are_of_rows_that_the_study_has() -> None:
    for order in ORDERS:
        for name, state in (order.lower, order.higher):
            assert name in (extension.TRAINED if state == AFTER else (*extension.TRAINED, *extension.FROZEN))
            assert name in SCHEMES


@pytest.mark.slow
def test_the_study_reads_every_method_before_training_and_after_and_goes_on(tmp_path: Path) -> None:
    write_model(tmp_path / "base", "llama")
    write_texts(tmp_path / "train", count=12)
    write_texts(tmp_path / "valid", count=9)
    words = ["--base", f"{tmp_path / 'base'}", "--tokens", "1100", "--out", f"{tmp_path / 'out'}"]
    words += ["--train", f"{tmp_path / 'train'}", "--valid", f"{tmp_path / 'valid'}", "--work", f"{tmp_path / 'work'}"]
    for _ in range(2):
        found = CliRunner().invoke(extension.app, words)
        assert found.exit_code == 0, found.output
    runs = sorted((tmp_path / "work" / "runs").iterdir())
    assert len(runs) == len(extension.TRAINED)  # the second time none was trained again
    result = read_json(tmp_path / "out" / "extension.json")
    states = {(row["method"], row["state"]) for row in result["rows"]}
    assert states == {
        ("base", "as it is"),
        *((name, BEFORE) for name in (*extension.TRAINED, *extension.FROZEN)),
        *((name, AFTER) for name in extension.TRAINED),
    }
    for row in result["rows"]:
        assert [cell["windows"] for cell in row["lengths"]] == [1, 2, 4, 8]
    page = (tmp_path / "out" / "extension.md").read_text()
    assert "$WORK" in page
    assert f"{tmp_path}" not in page
    assert (tmp_path / "out" / "extension.png").read_bytes().startswith(b"\x89PNG")


def test_fewer_tokens_than_a_step_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "base", "llama")
    write_texts(tmp_path / "valid", count=9)
    words = ["--base", f"{tmp_path / 'base'}", "--tokens", "100", "--out", f"{tmp_path / 'out'}"]
    found = CliRunner().invoke(extension.app, [*words, "--valid", f"{tmp_path / 'valid'}"])
    assert found.exit_code != 0
    assert "100 tokens are less than one window of" in " ".join(found.output.split())
    assert not (tmp_path / "out").exists()
