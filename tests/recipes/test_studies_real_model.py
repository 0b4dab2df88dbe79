"""The studies of a pretrained model: blocks are its losses, tasks its answers, and each goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.models import BPE
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.training import byte_tokenizer
from recipes.studies import real_model
from recipes.studies.real_model_tables import markdown

WINDOW, LENGTH = 2048, 3072
SHAPE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}


def base_in(folder: Path, seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SHAPE | changes, vocab_size=300, max_position_embeddings=WINDOW, bos_token_id=0, eos_token_id=0
    )
    return hf_posswap.save(LlamaForCausalLM(config).eval(), folder, tokenizer=byte_tokenizer())


def texts_in(folder: Path, words: int = 900) -> Path:
    folder.mkdir()
    for number in range(9):
        text = " ".join(str(number * 7919 + word * word) for word in range(words))
        (folder / f"{number}.txt").write_text(text)
    return folder


RESULTS = Path(real_model.__file__).parent / "results" / "real-model"


def run(folder: Path, study: str, *options: str, base: str = "base") -> tuple[Any, Path]:
    given = [study, "--base", str(folder / base), "--valid", str(folder / "texts"), "--work", str(folder / "work")]
    return CliRunner().invoke(real_model.app, [*given, *options, "--out", str(folder / "out")]), folder / "out"


def beyond(folder: Path, *options: str, base: str = "base") -> tuple[Any, dict[str, Any]]:
    result, out = run(folder, "beyond", "--length", str(LENGTH), *options, base=base)
    return result, json.loads((out / "beyond-3k.json").read_text())


def test_blocks_are_the_losses_and_more_documents_are_added(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    texts_in(tmp_path / "texts")
    only = ("--only", "base", "--only", "sliding window", "--only", "yarn")
    result, first = beyond(tmp_path, "--documents", "2", *only)
    assert result.exit_code == 0, result.output
    assert [unit["reader"] for unit in first["units"]] == ["base"] * 2 + ["sliding window"] * 2 + ["yarn"] * 2
    model, tokenizer = hf_posswap.load(tmp_path / "base"), byte_tokenizer()
    text = tokenizer((tmp_path / "texts" / "0.txt").read_text())["input_ids"]
    ids = torch.tensor([tokenizer.bos_token_id, *text][:LENGTH])[None]
    swapped = hf_posswap.patch_model(hf_posswap.load(tmp_path / "base"), "yarn", factor=1.5, max_length=LENGTH)
    for unit, reader in ((first["units"][0], model), (first["units"][4], swapped)):
        with torch.no_grad():
            losses = functional.cross_entropy(reader(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        expected = [float(losses[:1023].mean()), *(float(losses[at : at + 1024].mean()) for at in (1023, 2047))]
        assert unit["nll"] == pytest.approx(expected, rel=1e-5)
    window = first["units"][2]["nll"]
    assert window[:2] == pytest.approx(first["units"][0]["nll"][:2], rel=1e-5)
    assert window[2] != pytest.approx(first["units"][0]["nll"][2], rel=1e-5)
    result, later = beyond(tmp_path, "--documents", "9", *only)
    assert result.exit_code == 0, result.output
    assert later["units"][:6] == first["units"]
    assert len(later["units"]) == 27
    table = (tmp_path / "out" / "beyond-3k.md").read_text()
    assert table.count("| yarn | 9 |") == 3
    assert "[" in table.rpartition("| yarn | 9 |")[2]
    assert (tmp_path / "out" / "beyond-3k.png").read_bytes()[:4] == b"\x89PNG"


def test_results_of_another_model_are_not_mixed_in(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    base_in(tmp_path / "other", seed=1)
    texts_in(tmp_path / "texts")
    beyond(tmp_path, "--documents", "2", "--only", "base")
    result, units = beyond(tmp_path, "--documents", "2", "--only", "base", base="other")
    assert result.exit_code != 0
    assert "choose another --out" in result.output
    assert len(units["units"]) == 2


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    texts_in(tmp_path / "texts")
    result, _ = run(tmp_path, "beyond", "--length", "2048")
    assert result.exit_code != 0
    assert "beyond the window of 2048 tokens, got 2048" in result.output
    result, _ = run(tmp_path, "beyond", "--length", "3072", "--only", "yarnn")
    assert result.exit_code != 0
    assert "--only yarnn: there are base, sliding window, yarn," in result.output
    result, _ = run(tmp_path, "beyond", "--dtype", "half")
    assert "--dtype half: there are float32 and bfloat16" in result.output


def test_a_trained_reader_and_its_control_are_read_too(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    texts_in(tmp_path / "texts")
    train = ("--train", str(tmp_path / "texts"), "--tokens", "8192", "--documents", "2")
    only = ("--only", "yarn, next token", "--only", real_model.CONTROL)
    result, out = run(tmp_path, "beyond", "--length", "4096", *train, *only)
    assert result.exit_code == 0, result.output
    units = json.loads((out / "beyond-4k.json").read_text())["units"]
    assert [unit["reader"] for unit in units] == ["yarn, next token"] * 2 + [real_model.CONTROL] * 2
    assert {unit["tokens"] for unit in units} == {8192}
    _, out = run(tmp_path, "beyond", "--length", "4096", *train[:3], "4096", *train[4:], *only[:2])
    units = json.loads((out / "beyond-4k.json").read_text())["units"]
    assert [unit["tokens"] for unit in units] == [8192] * 4 + [4096] * 2
    table = (out / "beyond-4k.md").read_text()
    assert "| yarn, next token, after 8,192 | 2 |" in table
    assert f"Less the {real_model.CONTROL}, after 8,192" in table
    reports = [json.loads(path.read_text()) for path in (tmp_path / "work" / "runs").glob("*/report.json")]
    assert sorted(report["phases"][0]["tokens"] for report in reports) == [4096, 8192, 8192]
    control = next(report for report in reports if report["phases"][0]["plan"] is None)
    assert control["recipe"]["data"]["length"] == WINDOW


def test_divisors_are_searched_on_the_training_text(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    texts_in(tmp_path / "texts")
    only = ("--only", "longrope, searched", "--documents", "2")
    result, _ = run(tmp_path, "beyond", "--length", str(LENGTH), *only)
    assert "longrope" not in result.output  # there is no text to search on
    result, out = run(tmp_path, "beyond", "--length", str(LENGTH), *only, "--train", str(tmp_path / "texts"))
    assert result.exit_code == 0, result.output
    units = json.loads((out / "beyond-3k.json").read_text())["units"]
    assert [unit["reader"] for unit in units] == ["longrope, searched"] * 2
    (state,) = (tmp_path / "work").glob("longrope-*.json")
    evaluations = json.loads(state.read_text())["progress"]["evaluations"]
    assert len(evaluations) == 1 + real_model.ITERATIONS


def test_tasks_are_the_models_answers(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    texts_in(tmp_path / "texts")
    only = ("--only", "base", "--only", "self_extend", "--lengths", "1024", "--samples", "2", "--reach", "4096")
    result, out = run(tmp_path, "tasks", *only)
    assert result.exit_code == 0, result.output
    units = json.loads((out / "tasks-4k.json").read_text())["units"]
    assert len(units) == 2 * (1 + len(real_model.TASKS))
    assert {len(unit["scores"]) for unit in units if unit["task"] != "continuation"} == {2}
    assert len(next(unit for unit in units if unit["task"] == "continuation")["scores"]) == 9 * 8
    assert "| self_extend | " in (out / "tasks-4k.md").read_text()
    result, _ = run(tmp_path, "tasks", *only, "--task", "niah")
    assert result.exit_code != 0
    assert "--task niah: there are continuation, niah_single," in result.output


def test_a_task_that_the_base_cannot_answer_is_asked_at_the_shortest_length_alone(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    texts_in(tmp_path / "texts")
    asked = ("--task", "niah_single", "--lengths", "1500", "--lengths", "512", "--samples", "1", "--reach", "4096")
    result, out = run(tmp_path, "tasks", "--only", "base", "--only", "self_extend", *asked)
    assert result.exit_code == 0, result.output
    results = json.loads((out / "tasks-4k.json").read_text())
    assert [(unit["reader"], unit["length"]) for unit in results["units"]] == [("base", 512), ("self_extend", 512)]
    results["units"][0]["scores"] = [1.0]  # a base that finds it
    (out / "tasks-4k.json").write_text(json.dumps(results))
    result, _ = run(tmp_path, "tasks", "--only", "base", *asked)
    assert result.exit_code == 0, result.output
    assert {unit["length"] for unit in json.loads((out / "tasks-4k.json").read_text())["units"]} == {512, 1500}
    (out / "tasks-4k.json").write_text(json.dumps(results | {"prompts": "of an older version"}))
    result, _ = run(tmp_path, "tasks", "--only", "base", *asked)
    assert result.exit_code != 0
    assert "has results of prompts of an older version" in result.output


def test_llamacpp_continues_exported_swaps_as_generate_does(tmp_path: Path) -> None:
    base = hf_posswap.load(base_in(tmp_path / "base", hidden_size=64, intermediate_size=32))
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.model = BPE({**tokenizer.get_vocab(), "12": 257}, [("1", "2")])
    hf_posswap.save(base, tmp_path / "base", tokenizer=tokenizer, overwrite=True)
    texts_in(tmp_path / "texts")
    given = ("--base", tmp_path / "base", "--valid", tmp_path / "texts", "--out", tmp_path / "out", "--only", "yarn")
    asked = ["served", *map(str, given), "--length", "1500", "--documents", "2", "--new", "4"]
    for _ in range(2):  # the second time, nothing is left to do
        result = CliRunner().invoke(real_model.app, asked)
        assert result.exit_code == 0, result.output
    units = json.loads((tmp_path / "out" / "served.json").read_text())["units"]
    assert [unit["weights"] for unit in units] == ["f16", "f16", "q8_0", "q8_0"]
    assert [unit["begun"] for unit in units[:2]] == [4, 4]
    assert all(unit["apart"] < 0.02 for unit in units[:2])
    assert all(unit["apart"] < 0.2 for unit in units)
    assert "| yarn | f16 | " in (tmp_path / "out" / "served.md").read_text()


def test_the_likeliest_of_four_continuations_is_chosen() -> None:
    class Repeats(Scorer):
        """Finds a token likely if it is that before it, plus one."""

        def __init__(self) -> None:
            pass

        def nll(self, ids: torch.Tensor, *, scored: int | None = None, **_: Any) -> torch.Tensor:
            assert scored is not None
            return (ids.diff(dim=1)[:, -scored:] != 1).float()

    length = real_model.CONTEXT + 8 * real_model.CONTINUED
    rows = torch.stack([torch.arange(length) + 5000 * number for number in range(4)]).numpy()
    assert real_model.continuations(Repeats(), rows) == [1.0] * 32
    rows[1] = 7  # its own continuation is as unlikely as all others, but for those of row 0, ...
    assert real_model.continuations(Repeats(), rows)[:8] == [1.0] * 8
    rows[2] -= 5000  # ... which is now that of row 2 as well
    assert real_model.continuations(Repeats(), rows) == [1.0] * 8 + [0.0] * 8 + [1.0] * 16


def test_what_other_mechanisms_keep_is_measured_by_tokens(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    texts_in(tmp_path / "texts", words=1900)
    options = ("--train", str(tmp_path / "texts"), "--tokens", "8192", "--rates", "1e-3", "--rates", "1e-9")
    result, out = run(tmp_path, "within", *options, "--only", "nope", "--documents", "2")
    assert result.exit_code == 0, result.output
    units = json.loads((out / "within.json").read_text())["units"]
    assert [(unit["mechanism"], unit["tokens"]) for unit in units] == [("base", 0)] * 2 + [("nope", 0)] * 2 + [
        ("nope", 8192)
    ] * 2
    assert {unit["rate"] for unit in units if "rate" in unit} == {1e-3}  # the other one learns nothing
    untrained, trained = (sum(units[at]["nll"]) for at in (2, 4))
    assert trained < untrained


@pytest.mark.parametrize("name", ["beyond-16k", "beyond-32k", "tasks-16k", "tasks-32k", "within"])
def test_published_tables_are_those_of_the_published_units(name: str) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert (RESULTS / f"{name}.md").read_text() == markdown(result)
