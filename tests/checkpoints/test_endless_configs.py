"""Checkpoints that ask for all memory, lie outside their folder or hold other numbers: `load`, `explain`, `doctor`."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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
from hf_posswap.checkpoints.exports.run import export
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.patching.inspect.untrusted_config import (
    MOST_MODULES,
    Bounds,
    bounds_by,
    bounds_in,
    refuse_endless,
    within,
)
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
    ("gpt2", None, "num_labels", 2**40, "says num_labels: 1099511627776, and 4194304 labels are the most"),
    ("bert", "rope", "num_labels", 2**31, "and 4194304 labels are the most"),
    ("bert", None, "depths", [HUGE], "says depths: 1000000000, and 65536 layers are the most"),
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
    model: str, scheme: str | None, field: str, value: Any, said: str, tmp_path: Path
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


def test_a_swapped_checkpoint_with_endless_labels_is_refused_by_auto_classes_too(tmp_path: Path) -> None:
    folder = edited(tmp_path, "gpt2", "kerple", num_labels=2**40)
    with pytest.raises(CheckpointError, match="num_labels: 1099511627776, and 4194304 labels are the most"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{{"model_type": "gpt2", "n_embd": {"9" * 5000}}}', "it has an integer of 5000 digits"),
        (f'{{"model_type": "gpt2", "a": {"[" * 200}{"]" * 200}}}', "more than 64 levels"),
        ('{"model_type": "gpt2"', "config.json.*Expecting"),
    ],
)
@pytest.mark.parametrize("work", [hf_posswap.load, hf_posswap.explain, hf_posswap.doctor])
def test_a_config_that_is_no_config_is_refused(work: Any, text: str, said: str, tmp_path: Path) -> None:
    edited(tmp_path, "gpt2", None)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=said):
        work(str(tmp_path))


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    folder = edited(tmp_path, "gpt2", None)
    for name in ("generation_config.json", "config.json"):
        with (folder / name).open("ab") as file:
            file.truncate(2**40)  # it takes no room on the disk
        with pytest.raises(CheckpointError, match=f"{name} of .* has 1099511627776 bytes"):
            hf_posswap.load(folder)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "{folder}/outside.safetensors", "sub/../a.safetensors", ".."]
)
def test_weights_outside_the_folder_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """Stock transformers reads them: from wherever the file that it was given says."""
    folder = tmp_path / "saved"
    MODELS["gpt2"]().save_pretrained(folder, max_shard_size="1KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = index["weight_map"]["transformer.wte.weight"]
    (folder / moved).rename(tmp_path / "outside.safetensors")
    named = name.format(folder=tmp_path)
    index["weight_map"] = {key: named if file == moved else file for key, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    if "outside" in name:
        GPT2LMHeadModel.from_pretrained(folder)
    for work in (
        hf_posswap.load,
        hf_posswap.explain,
        hf_posswap.doctor,
        lambda one: export(one, "vllm", tmp_path / "new"),
    ):
        with pytest.raises(CheckpointError, match=f"index.json of .*saved.* names {re.escape(repr(named))}"):
            work(str(folder))
    path.rename(folder / "model.safetensors.index.any.json")
    with pytest.raises(CheckpointError, match=f"names {re.escape(repr(named))}"):
        hf_posswap.load(folder, variant="any")


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("scheme", [None, "kerple"])
def test_integers_for_floating_point_weights_are_refused_by_name(
    kind: torch.dtype, scheme: str | None, tmp_path: Path
) -> None:
    """Stock transformers takes them for the numbers themselves."""
    folder, name = edited(tmp_path, "gpt2", scheme), "transformer.h.0.mlp.c_fc.weight"
    weights = load_file(folder / "model.safetensors")
    weights[name] = (100 * weights[name]).to(kind)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if scheme is None:
        stock = GPT2LMHeadModel.from_pretrained(folder).get_parameter(name)
        assert torch.equal(stock, weights[name].float())
    with pytest.raises(CheckpointError, match=f"hold integers where .*{name} .*lacks quantization_config"):
        hf_posswap.load(folder)
    assert any("integers, which transformers takes" in one.what for one in hf_posswap.doctor(folder).findings)


def test_integers_under_another_prefix_are_found_and_buffers_of_integers_are_right(tmp_path: Path) -> None:
    folder = edited(tmp_path, "bert", None)
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.position_ids"] = torch.arange(32)[None]  # as checkpoints of 2020 have them
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert hf_posswap.load(folder) is not None
    name = "bert.embeddings.word_embeddings.weight"
    weights["embeddings.word_embeddings.weight"] = weights.pop(name).to(torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embeddings\.word_embeddings\.weight"):
        hf_posswap.load(folder)
