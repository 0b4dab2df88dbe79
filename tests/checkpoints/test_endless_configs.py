"""A config.json that asks for all memory is refused in words before any is taken: by `load`, `explain`, `doctor`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
)

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.patching.inspect.bounds import MOST_MODULES, Bounds, bounds_by, bounds_in, refuse_endless, within
from hf_posswap.utils.auto_classes import MOST_LAYERS

SIZES: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
MODELS: dict[str, Any] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=11, max_position_embeddings=32)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2, vocab_size=11)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES, vocab_size=11, max_position_embeddings=32)),
    "xglm": lambda: XGLMForCausalLM(
        XGLMConfig(vocab_size=11, d_model=8, ffn_dim=8, num_layers=1, attention_heads=2, max_position_embeddings=32)
    ),
}
HUGE = 10**9
ENDLESS = [
    ("gpt2", None, "n_layer", HUGE, "says n_layer: 1000000000, and 65536 layers are the most"),
    ("gpt2", "kerple", "n_layer", 30_000, "more than 4384 modules, and its weights are 18 tensors"),
    ("gpt2", "rope", "vocab_size", 10**12, "numbers in its weights, and its weights are 16 tensors"),
    ("gpt2", "sinusoidal", "n_positions", 10**12, "numbers in its weights"),
    ("gpt2", None, "n_embd", HUGE, "overflowed|numbers in its weights"),
    ("llama", None, "num_hidden_layers", 10_000, "more than 4288 modules"),
    ("llama", "alibi", "num_hidden_layers", 10**12, "layers are the most"),
    ("llama", "linear", "intermediate_size", 10**10, "numbers in its weights"),
    ("qwen2", None, "num_hidden_layers", 10**12, "layers are the most"),  # whose config makes a list of them
    ("bert", None, "max_position_embeddings", HUGE, "numbers in its weights"),
    ("bert", "rope", "type_vocab_size", 10**12, "numbers in its weights"),
    ("xglm", None, "max_position_embeddings", HUGE, "more than 67108864 entries in a table that it computes"),
]
SECONDS = 20.0
"""For all three; without the bounds most of them fill any memory, which takes minutes."""
MEGABYTES = 400


def edited(folder: Path, model: str, scheme: str | None, **values: Any) -> Path:
    made = MODELS[model]()
    if scheme is not None:
        patch_model(made, scheme, max_length=64)
    made.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.fixture
def _bounded_memory() -> Iterator[None]:
    """Give what asks for the memory of the machine an error, and not the machine."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEGABYTES * 2**20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("_bounded_memory")
@pytest.mark.parametrize(("model", "scheme", "field", "value", "said"), ENDLESS)
def test_an_endless_size_is_refused_in_words_and_at_once(
    model: str, scheme: str | None, field: str, value: int, said: str, tmp_path: Path
) -> None:
    folder = edited(tmp_path / "saved", model, scheme, **{field: value})
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=said):
        hf_posswap.load(folder)
    with pytest.raises(PosswapError, match=said):
        hf_posswap.explain(str(folder))
    findings = [finding.what for finding in hf_posswap.doctor(folder).findings if finding.severity == "error"]
    assert findings
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize("model", MODELS)
def test_what_was_saved_is_within_its_bounds_by_far(model: str, tmp_path: Path) -> None:
    """Twice the layers, a head more or another dtype are no reason to refuse: whoever loads them strictly says so."""
    folder = edited(tmp_path, model, None)
    loaded = hf_posswap.load(folder, dtype=torch.bfloat16)
    bounds = bounds_in(folder, loaded.config)
    modules = len(list(loaded.modules()))
    assert modules * 10 < bounds.modules <= MOST_MODULES
    assert bounds.numbers is not None
    assert bounds.numbers > 4 * sum(one.numel() for one in loaded.parameters())
    for cls in (type(loaded), AutoModelForCausalLM if model != "bert" else type(loaded)):
        refuse_endless(cls, loaded.config, bounds)


def test_a_model_is_built_within_its_bounds_or_refused_by_each() -> None:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
    with torch.device("meta"):
        built = GPT2LMHeadModel(config)
    modules, numbers = sum(1 for _ in built.modules()) - 1, sum(one.numel() for one in built.parameters())
    tied = built.lm_head.weight.numel()  # counted as it is made, and as it is tied
    refuse_endless(GPT2LMHeadModel, config, Bounds(modules, numbers + 2 * tied))
    for bounds, said in ((Bounds(modules - 1), f"{modules - 1} modules"), (Bounds(numbers=numbers - 1), "numbers in")):
        with pytest.raises(CheckpointError, match=f"GPT2Config asks for a model with more than .*{said}"):
            refuse_endless(GPT2LMHeadModel, config, bounds)
    with within(Bounds(), config), torch.device("meta"), pytest.raises(CheckpointError, match="bytes of masks"):
        nn.Module().register_buffer("mask", torch.empty(2**17, 2**17))
    nn.Module().register_buffer("mask", torch.empty(2**17, 2**17, device="meta"))  # nothing is bounded any more


def test_packed_weights_may_be_many_times_what_their_shapes_say() -> None:
    plain, packed = GPT2Config(), GPT2Config(quantization_config={"quant_method": "gptq"})
    few, many = (bounds_by({"a": (10**9,)}, config).numbers or 0 for config in (plain, packed))
    assert many > 7 * few > 7 * 10**9
    assert bounds_by(None, plain) == Bounds()


def test_weights_in_several_files_are_added_up_and_unreadable_ones_leave_the_widest_bounds(tmp_path: Path) -> None:
    model = MODELS["gpt2"]()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="1KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert bounds_in(tmp_path / "many", model.config) == bounds_in(tmp_path / "one", model.config) != Bounds()
    (tmp_path / "one" / "model.safetensors").write_bytes(b"\x00" * 4)
    assert bounds_in(tmp_path / "one", model.config) == Bounds()


def test_as_many_layers_as_are_read_are_read(tmp_path: Path) -> None:
    folder = edited(tmp_path, "gpt2", None, task_layers={"of": [{"layers": MOST_LAYERS}]})
    assert hf_posswap.explain(str(folder)).report.family == "gpt2"
    edited(tmp_path, "gpt2", None, task_layers={"of": [{"layers": MOST_LAYERS + 1}]})
    with pytest.raises(CheckpointError, match="says layers: 65537, and 65536 layers are the most"):
        hf_posswap.explain(str(folder))
