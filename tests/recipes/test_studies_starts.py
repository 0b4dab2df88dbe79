"""The study of starts, from end to end on a tiny model: its rows are what the public functions give, and it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.comparison import read_documents
from hf_posswap.geometry import Geometry
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import read_json
from recipes.studies import starts
from recipes.studies.measuring import MULTIPLES, WINDOW
from recipes.studies.shapes import BentAlibi, BentAlibiMechanism
from tests.training.engine_runs import write_model, write_texts


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny GPT-2 of learned positions, and texts to measure on."""
    folder = tmp_path_factory.mktemp("starts")
    write_model(folder / "gpt2")
    write_texts(folder / "valid", count=9)
    write_texts(folder / "fit", count=3)
    return folder


def study(place: Path, out: str) -> Any:
    """Run the study as its user does, and return its results."""
    given = {"base": "gpt2", "fit": "fit", "valid": "valid", "out": out}
    arguments = [part for name, value in given.items() for part in (f"--{name}", str(place / value))]
    found = CliRunner().invoke(starts.app, [*arguments, "--work", str(place / "work")])
    assert found.exit_code == 0, found.output
    return read_json(place / out / "starts.json")


def fitted_by_hand(place: Path, scheme: str, told: Any) -> Any:
    """Return the scheme that is fitted to what the study says it read."""
    model = hf_posswap.load(place / "gpt2")
    hf_posswap.centre_table(model)
    words = load_tokenizer(place / "gpt2", instead="")
    texts = read_documents([place / "fit"], words, length=told["tokens of a document"], limit=told["documents"])
    window = model.config.n_positions
    return hf_posswap.fit_bias(model, scheme, texts.tokens.reshape(-1, window)).to_dict()


@pytest.mark.slow
def test_the_study_measures_every_start_and_finds_what_it_measured_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = study(place, "first")
    assert [row["start"] for row in result["rows"]] == [start.name for start in starts.STARTS]
    tiled = result["rows"][0]
    assert tiled["in_window"]["difference"] == pytest.approx(0.0, abs=1e-6)  # its rows are the base's own
    assert tiled["in_window"]["nll"] == pytest.approx(result["base"]["nll"], abs=1e-6)
    fitted = [row for row in result["rows"] if "ridge" in row["start"] and "refused" not in row]
    assert fitted
    for row in fitted:
        model = hf_posswap.load(place / "gpt2")
        plan = hf_posswap.plan_swap(
            model, "sinusoidal", ridge=row["scheme"]["ridge"], max_length=result["texts"]["tokens of a piece"]
        )
        assert plan.scheme.to_dict() == row["scheme"]
        assert len(row["lengths"]) == len(MULTIPLES)
    rows = {row["start"]: row for row in result["rows"]}
    stock, begun = rows["alibi, as it is, table centred"], rows["t5, fitted, table centred"]
    assert stock["scheme"] == hf_posswap.plan_swap(hf_posswap.load(place / "gpt2"), "alibi").scheme.to_dict()
    assert begun["scheme"] == fitted_by_hand(place, "t5", result["fit"])
    for name in ("fire", "alibi + alibi"):
        refused = rows[f"{name}, fitted, table centred"]["refused"]
        assert refused.startswith("fit_bias: scheme must be alibi, kerple or t5, whose bias can be fitted, got ")
    assert [name for name, row in rows.items() if "refused" in row and "ridge" not in name] == [
        "fire, fitted, table centred",
        "alibi + alibi, fitted, table centred",
    ]
    table = (place / "first" / "starts.md").read_text(encoding="utf-8")
    assert all(f"| {start.name} |" in table for start in starts.STARTS)
    assert str(place) not in table

    def not_again(*_: Any) -> Any:
        raise AssertionError("it was measured before")

    monkeypatch.setattr("recipes.studies.measuring._causal", not_again)
    assert study(place, "second") == result


@pytest.mark.parametrize(("corners", "near"), [((), 0), ((), 3), ((8,), 0), ((2, 8), 2)])
def test_bends_and_constants_are_the_nearest_and_no_head_prefers_far_keys(corners: tuple[int, ...], near: int) -> None:
    """Against least squares with square roots of the weights; a head that would rise has its slope left out."""
    geometry = Geometry(16, 4, 4, 4, 1, original_length=32, causal=True)
    random = np.random.default_rng(0)
    d = np.arange(32)
    target = -np.outer([0.5, 0.1, 0.02, -0.3], d) + random.normal(size=(4, 32))
    weights = random.dirichlet(np.ones(32), size=4)
    scheme = BentAlibi(corners=corners, near=near)
    fitted = scheme.fitted(torch.from_numpy(target), torch.from_numpy(weights), torch.from_numpy(d), geometry)
    columns = [-d, *(-np.minimum(d, corner) / corner for corner in corners), *(1.0 * (d == n) for n in range(near))]
    assert fitted.start is not None
    for head, found in enumerate(fitted.start):
        root = np.sqrt(weights[head])
        used = columns if found[0] > 0 else columns[1:]
        design = np.stack([*used, np.ones(32)], axis=1)
        expected = np.linalg.lstsq(design * root[:, None], target[head] * root, rcond=None)[0][:-1]
        np.testing.assert_allclose(found if found[0] > 0 else found[1:], expected, rtol=1e-4, atol=1e-5)
    assert fitted.start[0][0] > 0 == fitted.start[3][0]
    mechanism = fitted.mechanism(geometry)
    assert isinstance(mechanism, BentAlibiMechanism)
    bias = mechanism.distance_bias(torch.from_numpy(d)).detach().numpy()  # [H, N]
    np.testing.assert_allclose(bias, np.array(fitted.start) @ np.stack(columns), atol=1e-3)
    assert sum(p.numel() for p in mechanism.parameters()) == 4 * (1 + len(corners) + near), "all of it is learned"


def test_rows_are_differences_of_the_same_documents_and_say_what_was_refused() -> None:
    base = {WINDOW: np.arange(9.0)}
    lengths = {str(multiple): np.arange(9.0) + multiple for multiple in MULTIPLES}
    means = base | lengths | {"last window": np.arange(9.0) + 0.5, "last window alone": np.arange(9.0)}
    shifted = means | {WINDOW: np.arange(9.0) + 0.25, "8": lengths["8"] - 0.75}
    plain, better, refused = (starts.Start(name, "sinusoidal") for name in (starts.PLAIN, "better", "refused"))
    rows = starts.rows_of(base, [(plain, {}, means), (better, {}, shifted), (refused, {}, "too far")])
    assert [row["in_window"]["difference"] for row in rows[:2]] == [0.0, 0.25]
    assert rows[1]["lengths"][-1]["less_plain"]["difference"] == -0.75
    assert rows[1]["last_window"]["difference"] == 0.5
    assert rows[2] == {"start": "refused", "scheme": {}, "refused": "too far"}
