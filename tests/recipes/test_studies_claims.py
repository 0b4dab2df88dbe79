"""The study of claims: verdicts by numbers made by hand, pairs of one seed, tasks with one answer, all of it once."""

from __future__ import annotations

import collections
import copy as copying
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.comparison import EvalDocuments
from hf_posswap.errors import DataError
from hf_posswap.evaluation import RunStore
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.training.config import load_recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.utils.atomic_io import read_json
from recipes.studies import claims, claims_measuring
from recipes.studies.algorithms import examples
from recipes.studies.claims_judging import BEYOND, CLAIMS, INSIDE, judge
from recipes.studies.claims_page import markdown
from recipes.studies.claims_runs import CONFIG, SCHEMES, SIZES, run_settings, trainings
from recipes.studies.measuring import Texts
from recipes.studies.running import RECIPES
from recipes.studies.verdicts import FAILS, HOLDS, OPEN, Interval, Region, joined, judged, over_both, over_seeds
from tests.training.engine_runs import write_model

BELOW, CLOSE = Region(high=0.0), Region(-0.02, 0.02)


@pytest.mark.parametrize("seeds", range(2, 11))
def test_the_interval_over_seeds_is_student_s(seeds: int) -> None:
    values = np.random.default_rng(seeds).normal(size=seeds)
    low, high = stats.t.interval(0.95, seeds - 1, loc=values.mean(), scale=stats.sem(values))
    found = over_seeds(values.tolist())
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("seeds", [1, 11])
def test_an_interval_takes_two_seeds_and_at_most_ten(seeds: int) -> None:
    with pytest.raises(DataError, match=f"takes 2 to 10 seeds, got {seeds}"):
        over_seeds([0.0] * seeds)


@pytest.mark.parametrize(
    ("region", "low", "high", "verdict"),
    [
        (BELOW, -0.3, -0.1, HOLDS),
        (BELOW, -0.3, 0.1, OPEN),
        (BELOW, 0.1, 0.3, FAILS),
        (BELOW, 0.0, 0.0, FAILS),  # nothing is not less
        (CLOSE, -0.01, 0.01, HOLDS),
        (CLOSE, -0.01, 0.03, OPEN),
        (CLOSE, -0.1, 0.1, OPEN),
        (CLOSE, 0.03, 0.2, FAILS),
        (CLOSE, -0.2, -0.03, FAILS),
    ],
)
def test_a_verdict_is_where_the_whole_interval_lies(region: Region, low: float, high: float, verdict: str) -> None:
    assert region.verdict(Interval((low + high) / 2, low, high)) == verdict


def test_a_verdict_that_another_rate_contradicts_is_none() -> None:
    found = Interval(-0.2, -0.3, -0.1)
    assert judged(BELOW, found, -0.01)["verdict"] == HOLDS
    assert judged(BELOW, found, 0.01) | {"low": 0} == {
        "estimate": -0.2, "low": 0, "high": -0.1, "asked": "below 0", "other rate": 0.01, "verdict": OPEN,
        "why": "the other learning rate says otherwise",
    }  # fmt: skip
    assert judged(Region(low=0.0), found, -0.01)["verdict"] == FAILS
    assert judged(Region(low=0.0), found, 0.01)["verdict"] == OPEN
    assert judged(BELOW, found, -0.01, unfit="not learned") | {"estimate": 0} == {
        "estimate": 0, "low": -0.3, "high": -0.1, "asked": "below 0", "other rate": -0.01, "verdict": OPEN,
        "why": "not learned",
    }  # fmt: skip


def test_a_claim_of_parts_holds_where_all_do() -> None:
    assert joined([HOLDS, HOLDS]) == HOLDS
    assert joined([HOLDS, FAILS, OPEN]) == FAILS
    assert joined([]) == OPEN


def test_an_interval_over_both_covers_that_over_seeds_and_that_over_documents() -> None:
    random = np.random.default_rng(0)
    hard = random.normal(4, 1, 40)  # of the documents, the same in both
    same_seeds = np.stack([hard, hard, hard])
    gains = random.normal(0.1, 0.05, 40)
    found = over_both(same_seeds, same_seeds + gains)  # seeds agree: documents alone
    assert found.estimate == pytest.approx(gains.mean())
    half = 1.96 * gains.std() / math.sqrt(40)
    assert (found.low, found.high) == pytest.approx((gains.mean() - half, gains.mean() + half), abs=0.3 * half)
    shifts = np.array([0.0, 0.1, 0.2])
    found = over_both(same_seeds, same_seeds + shifts[:, None])  # documents agree: seeds alone
    assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, 2, 0.1, stats.sem(shifts)), rel=1e-4)
    with pytest.raises(DataError, match=r"got shapes \(3, 40\) and \(3, 39\)"):
        over_both(same_seeds, same_seeds[:, 1:])
    with pytest.raises(DataError, match="no interval holds over these 4 documents; take more of them"):
        over_both(same_seeds[:, :4], same_seeds[:, :4] + gains[:4])


@pytest.mark.slow
@pytest.mark.parametrize(("of_seeds", "of_documents"), [(0.1, 1.0), (1.0, 1.0), (1.0, 0.1)])
def test_an_interval_over_both_holds_the_truth(of_seeds: float, of_documents: float) -> None:
    random, held = np.random.default_rng(0), 0
    for _ in range(400):
        shifts, hard = random.normal(0, of_seeds, (3, 1)), random.normal(0, of_documents, (1, 16))
        found = over_both(np.zeros((3, 16)), shifts + hard + random.normal(0, 0.1, (3, 16)))
        held += found.low <= 0 <= found.high
    assert held / 400 >= 0.95 - 2 * math.sqrt(0.05 * 0.95 / 400), held / 400


def measured(seed: int) -> Any:
    """Return numbers of one seed that make every claim true; each seed is harder than the one before."""
    levels = {"learned": 3.0, "sinusoidal": 3.0, "rope": 2.8, "alibi": 2.9, "nope": 3.1}
    text = {
        scheme: {
            "curve": [level + seed + 1, level + seed + 0.01 * seed],
            "losses": {m: (np.arange(9.0) + level + seed).tolist() for m in ("1", "2", "4", "8")},
        }
        for scheme, level in levels.items()
    }
    task = {scheme: {"shares": {INSIDE: 1.0, BEYOND: 0.95 if scheme == "nope" else 0.01 * seed}} for scheme in levels}
    found = {"shares": {"1": 1.0, "2": 0.5 + 0.01 * seed, "4": 0.1, "8": 0.0}}
    return {"text": text, "needles": {"alibi": found}, "copy": task, "sorting": copying.deepcopy(task)}


def verdicts(seeds: list[Any], elsewhere: Any = None) -> dict[str, Any]:
    found = [judge(claim, seeds, elsewhere or seeds[0]) for claim in CLAIMS]
    return {claim["claim"]: claim["verdict"] for claim in found}


def test_claims_are_judged_by_pairs_of_one_seed() -> None:
    seeds = [measured(seed) for seed in range(3)]
    assert set(verdicts(seeds).values()) == {HOLDS}  # although seeds differ more than schemes
    for windows, seed in ((m, seed) for m in ("2", "4", "8") for seed in seeds):
        seed["text"]["alibi"]["losses"][windows] = [loss + 0.5 for loss in seed["text"]["alibi"]["losses"][windows]]
    for seed in seeds:
        seed["text"]["rope"], seed["text"]["learned"] = seed["text"]["learned"], seed["text"]["rope"]
        seed["sorting"]["rope"]["shares"][BEYOND] = 0.99
    found = verdicts(seeds)
    wrong = {name for name, verdict in found.items() if verdict == FAILS}
    assert wrong == {"rope converges", "tables end close", "alibi, loss", "nope, sorting"}
    assert {found[name] for name in found.keys() - wrong} == {HOLDS}


def test_what_was_not_learned_inside_decides_nothing_beyond() -> None:
    seeds = [measured(seed) for seed in range(3)]
    for seed in seeds:
        seed["copy"]["alibi"]["shares"][INSIDE] = 0.5
        seed["needles"]["alibi"]["shares"]["1"] = 0.8
    (copied,) = (judge(claim, seeds, {}) for claim in CLAIMS if claim.name == "nope, copy")
    assert [(part["verdict"], part["why"]) for part in copied["parts"]] == [
        *[(HOLDS, "")] * 3, (OPEN, "alibi has not learned it: 50% right inside")
    ]  # fmt: skip
    (needles,) = (judge(claim, seeds, {}) for claim in CLAIMS if claim.name == "alibi, needles")
    assert {part["why"] for part in needles["parts"]} == {"alibi has not learned it: 80% right inside"}
    assert needles["verdict"] == OPEN


def test_a_curve_is_read_where_it_passes_the_end_of_another() -> None:
    slow, quick = np.linspace(5.0, 3.0, 101), np.linspace(5.0, 1.0, 101)
    assert claims_measuring.share_needed(quick, slow) == pytest.approx(0.5, abs=0.03)
    assert claims_measuring.share_needed(slow, quick) is None
    assert claims_measuring.share_needed(slow, slow) == 1.0


@pytest.mark.parametrize("length", [1, 3, 7])
def test_tasks_have_one_answer(length: int) -> None:
    for question, answer in examples("copy", 20, length, 0):
        assert question[:-1] == answer[:-1]
        assert (len(question), question[-1], answer[-1]) == (length + 1, "=", "\n")
    for question, answer in examples("sorting", 20, length, 0):
        assert collections.Counter(question[:-1]) == collections.Counter(answer[:-1])
        assert all(first <= second for first, second in itertools.pairwise(answer[:-1]))
        assert (len(question), question[-1], answer[-1]) == (length + 1, "=", "\n")
    assert examples("copy", 3, length, 0) == examples("copy", 5, length, 0)[:3] != examples("copy", 3, length, 1)


@pytest.mark.parametrize("size", SIZES)
def test_trainings_of_a_seed_differ_in_the_scheme_alone(size: str) -> None:
    sizes = SIZES[size]
    for material, amount in sizes.amounts.items():
        recipes = {
            scheme: to_dict(load_recipe(CONFIG, ["model.name=any", *run_settings(amount, sizes, scheme, 1, 0.001)]))
            for scheme in amount.schemes
        }
        assert set(recipes) <= set(SCHEMES), material
        for scheme, recipe in recipes.items():
            swap = recipe.pop("swap")
            assert (swap["scheme"], swap["max_length"]) == (
                (None, None) if scheme == "learned" else (scheme, 8 * sizes.window)
            )
        assert len({json.dumps(recipe, sort_keys=True) for recipe in recipes.values()}) == 1


def test_the_same_tokens_are_read_at_every_length(tmp_path: Path) -> None:
    write_model(tmp_path / "base", "llama", max_position_embeddings=64)
    model = hf_posswap.load(tmp_path / "base").eval()
    tokenizer = load_tokenizer(tmp_path / "base", instead="")
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (8, 64))
    texts = Texts(EvalDocuments("draws", tuple("abcdefgh"), tokens), 16, tokenizer, multiples=(1, 2, 4))
    with RunStore(None) as store:
        found = claims_measuring.readings(model, texts, store)
    for windows, means in found.items():
        length = 16 * int(windows)
        for document, mean in zip(tokens, means, strict=True):
            losses = []
            for at in range(64):
                start = at // length * length
                if at % 16:  # the first of a window has nothing before it in the shortest reading
                    with torch.no_grad():
                        logits = model(torch.tensor(document[None, start:at])).logits[0, -1]
                    losses.append(-float(logits.log_softmax(-1)[document[at]]))
            assert mean == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.slow
def test_the_study_trains_measures_and_judges(tmp_path: Path) -> None:
    words = ["--size", "smoke", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]

    def study() -> Any:
        done = CliRunner().invoke(claims.app, words)
        assert done.exit_code == 0, done.output + repr(done.exception)
        return read_json(tmp_path / "out" / "claims.json")

    result = study()
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("report.json")}
    assert len(runs) == 3 * (5 + 1 + 5 + 5)
    assert study() == result
    assert runs == {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("report.json")}
    assert str(tmp_path) not in json.dumps(result)
    assert [claim["claim"] for claim in result["claims"]] == [claim.name for claim in CLAIMS]
    learned = [claim["verdict"] for claim in result["claims"] if claim["unit"].startswith("share")]
    assert learned == [OPEN] * 5  # ten steps teach nobody a task
    assert (tmp_path / "out" / "claims.md").read_text() == markdown(result)
    assert (tmp_path / "out" / "claims.png").read_bytes().startswith(b"\x89PNG")
    words += ["--only", "copy", "--only", "text", "--finished"]
    for report in (tmp_path / "work" / "runs").glob("copy-alibi-*/report.json"):
        report.unlink()
    some = study()
    assert [claim["claim"] for claim in some["claims"]] == [
        claim.name for claim in CLAIMS if {pair for part in claim.parts for pair in part.of} <= TRAINED
    ]
    assert len(some["claims"]) == 5
    assert (some["text"], set(some["shares"]["copy"])) == (result["text"], set(SCHEMES) - {"alibi"})
    assert "NoPE generalises in length better than the others: copy" in some["left out"]


TRAINED = {("text", scheme) for scheme in SCHEMES} | {("copy", scheme) for scheme in SCHEMES if scheme != "alibi"}


@pytest.mark.slow
def test_trainings_begin_with_the_same_weights_and_sinusoids_stay_what_they_are(tmp_path: Path) -> None:
    by_scheme = {
        t.scheme: t.run for t in trainings(SIZES["smoke"], tmp_path, ["copy"]) if (t.seed, t.other) == (0, False)
    }
    assert len({run.start for run in by_scheme.values()}) == 1
    run = by_scheme["sinusoidal"]
    run.finish()
    start, end = hf_posswap.load(run.start), hf_posswap.load(run.model)
    table = end.transformer.wpe.weight
    rates = 10000.0 ** -(np.arange(0, table.shape[1], 2) / table.shape[1])
    angles = np.arange(len(table))[:, None] * rates
    expected = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(table.shape)
    scale = math.sqrt(2) * float(start.transformer.wpe.weight.square().mean().sqrt())
    assert np.abs(table.detach().numpy() - scale * expected).max() < 1e-5
    assert not torch.equal(end.transformer.wte.weight, start.transformer.wte.weight)


def test_an_unknown_material_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(claims.app, ["--out", str(tmp_path), "--work", str(tmp_path), "--only", "neddles"])
    assert done.exit_code == 2
    assert "Did you mean 'needles'?" in done.stderr


def test_the_committed_page_says_what_its_json_does() -> None:
    folder = RECIPES / "studies" / "results"
    assert (folder / "claims.md").read_text() == markdown(read_json(folder / "claims.json"))
