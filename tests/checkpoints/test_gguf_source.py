"""A GGUF file taken as a model: the same logits and token ids, and a refusal of all that would be lost.

The files are written by this package's own export, or by the `gguf` package; the oracle of the logits is the model that
was written, that of the splits llama.cpp's expressions, run by the `regex` package as llama.cpp runs them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.doctor_checks import doctor
from hf_posswap.checkpoints.exports import export
from hf_posswap.cli import app
from hf_posswap.errors import CheckpointError, MissingDependencyError, OptionError
from hf_posswap.training.config import load_recipe
from hf_posswap.utils import gguf_source
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.gguf_tokenizer import PRE_TOKENIZERS, PROBES
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
    "an unknown rope key": ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, {}, r"yarn_log_multiplier"),
    "factors of another width": ({}, {"rope_freqs.weight": [1.0] * 4}, r"rope_freqs.weight, .* 8 pairs of a head"),
    "one list": ({}, {"rope_factors_long.weight": [1.0] * 8}, r"rope_factors_long.weight, .*in this combination"),
    "a bias": ({}, {"blk.0.attn_q.bias": [1.0] * 64}, r"some would be lost. Its biases are attn_q.bias"),
    "an architecture": ({"general.architecture": "rwkv6"}, {}, r"cannot read .* of architecture 'rwkv6'"),
    "a part": ({"split.count": 3}, {}, r"is one of 3 parts of a model. Merge them: llama-gguf-split --merge"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_transformers_would_lose_is_refused(case: str, tmp_path: Path, cache: Path) -> None:
    changes, tensors, message = REFUSED[case]
    path, _ = written(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        hf_posswap.load(edited(path, tmp_path / "changed.gguf", changes, tensors))
    assert not list(cache.rglob("*.safetensors"))


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
    path, _ = written(tmp_path)
    reader: Any = gguf.GGUFReader(path)
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


def trained(folder: Path, pre_tokenizer: Any, size: int = 320, **settings: Any) -> Any:
    """Return a byte-level tokenizer that was trained on `TEXT`, saved to `folder`."""
    tokenizer = Tokenizer(models.BPE(**settings))
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>", "<|im|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im|>", eos_token="<|end|>")
    fast.chat_template = "{% for m in messages %}<|im|>{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    return fast


def test_a_tokenizer_comes_back_with_its_ids_its_template_and_the_models_length(tmp_path: Path) -> None:
    hf_posswap.save(build("llama", vocab_size=320), tmp_path / "saved")
    tokenizer = trained(tmp_path / "saved", pre_tokenizers.ByteLevel(add_prefix_space=False))
    export(tmp_path / "saved", "llamacpp", tmp_path / "m.gguf")
    back = AutoTokenizer.from_pretrained(checkpoint_of(tmp_path / "m.gguf"))
    for text in (*PROBES, *TEXT[:2], "<|im|>a <|end|>"):
        assert back(text)["input_ids"] == tokenizer(text)["input_ids"], text
        assert back.decode(back(text)["input_ids"]) == text
    assert back.model_max_length == 32
    assert (back.bos_token, back.eos_token, back.chat_template) == ("<|im|>", "<|end|>", tokenizer.chat_template)


def test_an_unknown_pre_tokenizer_leaves_the_tokenizer_out_and_says_so_each_time(tmp_path: Path) -> None:
    hf_posswap.save(build("llama", vocab_size=320), tmp_path / "saved")
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
    made = run(app, ["export", str(path), "--target", "llamacpp", "-o", str(tmp_path / "again.gguf")])
    assert made.exit_code == 0, made.output
    assert gap(hf_posswap.load(path), hf_posswap.load(tmp_path / "again.gguf")) == 0.0
    assert run(app, ["advise", str(path), "--max-length", "64"], catch_exceptions=False).exit_code == 0


def test_a_recipe_takes_a_gguf_file_by_its_path_or_by_folder_and_name(tmp_path: Path) -> None:
    recipe = load_recipe("control", [f"model.name={tmp_path}", "model.gguf_file=tiny.gguf"])
    assert recipe.model.source == f"{tmp_path}/tiny.gguf"  # as of the Hub: nothing lies there yet
    assert load_recipe("control", ["model.name=a.gguf"]).model.source == "a.gguf"
