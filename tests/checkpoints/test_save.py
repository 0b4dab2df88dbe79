"""Saving: whole or not at all, over nothing by accident, readable like any file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posswap
from hf_posswap.errors import CheckpointError
from hf_posswap.training.tokenizer import byte_tokenizer


@pytest.fixture
def model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    hf_posswap.patch_model(tiny, "rope", max_length=32)
    return tiny


def test_files_have_the_mode_of_ordinary_files(model: Any, tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_text("")
    expected = (tmp_path / "ordinary").stat().st_mode
    folder = hf_posswap.save(model, tmp_path / "saved")
    assert {file.stat().st_mode for file in folder.iterdir()} == {expected}


def test_a_folder_that_holds_something_is_kept(model: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(CheckpointError, match="not empty.*overwrite=True"):
        hf_posswap.save(model, tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_overwriting_leaves_nothing_of_the_old(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    hf_posswap.save(model, folder)
    (folder / "old.bin").write_text("")
    hf_posswap.save(model, folder, overwrite=True)
    assert not (folder / "old.bin").exists()
    assert hf_posswap.load(folder).config.posswap["scheme"]["name"] == "rope"
    assert os.listdir(tmp_path) == ["saved"]


def hold(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("kept")
    return folder


MODEL = '{"model_type": "gpt2"}'


@pytest.mark.parametrize(
    ("names", "config", "said"),
    [
        (
            [".git/HEAD", "src/main.py"],
            None,
            "holds no config.json of a model and no adapter_config.json, but .git, src",
        ),
        (["package.json"], '{"name": "a web page"}', "holds no config.json of a model"),
        (["a.json"], "{", "holds no config.json of a model"),
        (["a.json"], "[" * 100_000, "holds no config.json of a model"),
        ([".git/HEAD", "model.safetensors"], MODEL, "holds more than a checkpoint: .git would be deleted"),
        (
            ["model.safetensors", "notes.txt"],
            MODEL,
            "notes.txt would be deleted. Move that elsewhere, or choose another",
        ),
        (["checkpoint-500/optimizer.pt", "training_args.bin"], MODEL, "checkpoint-500 would be deleted"),
        ([f"{n}.csv" for n in range(8)], MODEL, "0.csv, 1.csv, 2.csv, 3.csv, 4.csv and 3 more would be deleted"),
    ],
)
def test_overwriting_replaces_nothing_but_checkpoints(
    model: Any, tmp_path: Path, names: list[str], config: str | None, said: str
) -> None:
    folder = hold(tmp_path / "saved", *names)
    if config is not None:
        (folder / "config.json").write_text(config)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=re.escape(said)):
        hf_posswap.save(model, folder, overwrite=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("config", ["config.json", "adapter_config.json"])
def test_overwriting_replaces_what_transformers_peft_and_others_write(model: Any, tmp_path: Path, config: str) -> None:
    folder = hold(
        tmp_path / "saved", "pytorch_model.bin", "tokenizer.model", "vocab.txt", "merges.txt", "chat_template.jinja",
        "README.md", "1_Pooling/config.json", "other/adapter_config.json", "additional_chat_templates/rag.jinja",
    )  # fmt: skip
    (folder / config).write_text(MODEL)
    hf_posswap.save(model, folder, overwrite=True)
    assert not (folder / "vocab.txt").exists()


def test_a_folder_name_that_is_too_long_is_said(model: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write .*File name too long. Choose another folder"):
        hf_posswap.save(model, tmp_path / ("a" * 256))
    folder = hf_posswap.save(model, tmp_path / ("a" * 255))
    hf_posswap.save(model, folder, overwrite=True)


@pytest.mark.parametrize(("before", "saved"), [(16, 32), (12, 12), (10**30, 10**30)])
def test_the_saved_tokenizer_reads_as_far_as_the_swapped_model(
    model: Any, tmp_path: Path, before: int, saved: int
) -> None:
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = before
    folder = hf_posswap.save(model, tmp_path / "model", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(folder).model_max_length == saved
    assert tokenizer.model_max_length == before
    plain = hf_posswap.save(hf_posswap.unpatch_model(model), tmp_path / "plain", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(plain).model_max_length == before


def test_a_file_is_no_folder(model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(CheckpointError, match="is a file; give a folder"):
        hf_posswap.save(model, tmp_path / "file")


def test_an_interrupted_save_leaves_the_old(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_posswap.save(model, tmp_path / "saved")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    tokenizer = type("Tokenizer", (), {"save_pretrained": stop})()
    with pytest.raises(KeyboardInterrupt):
        hf_posswap.save(model, folder, tokenizer=tokenizer, overwrite=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["saved"]


def test_a_native_checkpoint_keeps_its_angles_through_a_cast(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=4096,
    )  # fmt: skip
    swapped = LlamaForCausalLM(config).eval()
    hf_posswap.patch_model(swapped, "yarn", factor=4)
    hf_posswap.save(swapped, tmp_path / "saved")
    loaded: Any = hf_posswap.load(tmp_path / "saved").to(torch.bfloat16)
    stock: Any = LlamaForCausalLM.from_pretrained(tmp_path / "saved").to(torch.bfloat16)
    hidden, positions = torch.zeros(1, 1, 64), torch.tensor([[16000]])
    expected = swapped.model.rotary_emb(hidden, positions)[0]
    assert torch.equal(loaded.model.rotary_emb(hidden, positions)[0], expected)
    assert not torch.allclose(
        stock.model.rotary_emb(hidden, positions)[0], expected, atol=0.1
    )  # what it guards against


@pytest.mark.parametrize("scheme", ["rope", "sinusoidal"])
def test_a_new_head_is_new_and_a_missing_body_is_refused(scheme: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

    whole = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    hf_posswap.patch_model(whole, scheme, max_length=32)
    folder = hf_posswap.save(whole, tmp_path / "saved")
    loaded: Any = hf_posswap.load(folder, model_class=AutoModelForSequenceClassification)
    assert torch.equal(loaded.transformer.h[0].attn.c_attn.weight, whole.transformer.h[0].attn.c_attn.weight)

    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.0.attn.c_attn.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for model_class in (None, AutoModelForSequenceClassification):
        with pytest.raises(CheckpointError, match="missing .*c_attn.weight"):
            hf_posswap.load(folder, model_class=model_class)
