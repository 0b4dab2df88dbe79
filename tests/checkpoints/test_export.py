"""`export`: verdicts with their reasons, configs that mean the same, and GGUF metadata read back by `gguf` itself."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.doctor_checks import doctor
from hf_posswap.checkpoints.exports import TARGETS, export
from hf_posswap.checkpoints.exports.gguf_keys import ARCHITECTURES
from hf_posswap.checkpoints.exports.mechanism import stated
from hf_posswap.cli import app
from hf_posswap.errors import CheckpointError, UnknownNameError, UnsupportedModelError, UnsupportedSwapError
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
    "dynamic": ("llama", "dynamic", {"factor": 4.0}, ("approximate", "approximate", "approximate", "approximate")),
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
        ("exact", "exact", "approximate", "approximate"),
    ),
    "longrope": (
        "llama",
        "longrope",
        {"factor": 2.0} | LISTS,
        ("approximate", "approximate", "impossible", "approximate"),
    ),
    "angles": (
        "llama",
        "rope",
        {"frequencies": [1 / (i + 1) for i in range(8)]},
        ("exact", "exact", "impossible", "approximate"),
    ),
    "llama3": ("llama", "llama3", {"factor": 4.0}, ("exact", "exact", "exact", "exact")),
    "p_rope": ("llama", "p_rope", {}, ("exact", "exact", "impossible", "impossible")),
    "nope": ("llama", "nope", {}, ("impossible", "impossible", "impossible", "impossible")),
    "a table": ("gpt2", "sinusoidal", {}, ("exact", "exact", "exact", "exact")),
    "gpt2 nope": ("gpt2", "nope", {}, ("exact", "exact", "exact", "exact")),
    "plugin": ("gpt2", "rope", {}, ("impossible", "impossible", "impossible", "impossible")),
    "plugin llama": ("llama", "alibi", {}, ("impossible", "impossible", "impossible", "impossible")),
    "plugin, own slopes": (
        "gpt2",
        "alibi",
        {"slopes": [0.5, 0.1, 0.02, 0.0]},
        ("impossible", "impossible", "impossible", "impossible"),
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
    assert export(folder, "transformers").verdict == "exact"
    if "plugin" in case:
        assert all("posswap to-native" in each.why for each in found)


ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "rope": ("llama", {"base": 5e5}),
    "linear": ("llama", {"factor": 4.0}),
    "yarn": ("llama", {"factor": 4.0, "attention_factor": 1.3}),
    "llama3": ("llama", {"factor": 4.0}),
    "longrope": ("llama", {"factor": 2.0} | LISTS),
    "ntk": ("gpt_neox", {"factor": 4.0}),
    "dynamic": ("gpt_neox", {"factor": 4.0}),
}


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("scheme", list(ROPES))
def test_what_is_written_means_the_same_to_transformers(scheme: str, target: str, tmp_path: Path) -> None:
    name, options = ROPES[scheme]
    folder = saved(tmp_path / "x", name, scheme, **options)
    if export(folder, target).verdict == "impossible":
        with pytest.raises(UnsupportedSwapError, match=f"{target} cannot run .*Nothing was written"):
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
    assert "nothing tells: check it" in export(folder, "vllm").why
    assert export(folder, "vllm").changes == {}


@pytest.mark.parametrize(
    "options", [{}, {"attention_factor": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"beta_fast": 8}]
)
def test_yarn_has_the_factor_of_transformers_in_every_spelling(options: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "yarn", factor=4.0, **options)
    config = transformers.AutoConfig.from_pretrained(folder)
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert stated(config).attention == pytest.approx(expected)
    assert export(folder, "vllm").config["rope_parameters"]["attention_factor"] == pytest.approx(expected)
    rope = export(folder, "sglang").config["rope_parameters"]
    assert (0.1 * math.log(4) + 1) * rope["attn_factor"] == pytest.approx(expected)
    assert "mscale" not in rope
    keys = export(folder, "llamacpp").gguf
    assert (0.1 * math.log(4) + 1) * keys["llama.rope.scaling.attn_factor"] == pytest.approx(expected)


def test_longrope_has_the_factor_of_transformers(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "longrope", factor=2.0, **LISTS)
    config = transformers.AutoConfig.from_pretrained(folder)
    _, expected = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
    without = copy.deepcopy(config)
    del without.rope_parameters["attention_factor"]
    assert stated(config).attention == pytest.approx(expected)
    assert stated(without).attention == pytest.approx(ROPE_INIT_FUNCTIONS["longrope"](without, "cpu")[1])
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


GGUF_KEYS = {
    "context_length": gguf.Keys.LLM.CONTEXT_LENGTH,
    "rope.freq_base": gguf.Keys.Rope.FREQ_BASE,
    "rope.dimension_count": gguf.Keys.Rope.DIMENSION_COUNT,
    "rope.scaling.type": gguf.Keys.Rope.SCALING_TYPE,
    "rope.scaling.factor": gguf.Keys.Rope.SCALING_FACTOR,
    "rope.scaling.attn_factor": gguf.Keys.Rope.SCALING_ATTN_FACTOR,
    "rope.scaling.original_context_length": gguf.Keys.Rope.SCALING_ORIG_CTX_LEN,
    "rope.scaling.yarn_beta_fast": gguf.Keys.Rope.SCALING_YARN_BETA_FAST,
    "rope.scaling.yarn_beta_slow": gguf.Keys.Rope.SCALING_YARN_BETA_SLOW,
}


@pytest.mark.parametrize("scheme", ["rope", "linear", "yarn"])
def test_gguf_itself_writes_and_reads_the_metadata(scheme: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", scheme, max_length=4 * LENGTH)
    made = export(folder, "llamacpp", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "gguf-metadata.json").read_text()) == made.gguf
    assert {key.removeprefix("llama.") for key in made.gguf} <= GGUF_KEYS.keys()
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    rope = made.gguf
    writer.add_context_length(rope["llama.context_length"])
    writer.add_rope_freq_base(rope["llama.rope.freq_base"])
    writer.add_rope_dimension_count(rope["llama.rope.dimension_count"])
    if scheme != "rope":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["llama.rope.scaling.type"]))
        writer.add_rope_scaling_factor(rope["llama.rope.scaling.factor"])
    if scheme == "yarn":
        writer.add_rope_scaling_attn_factors(rope["llama.rope.scaling.attn_factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["llama.rope.scaling.original_context_length"])
        writer.add_rope_scaling_yarn_beta_fast(rope["llama.rope.scaling.yarn_beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["llama.rope.scaling.yarn_beta_slow"])
    writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = gguf.GGUFReader(tmp_path / "x.gguf")
    for key, value in made.gguf.items():
        field = read.get_field(GGUF_KEYS[key.removeprefix("llama.")].format(arch="llama"))
        assert field is not None, key
        found = field.contents()
        assert found == value if isinstance(value, str) else found == pytest.approx(value)
    expected = {"general.architecture"} | set(made.gguf)
    assert {name for name in read.fields if not name.startswith("GGUF.")} == expected


def test_architectures_are_those_of_gguf() -> None:
    assert set(ARCHITECTURES.values()) <= set(gguf.MODEL_ARCH_NAMES.values())


def test_wrong_targets_and_folders_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", "llama", "yarn", factor=4.0)
    with pytest.raises(UnknownNameError, match="unknown target 'vlm'. Did you mean 'vllm'"):
        export(folder, "vlm")
    with pytest.raises(CheckpointError, match="is not empty; give a folder that is new"):
        export(folder, "vllm", folder)
    with pytest.raises(CheckpointError, match="lies in the checkpoint itself"):
        export(folder, "vllm", folder / "inside")
    with pytest.raises(CheckpointError, match="holds no readable model config"):
        export(tmp_path / "missing", "vllm")
    nested = transformers.Gemma3TextConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=11)
    nested.save_pretrained(tmp_path / "gemma3")
    with pytest.raises(UnsupportedModelError, match="Gemma3TextConfig has rope parameters for each layer type"):
        export(tmp_path / "gemma3", "vllm")


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
        assert shown.exit_code == 0
        assert "exact" in shown.stdout
    refused = CliRunner().invoke(app, ["export", str(saved(tmp_path / "y", "gpt2", "alibi")), "--target", "vllm"])
    assert refused.exit_code == 3
    assert "impossible" in refused.stdout
    out = str(tmp_path / "z")
    written = CliRunner().invoke(app, ["export", str(tmp_path / "y"), "--target", "vllm", "-o", out])
    assert written.exit_code == 3
    assert written.stderr.count("\n") == 1
    assert not Path(out).exists()
