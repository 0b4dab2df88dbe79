"""The report of an encoder's training says how near its vectors are to the base's; transformers is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModel

import hf_posswap
from hf_posswap.evaluation.statistics import LEAST_FOR_INTERVAL
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.training.adapting import run_recipe
from hf_posswap.training.data import build_data
from hf_posswap.training.engine import Finished
from hf_posswap.training.engine import run_recipe as engine_run
from tests.training.engine_runs import recipe, write_texts

WINDOW, REACH = 64, 96
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "masked": ("rope", {"objective": {"kind": "masked"}}),
    "embedding": ("alibi", {"objective": {"kind": "embedding"}}),
    "control": ("null", {"objective": {"kind": "masked"}}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vectors")
    write_texts(place / "texts", count=18)  # of which a share is held out: an interval needs five
    return place


def asked(place: Path, kind: str) -> Any:
    scheme, values = KINDS[kind]
    length, window = ("null", 32) if scheme == "null" else (REACH, REACH)
    swap = (f"swap.scheme={scheme}", f"swap.max_length={length}", f"data.length={window}")
    return recipe(place, *swap, "training.max_steps=2", f"out={place / kind}", kind="bert", **values)


def cosines(place: Path, run: Finished, documents: list[Any], length: int, reads: int) -> list[float]:
    """Return the cosine for each document, by transformers' own forward of one text."""
    base, tuned = AutoModel.from_pretrained(place / "bert").eval(), hf_posswap.load(run.model).base_model.eval()
    found = []
    for document in documents:
        whole, leading = (torch.tensor([document[:count].tolist()]) for count in (length, reads))
        with torch.no_grad():
            pair = [one(ids).last_hidden_state.mean(1) for one, ids in ((tuned, whole), (base, leading))]
        found.append(float(functional.cosine_similarity(*pair)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "expected"), [("masked", [64, 96]), ("embedding", [64, 96]), ("control", [64])])
def test_the_report_has_the_cosine_to_the_base_by_length(place: Path, kind: str, expected: list[int]) -> None:
    wanted = asked(place, kind)
    run = run_recipe(wanted)
    tokenizer = load_tokenizer(str(place / "bert"), instead="")
    held_out = build_data(wanted.data, tokenizer, causal=False, scheme_length=REACH).held_out
    rows = run.report["vectors"]
    assert [row["length"] for row in rows] == expected
    for row in rows:
        assert row["base_reads"] == min(row["length"], WINDOW)
        found = cosines(place, run, held_out, row["length"], row["base_reads"])
        assert row["documents"] == len(found) >= LEAST_FOR_INTERVAL
        assert row["cosine"] == pytest.approx(sum(found) / len(found), abs=1e-5)
        assert row["low"] <= row["cosine"] <= row["high"]
    assert json.loads((run.folder / "report.json").read_text())["vectors"] == rows
    said = (run.folder / "report.md").read_text()
    assert all(f"| {row['length']} | {row['base_reads']} | {row['cosine']:.4f} (" in said for row in rows)
    assert "cosine of vectors to the base's" in said


@pytest.mark.slow
def test_nothing_is_said_of_it_without_the_service_or_of_a_causal_model(place: Path) -> None:
    masked = recipe(place, "training.max_steps=2", f"out={place / 'plain'}", kind="bert", objective={"kind": "masked"})
    causal = recipe(place, "training.max_steps=2", f"out={place / 'causal'}")
    for run in (engine_run(masked), run_recipe(causal)):
        assert run.report["vectors"] == []
        assert "cosine" not in (run.folder / "report.md").read_text()
