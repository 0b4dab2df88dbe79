"""Checkpoints, adapters, headers of weights, stores and results, as anyone may have written them."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_posswap
from hf_posswap.checkpoints.adapters import ADAPTER_CONFIG
from hf_posswap.checkpoints.load import adapter_source
from hf_posswap.comparison import EvalSettings, evaluate
from hf_posswap.comparison.report import render_html
from hf_posswap.evaluation.store import ARRAYS, LINES, RunStore
from hf_posswap.patching.record.adapter_marks import SIDECAR
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.data import DataSettings, Source, build_data
from hf_posswap.training.engine.checkpoints import SEAL, load_weights, newest, seal
from hf_posswap.utils.weight_shapes import header_shapes
from tests.fuzz.hostile import BUDGETS, damaged, fuzz, mutated, plant, survives, values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder to read from, with a trap in it and one beside it."""
    (tmp_path / "read").mkdir()
    plant(tmp_path / "read")
    return tmp_path / "read"


def saved(folder: Path, kind: str, scheme: str | None = None) -> Path:
    """Save a tiny model, swapped or not, in `folder`."""
    torch.manual_seed(0)
    if kind == "gpt2":
        shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 257, "n_positions": 16}
        model: Any = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=256, eos_token_id=256))
    else:
        sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=11, max_position_embeddings=32))
    if scheme is not None:
        hf_posswap.patch_model(model, scheme, max_length=64)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("examples", BUDGETS)
@pytest.mark.parametrize(("kind", "scheme"), [("gpt2", None), ("gpt2", "kerple"), ("llama", None), ("llama", "linear")])
def test_configs(examples: int, kind: str, scheme: str | None, folder: Path) -> None:
    path = saved(folder, kind, scheme) / "config.json"
    right = path.read_bytes()

    def check(text: bytes) -> None:
        path.write_bytes(text)
        survives(lambda: hf_posswap.explain(str(folder), "rope" if scheme is None else None), folder)
        survives(lambda: hf_posswap.doctor(str(folder)), folder)
        survives(lambda: hf_posswap.check(str(folder)), folder)
        survives(lambda: hf_posswap.load(str(folder)), folder)

    held = mutated(json.loads(right)).map(lambda value: json.dumps(value).encode())
    fuzz(examples, held | damaged(right), check)


@pytest.mark.parametrize("examples", BUDGETS)
def test_headers_of_weights(examples: int, folder: Path) -> None:
    path = saved(folder, "gpt2", "kerple") / "model.safetensors"
    right = path.read_bytes()
    size = struct.unpack("<Q", right[:8])[0]
    header, data = json.loads(right[8 : 8 + size]), right[8 + size :]
    model = hf_posswap.load(folder)

    def packed(held: Any) -> bytes:
        text = json.dumps(held).encode()
        return struct.pack("<Q", len(text)) + text + data

    def check(text: bytes) -> None:
        path.write_bytes(text)
        for work in (header_shapes, lambda path: hf_posswap.doctor(str(path.parent))):
            survives(lambda work=work: work(path), folder)
        survives(lambda: load_weights(model, folder), folder)
        survives(lambda: hf_posswap.load(str(folder)), folder)

    lengths = st.sampled_from((0, 1, 2**31, 2**63, 2**64 - 1, size - 1)).map(lambda n: struct.pack("<Q", n) + right[8:])
    fuzz(examples, mutated(header).map(packed) | damaged(right[: 8 + size]) | lengths, check)


@pytest.mark.parametrize("examples", BUDGETS)
@pytest.mark.parametrize("name", [ADAPTER_CONFIG, SIDECAR])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters(examples: int, name: str, folder: Path) -> None:
    peft = pytest.importorskip("peft")
    base = saved(folder / "base", "gpt2")
    model = hf_posswap.load(base)
    hf_posswap.patch_model(model, "rope", max_length=64)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, r=2))
    hf_posswap.save(adapted, folder / "adapter")
    path = folder / "adapter" / name
    right = path.read_bytes()

    def check(text: bytes) -> None:
        path.write_bytes(text)
        survives(lambda: adapter_source(folder / "adapter"), folder)
        survives(lambda: hf_posswap.load(folder / "adapter"), folder)

    held = mutated(json.loads(right)) | values
    fuzz(examples, held.map(lambda value: json.dumps(value).encode()) | damaged(right), check)


@pytest.mark.parametrize("examples", BUDGETS)
def test_stores(examples: int, folder: Path) -> None:
    with RunStore(folder / "store") as store:
        store.value({"document": "a"}, lambda: {"nll": 2.5})
        store.value({"document": "b"}, lambda: np.arange(4.0))
    lines = (folder / "store" / LINES).read_bytes()
    (array,) = (folder / "store" / ARRAYS).iterdir()
    numbers = array.read_bytes()

    def check(held: tuple[bytes, bytes]) -> None:
        (folder / "store" / LINES).write_bytes(held[0])
        array.write_bytes(held[1])

        def read() -> None:
            with RunStore(folder / "store") as store:
                store.value({"document": "b"}, lambda: np.arange(4.0))

        survives(read, folder)

    entries = [json.loads(line) for line in lines.splitlines()]
    written = mutated(entries).map(lambda held: b"".join(json.dumps(one).encode() + b"\n" for one in _rows(held)))
    fuzz(examples, st.tuples(written | damaged(lines) | st.just(lines), st.just(numbers) | damaged(numbers)), check)


def _rows(held: Any) -> list[Any]:
    return held if isinstance(held, list) else [held]


@pytest.mark.parametrize("examples", BUDGETS)
def test_results(examples: int, folder: Path) -> None:
    model = hf_posswap.load(saved(folder / "model", "gpt2"))
    texts = [f"text {number} " * 9 for number in range(2)]
    how = EvalSettings(lengths=(8, 16), metrics=("ppl_prefix", "nll_pos"))
    found = evaluate(model, "rope", documents=texts, tokenizer=byte_tokenizer(), settings=how)
    right = json.loads(json.dumps(found.results))

    def check(held: Any) -> None:
        survives(lambda: render_html(held), folder)

    fuzz(examples, mutated(right) | values, check)


@pytest.mark.parametrize("examples", BUDGETS)
def test_seals_of_checkpoints(examples: int, folder: Path) -> None:
    place = folder / "checkpoint-3"
    place.mkdir()
    (place / "weights").write_bytes(b"numbers")
    seal(place, 3, {"a": 1})
    right = (place / SEAL).read_bytes()

    def check(text: bytes) -> None:
        (place / SEAL).write_bytes(text)
        survives(lambda: newest(folder, {"a": 1}), folder)

    held = mutated(json.loads(right)) | values
    fuzz(examples, held.map(lambda value: json.dumps(value).encode()) | damaged(right), check)


@pytest.mark.parametrize("examples", BUDGETS)
def test_kept_tokens(examples: int, folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(8):
        (folder / "texts" / f"{number}.txt").write_text(f"{number} and so on " * 20)
    how = DataSettings((Source(str(folder / "texts")),), length=16, cache=folder / "cache", held_out=0.3)
    words = byte_tokenizer()
    build_data(how, words, causal=True, scheme_length=64)
    (kept,) = (path for path in (folder / "cache" / "tokens").iterdir() if path.is_dir())
    right = folder / "right"
    shutil.copytree(kept, right)
    names = sorted(path.name for path in right.iterdir())

    def check(held: tuple[str, bytes]) -> None:
        shutil.copytree(right, kept, dirs_exist_ok=True)
        (kept / held[0]).write_bytes(held[1])
        survives(lambda: build_data(how, words, causal=True, scheme_length=64).train[0], folder)

    fuzz(
        examples,
        st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), damaged((right / name).read_bytes()))),
        check,
    )
