"""The sliding-window control against a forward a token; and each model against it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_posswap
from hf_posswap.comparison import Candidate, EvalSettings, compare
from hf_posswap.comparison.report import render_html
from hf_posswap.comparison.tables import in_short, markdown
from hf_posswap.patching.record.training import TrainingRecord, swap_digest
from hf_posswap.training import byte_tokenizer
from tests.comparison.test_names import TEXTS, gpt2

LENGTHS = (16, 32, 45, 96)
WINDOW = 32


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of a base, a control and two swaps, and the folder."""
    folder = tmp_path_factory.mktemp("sliding")
    base, control = gpt2(0), gpt2(1)
    candidates = [
        Candidate(base, name="base"), Candidate(control, name="control"),
        Candidate(control, "rope", name="rope"), Candidate(control, "nope", name="nope"),
    ]  # fmt: skip
    settings = EvalSettings(lengths=LENGTHS, metrics=("ppl_prefix", "nll_pos", "ctx_gain"))
    run = compare(candidates, documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings, out=folder)
    return {"results": run.results, "folder": folder, "control": control}


def brute_force(model: GPT2LMHeadModel, length: int) -> np.ndarray:
    """Return the loss of each token, [N, length - 1], a forward each."""
    rows = []
    for text in TEXTS:
        ids, losses = torch.tensor([[256, *text.encode()][:length]]), []
        for token in range(1, length):
            start = 0
            while start + WINDOW <= token:
                start += WINDOW // 2
            with torch.no_grad():
                logits = model(ids[:, start:token]).logits[0, -1]
            losses.append(-torch.log_softmax(logits, -1)[ids[0, token]].item())
        rows.append(losses)
    return np.array(rows)


@pytest.mark.slow
def test_the_control_reads_half_overlapping_windows(found: dict[str, Any]) -> None:
    sliding = found["results"]["sliding"]
    assert (sliding["name"], sliding["of"]) == ("control, sliding window", "control")
    assert (sliding["window"], sliding["stride"]) == (32, 16)
    wanted = brute_force(found["control"], 96)
    assert [row["length"] for row in sliding["ppl_prefix"]] == [32, 45, 96]  # below the window it is the model itself
    for row in sliding["ppl_prefix"]:
        assert row["perplexity"] == pytest.approx(math.exp(wanted[:, : row["length"] - 1].mean()), rel=1e-4)
    assert [(row["start"], row["stop"]) for row in sliding["nll_pos"]] == [(16, 32), (32, 64)]
    for row in sliding["nll_pos"]:
        assert row["loss"] == pytest.approx(wanted[:, row["start"] - 1 : row["stop"] - 1].mean(), abs=1e-4)


def test_each_model_is_held_against_it_beyond_the_window(found: dict[str, Any]) -> None:
    models, wanted = found["results"]["models"], brute_force(found["control"], 96)
    assert "against_sliding" not in models["base"]  # it runs nothing beyond the window
    for name in ("rope", "nope"):
        model = hf_posswap.patch_model(gpt2(1), name, max_length=96).eval()
        rows = models[name]["against_sliding"]
        assert [row["length"] for row in rows] == [45, 96]
        for row in rows:
            ids = torch.tensor([[256, *text.encode()][: row["length"]] for text in TEXTS])
            with torch.no_grad():
                loss = model(ids, labels=ids).loss.item()
            assert row["difference"] == pytest.approx(loss - wanted[:, : row["length"] - 1].mean(), abs=1e-4)
            assert row["low"] <= row["difference"] <= row["high"]
            assert row["p"] <= row["p_holm"] <= 2 * row["p"]


def test_it_stands_in_every_table_page_and_picture(found: dict[str, Any]) -> None:
    results, folder = found["results"], found["folder"]
    name = results["sliding"]["name"]
    assert f"| ┄ {name} | – | " in (folder / "table.md").read_text()
    for file, rows in (("curves.csv", 3 + 2), ("results.csv", 1), ("table.tex", 1)):
        assert (folder / file).read_text().count(name) == rows, file
    page = render_html(results)
    for section in ("perplexity", "positions", "overview"):
        assert name in page.split(f'id="{section}"')[1].split("</section>")[0], section
    for picture in ("perplexity-by-length.svg", "loss-by-position.svg"):
        assert name in (folder / picture).read_text(), picture


def test_the_verdict_comes_first_and_is_the_same_everywhere(found: dict[str, Any]) -> None:
    results = found["results"]
    said = {line.partition(": ")[0]: line.partition(": ")[2] for line in in_short(results)}
    page = render_html(results).split('id="findings"')[1].split("</section>")[0]
    assert list(said) == list(results["models"])
    assert markdown(results).splitlines()[: len(said)] == [f"- {name}: {text}" for name, text in said.items()]
    for name, model in results["models"].items():
        assert model["conclusion"]["text"] == said[name]
        assert f">{said[name]}</p><ul>" in page
    assert said["base"] == "Not swapped: it reads nothing beyond the window."
    assert said["control"] == "Baseline: a swap must beat its sliding window."
    for name in ("rope", "nope"):
        row = results["models"][name]["against_sliding"][-1]
        change = f"{abs(100 * math.expm1(row['difference'])):.1f} % {'lower' if row['difference'] < 0 else 'higher'}"
        is_better = row["p_holm"] <= 0.05 and row["difference"] < 0
        assert said[name].startswith("Worth it" if is_better else "Not yet: without training, reads 3x the window")
        assert f"{row['difference']:+.3f} nats per token, 95 % interval" in said[name]
        if row["p_holm"] <= 0.05:
            assert f"3x the window at {change} perplexity than the sliding window of control" in said[name]
        conclusion = results["models"][name]["conclusion"]
        assert {key: conclusion[key] for key in ("length", "difference", "low", "high", "p")} == {
            "length": 96, "p": row["p_holm"], **{key: row[key] for key in ("difference", "low", "high")}
        }  # fmt: skip


def test_there_is_none_within_the_window_or_without_perplexities() -> None:
    for lengths, metrics in (((16, 32), ("ppl_prefix",)), ((16, 64), ("offset_probe",))):
        settings = EvalSettings(lengths=lengths, metrics=metrics)
        candidates = [Candidate(gpt2(), name="base"), Candidate(gpt2(), "rope")]
        run = compare(candidates, documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings)
        assert run.results["sliding"] is None


def test_an_unswapped_model_reads_the_windows_where_there_is_no_control() -> None:
    settings = EvalSettings(lengths=(32, 64), metrics=("ppl_prefix",), documents=2)
    candidates = [Candidate(gpt2(), "rope", name="rope"), Candidate(gpt2(), name="plain")]
    run = compare(candidates, documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings)
    assert run.results["base"] == "rope"
    assert run.results["sliding"]["of"] == "plain"
    alone = compare(candidates[:1], documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings)
    assert alone.results["sliding"]["of"] == "rope"  # its own reach against its own windows


def test_the_recipe_of_a_control_makes_it_one_whatever_its_name_and_a_trained_swap_needs_it() -> None:
    control, trained = gpt2(1), hf_posswap.patch_model(gpt2(2), "rope", max_length=64).eval()
    facts: dict[str, Any] = {
        "base": "gpt2", "base_weights": "0" * 16, "objective": "next-token", "what": "full", "steps": 1, "tokens": 4096,
        "data": "1" * 16, "held_out": {},
    }  # fmt: skip
    digest = swap_digest(hf_posswap.swap_plan(trained).record)
    control.config.posswap_training = TrainingRecord(recipe="control", swap=None, **facts).to_dict()
    trained.config.posswap_training = TrainingRecord(recipe="learned-to-rope", swap=digest, **facts).to_dict()
    candidates = [Candidate(gpt2(0), name="base"), Candidate(trained, name="rope"), Candidate(control, name="plain")]
    how: dict[str, Any] = {
        "documents": TEXTS, "tokenizer": byte_tokenizer(),
        "settings": EvalSettings(lengths=(32, 64), metrics=("ppl_prefix",)),
    }  # fmt: skip
    results = compare(candidates, **how).results
    assert results["sliding"]["of"] == "plain"
    assert results["models"]["plain"]["training"] == {"recipe": "control", "tokens": 4096}
    assert results["notes"] == []
    alone = compare(candidates[:2], **how).results
    (note,) = alone["notes"]
    assert note.startswith("rope was trained, and no control was compared: ")
    assert note in render_html(alone)
    assert note in markdown(alone)


def test_a_second_run_reads_no_window_again(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "documents": TEXTS, "tokenizer": byte_tokenizer(), "out": tmp_path, "pictures": False,
        "settings": EvalSettings(lengths=(32, 64), metrics=("ppl_prefix",)),
    }  # fmt: skip
    candidates = [Candidate(gpt2(), name="base"), Candidate(gpt2(), "rope")]
    first, again = compare(candidates, **arguments), compare(candidates, **arguments)
    assert first.computed == 3 * len(TEXTS)
    assert again.computed == 0
    assert again.results == first.results  # its date too: nothing new was found


def test_the_windows_are_whole_where_the_lengths_of_their_model_end_before_one() -> None:
    """And so is the passage of `offset_probe`, half a window."""
    candidates = [Candidate(gpt2(), name="base"), Candidate(gpt2(), "rope", max_length=64, name="rope")]
    settings = EvalSettings(lengths=(9, 64), metrics=("ppl_prefix", "offset_probe"))
    results = compare(candidates, documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings).results
    wanted = brute_force(gpt2(), 64)
    assert results["sliding"]["ppl_prefix"][0]["tokens"] == wanted.size
    assert results["sliding"]["ppl_prefix"][0]["perplexity"] == pytest.approx(math.exp(wanted.mean()), rel=1e-4)
    ids = torch.tensor([[256, *text.encode()][:64] for text in TEXTS])
    with torch.no_grad():
        loss = hf_posswap.patch_model(gpt2(), "rope", max_length=64).eval()(ids, labels=ids).loss.item()
    row = results["models"]["rope"]["against_sliding"][0]
    assert row["difference"] == pytest.approx(loss - wanted.mean(), abs=1e-4)
    offsets = results["models"]["base"]["offset_probe"]
    assert [score["offset"] for score in offsets] == [0, 16]
    assert offsets[0]["loss"] == pytest.approx(wanted[:, :15].mean(), abs=1e-4)


def test_a_metric_that_needs_more_positions_than_a_model_has_is_left_out_with_the_reason() -> None:
    large, small = gpt2(), GPT2LMHeadModel(GPT2Config(**gpt2().config.to_dict() | {"n_positions": 12})).eval()
    candidates = [Candidate(large, name="control"), Candidate(small, name="small")]
    settings = EvalSettings(lengths=(8, 32), metrics=("ppl_prefix", "short_reg", "offset_probe"))
    found = compare(candidates, baseline="small", documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings)
    models = found.results["models"]
    assert "ends at 12 tokens, and this text reaches 31" in models["control"]["not_measured"]["short_reg"]
    assert "half the window of 32, and the model ends at 12" in models["small"]["not_measured"]["offset_probe"]
    assert [row["length"] for row in models["control"]["ppl_prefix"]] == [8, 32]


def test_the_window_is_that_of_the_model_that_reads_windows_in_any_order() -> None:
    """Two unswapped models of different windows: results may not depend on which is named first."""
    large, small = gpt2(), GPT2LMHeadModel(GPT2Config(**gpt2().config.to_dict() | {"n_positions": 12})).eval()
    candidates = [Candidate(large, "alibi", name="mine"), Candidate(small, name="control")]
    settings = EvalSettings(lengths=(8, 32), metrics=("ppl_prefix",))
    found = [
        compare(some, baseline="control", documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings).results
        for some in (candidates, candidates[::-1])
    ]
    assert [results["window"] for results in found] == [12, 12]
    assert found[0]["sliding"] == found[1]["sliding"]
    assert found[0]["sliding"] is not None
    assert found[0]["sliding"]["window"] == 12
    assert found[0]["models"]["mine"]["against_sliding"] == found[1]["models"]["mine"]["against_sliding"]
    assert "Windows differ (mine 32): here they are those of control, 12 tokens." in found[0]["notes"]


def test_the_window_is_the_models_where_all_lengths_are_shorter(tmp_path: Path) -> None:
    settings = EvalSettings(lengths=(8, 16), metrics=("ppl_prefix", "ctx_gain"))
    candidates = [Candidate(gpt2(), name="base"), Candidate(gpt2(), "rope", name="rope")]
    found = compare(candidates, documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings, out=tmp_path)
    assert found.results["window"] == WINDOW
    assert "| model | 8 | 16 |" in str(found)
    page = (tmp_path / "report.html").read_text()
    assert "original window 32 tokens" in page
    assert "The same last 8 tokens, read with more and more text before them, compared with 8 tokens before" in page
    assert "full original window" not in page
    assert ["measured only inside the window" in said for said in in_short(found.results)] == [True, True]
