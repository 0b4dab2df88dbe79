"""The study of a pretrained model beyond its window: its blocks are the model's losses, and it goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.training import byte_tokenizer
from recipes.studies import real_model

WINDOW, LENGTH = 2048, 3072
SHAPE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def base_in(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPE, vocab_size=300, max_position_embeddings=WINDOW, bos_token_id=0, eos_token_id=0)
    return hf_posswap.save(LlamaForCausalLM(config).eval(), folder, tokenizer=byte_tokenizer())


def texts_in(folder: Path) -> Path:
    folder.mkdir()
    for number in range(9):
        text = " ".join(str(number * 7919 + word * word) for word in range(900))
        (folder / f"{number}.txt").write_text(text)
    return folder


def run(folder: Path, *options: str, base: str = "base") -> Any:
    given = ["--base", str(folder / base), "--valid", str(folder / "texts"), "--length", str(LENGTH), *options]
    result = CliRunner().invoke(real_model.app, [*given, "--out", str(folder / "out")])
    return result, json.loads((folder / "out" / "real-model.json").read_text())


def test_blocks_are_the_losses_and_more_documents_are_added(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    texts_in(tmp_path / "texts")
    only = ("--only", "base", "--only", "sliding window", "--only", "yarn")
    result, first = run(tmp_path, "--documents", "2", *only)
    assert result.exit_code == 0, result.output
    assert [unit["reading"] for unit in first["units"]] == ["base", "sliding window", "yarn"] * 2
    model, tokenizer = hf_posswap.load(tmp_path / "base"), byte_tokenizer()
    ids = torch.tensor(tokenizer((tmp_path / "texts" / "0.txt").read_text())["input_ids"][:LENGTH])[None]
    swapped = hf_posswap.patch_model(hf_posswap.load(tmp_path / "base"), "yarn", factor=1.5, max_length=LENGTH)
    for unit, reader in ((first["units"][0], model), (first["units"][2], swapped)):
        with torch.no_grad():
            losses = functional.cross_entropy(reader(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        expected = [float(losses[:1023].mean()), *(float(losses[at : at + 1024].mean()) for at in (1023, 2047))]
        assert unit["nll"] == pytest.approx(expected, rel=1e-5)
    window = first["units"][1]["nll"]
    assert window[:2] == pytest.approx(first["units"][0]["nll"][:2], rel=1e-5)
    assert window[2] != pytest.approx(first["units"][0]["nll"][2], rel=1e-5)
    result, later = run(tmp_path, "--documents", "9", *only)
    assert later["units"][:6] == first["units"]
    assert len(later["units"]) == 27
    table = (tmp_path / "out" / "real-model.md").read_text()
    assert "| yarn | 9 | 5." in table
    assert table.count("| yarn | 9 |") == 3
    assert "[" in table.rpartition("| yarn | 9 |")[2]


def test_results_of_another_model_are_not_mixed_in(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    base_in(tmp_path / "other", seed=1)
    texts_in(tmp_path / "texts")
    run(tmp_path, "--documents", "2", "--only", "base")
    result, units = run(tmp_path, "--documents", "2", "--only", "base", base="other")
    assert result.exit_code != 0
    assert "choose another --out" in result.output
    assert len(units["units"]) == 2


def test_a_length_within_the_window_is_refused(tmp_path: Path) -> None:
    base_in(tmp_path / "base")
    texts_in(tmp_path / "texts")
    given = ["--base", str(tmp_path / "base"), "--valid", str(tmp_path / "texts"), "--length", "2048"]
    result = CliRunner().invoke(real_model.app, [*given, "--out", str(tmp_path / "out")])
    assert result.exit_code != 0
    assert "beyond the window of 2048 tokens, got 2048" in result.output
