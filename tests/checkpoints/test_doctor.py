"""The doctor: each trap is found where it is, and nothing is found where there is none."""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.adapters import add_adapter
from hf_posswap.checkpoints.doctor import doctor
from hf_posswap.checkpoints.doctor_findings import Diagnosis
from hf_posswap.cli import app
from hf_posswap.errors import CheckpointError
from hf_posswap.testing.tiny import tiny_model
from hf_posswap.utils.weight_shapes import header_shapes
from tests.contract.models import LENGTH, build

THETA = {"rope_theta": 10000.0}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
USUAL = 0.1 * math.log(4) + 1


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(folder)
    return folder


def edited(source: Path, target: Path, **changes: Any) -> Path:
    """Return a copy of a checkpoint with other values in its config.json; None takes one out."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return target


def found(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    return [(finding.severity, finding.where, finding.what) for finding in diagnosis.findings]


ROPE_TRAPS: dict[str, tuple[dict[str, Any], str, str]] = {
    "theta outside": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5e5},
        "warning",
        "rope_theta 500000.0 is at the top of the config and not in rope_parameters",
    ),
    "theta twice": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 5e5},
        "error",
        "rope_theta is 10000.0 here and 500000.0 at the top",
    ),
    "no theta": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "warning",
        "no rope_theta, here or at the top",
    ),
    "theta no number": ({"rope_parameters": {"rope_theta": -3}}, "error", "rope_theta is -3, not a number above 1"),
    "two sets": (
        {"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 128},
        "error",
        "rope_parameters and rope_scaling differ",
    ),
    "two types": (
        {"rope_parameters": THETA | {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
        "error",
        "type is 'yarn' and rope_type 'linear'",
    ),
    "no factor": (
        {"rope_parameters": THETA | {"rope_type": "linear"}},
        "error",
        "linear needs a factor >= 1, got None",
    ),
    "small factor": ({"rope_parameters": YARN | {"factor": 0.5}}, "error", "yarn needs a factor >= 1, got 0.5"),
    "factor without original": (
        {
            "rope_parameters": {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"},
            "max_position_embeddings": 128,
        },
        "error",
        "yarn without original_max_position_embeddings: transformers takes max_position_embeddings, 128",
    ),
    "original length as the limit": (
        {"rope_parameters": YARN, "max_position_embeddings": 32},
        "warning",
        "max_position_embeddings, 32, is the original length: serving stacks stop there",
    ),
    "lengths that disagree": (
        {"rope_parameters": YARN, "max_position_embeddings": 100},
        "warning",
        "max_position_embeddings is 100, and factor 4 times 32 is 128",
    ),
    "dynamic on the extended length": (
        {
            "rope_parameters": YARN | {"rope_type": "dynamic"},
            "max_position_embeddings": 128,
        },
        "error",
        "dynamic takes its original length from max_position_embeddings, 128, and not from",
    ),
    "attention factor missing": (
        {"rope_parameters": YARN, "max_position_embeddings": 128},
        "note",
        f"no attention_factor: it should be 0.1 ln 4 + 1 = {USUAL:.6g}",
    ),
    "attention factor of one's own": (
        {"rope_parameters": YARN | {"attention_factor": 1.0}, "max_position_embeddings": 128},
        "warning",
        "attention_factor is 1, not 0.1 ln 4 + 1",
    ),
    "mscale": (
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, "max_position_embeddings": 128},
        "warning",
        "the attention factor comes from mscale",
    ),
    "half of mscale": (
        {"rope_parameters": YARN | {"mscale": 1.0}, "max_position_embeddings": 128},
        "warning",
        "mscale and mscale_all_dim act together, and one of them is missing",
    ),
    "following the length": (
        {"rope_parameters": THETA | {"rope_type": "dynamic", "factor": 2.0}},
        "note",
        "dynamic follows",
    ),
    "unknown type": (
        {"rope_parameters": THETA | {"rope_type": "magic"}},
        "error",
        "no model can be built from it: 'magic'",
    ),
    "width that is not heeded": (
        {"rope_parameters": THETA | {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "error",
        "partial_rotary_factor 0.5 means 8 dimensions a head, and this class rotates 16",
    ),
    "no object": ({"rope_parameters": [1]}, "error", "must be an object, got list"),
    "a config that builds nothing": ({"num_attention_heads": "four"}, "error", "no model can be built from it"),
}


@pytest.mark.parametrize("trap", list(ROPE_TRAPS))
def test_traps_in_the_rope_settings(trap: str, llama: Path, tmp_path: Path) -> None:
    changes, severity, said = ROPE_TRAPS[trap]
    diagnosis = doctor(edited(llama, tmp_path / "x", **changes))
    assert any(kind == severity and said in what for kind, _, what in found(diagnosis)), diagnosis
    assert all(finding.do for finding in diagnosis.findings)
    assert diagnosis.clean == (severity == "note")


def test_the_traps_are_real(tmp_path: Path) -> None:
    """What the doctor says of two of them, seen in transformers itself."""
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "vocab_size": 11}
    lost = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    right, wrong = (
        LlamaForCausalLM(LlamaConfig(**small, max_position_embeddings=128, rope_parameters=dict(rope)))
        for rope in (YARN, lost)
    )
    assert not torch.equal(right.model.rotary_emb.inv_freq, wrong.model.rotary_emb.inv_freq)
    narrow = LlamaForCausalLM(LlamaConfig(**small, rope_parameters=THETA | {"partial_rotary_factor": 0.5}))
    assert narrow.model.rotary_emb.inv_freq.shape == (8,)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rope_theta": None}, "rope_theta is null: transformers computes no angles from it"),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta is null: "),
        ({"rope_theta": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "is null at the top of the config: "),
    ],
)
def test_a_null_theta_is_named_and_not_the_error_that_follows(
    values: dict[str, Any], said: str, llama: Path, tmp_path: Path
) -> None:
    config = json.loads((llama / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(TypeError):  # what transformers says
        LlamaForCausalLM.from_pretrained(llama, config=LlamaConfig.from_pretrained(tmp_path))
    diagnosis = doctor(tmp_path)
    finding = diagnosis.findings[0]
    assert (finding.code, finding.severity) == ("theta-null", "error")
    assert said in finding.what
    assert "rope_parameters.rope_theta" in finding.do
    assert "of which no model can be built" in diagnosis.positions
    assert "unsupported operand" not in str(diagnosis)


def test_a_null_theta_that_nothing_reads_is_nothing(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    (tmp_path / "x" / "config.json").write_text(json.dumps(config | {"rope_theta": None}))
    assert found(doctor(tmp_path / "x")) == []
    config = build("llama").config.to_dict()
    inner = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"rope_theta": None, "rope_parameters": inner | {"rope_theta": 1e4}})
    )
    assert doctor(tmp_path).clean  # the one inside counts


CLEAN = ["gpt2", "opt", "bert", "roberta", "llama", "mistral", "qwen3", "gemma", "cohere", "gpt_neox"]


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_in_a_sound_checkpoint(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    diagnosis = doctor(tmp_path)
    assert found(diagnosis) == []
    assert diagnosis.clean
    assert len(diagnosis.checked) == 2
    assert "nothing found" in str(diagnosis)


@pytest.mark.parametrize(
    ("name", "scheme", "options"),
    [
        ("gpt2", "rope", {"max_length": 64}),
        ("gpt2", "nope", {"max_length": 64}),
        ("gpt2", "learned", {"max_length": 64}),
        ("bert", "kerple", {}),
        ("roberta", "sinusoidal", {"max_length": 64}),
        ("opt", "alibi", {}),
        ("llama", "yarn", {"factor": 4.0}),
        ("llama", "ntk", {"factor": 4.0}),
        ("llama", "llama3", {"factor": 4.0}),
        ("llama", "p_rope", {}),
        ("llama", "fire", {}),
        ("llama", "nope", {}),
    ],
)
def test_swapped_checkpoints_are_clean(name: str, scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = build(name)
    patch_model(model, scheme, **options)
    hf_posswap.save(model, tmp_path / "x")
    diagnosis = doctor(tmp_path / "x")
    assert diagnosis.clean, diagnosis
    assert f"swapped to {scheme}" in diagnosis.positions


def test_real_checkpoints_are_clean(shared_checkpoints: Path) -> None:
    for folder in sorted(path for path in shared_checkpoints.iterdir() if (path / "config.json").is_file()):
        diagnosis = doctor(folder)
        assert diagnosis.clean, diagnosis


def test_a_record_that_does_not_match_the_weights(tmp_path: Path) -> None:
    model = build("gpt2")
    model.save_pretrained(tmp_path / "base")
    patch_model(model, "kerple")
    model.save_pretrained(tmp_path / "swapped")
    base, swapped = (tmp_path / name / "model.safetensors" for name in ("base", "swapped"))
    mixed = edited(tmp_path / "swapped", tmp_path / "mixed")
    (mixed / "model.safetensors").write_bytes(base.read_bytes())
    said = " ".join(what for _, _, what in found(doctor(mixed)))
    assert "the model needs transformer.posswap." in said
    assert "transformer.wpe.weight [32, 64] instead of [1]" in said
    mixed = edited(tmp_path / "base", tmp_path / "other")
    (mixed / "model.safetensors").write_bytes(swapped.read_bytes())
    said = " ".join(what for _, _, what in found(doctor(mixed)))
    assert "transformer.wpe.weight [1] instead of [32, 64]" in said
    assert "transformer.posswap.log_slope" in said or "transformer.posswap." in said


Change = Callable[[dict[str, Any]], dict[str, Any]]
RECORD_TRAPS: dict[str, tuple[str, Change, str]] = {
    "a lost record": ("alibi", lambda c: c | {"posswap": None}, "the record of the swap is missing"),
    "a native model type": (
        "alibi",
        lambda c: c | {"model_type": "llama"},
        "a plugin swap of llama has 'posswap': the mechanism would be lost silently",
    ),
    "a plugin model type": (
        "linear",
        lambda c: c | {"model_type": "posswap"},
        "a native swap of llama has 'llama': it would not load",
    ),
    "another factor": (
        "linear",
        lambda c: c | {"rope_parameters": c["rope_parameters"] | {"factor": 8.0}},
        "not what the recorded swap writes: factor is 8.0 instead of 2.0",
    ),
    "another length": (
        "linear",
        lambda c: c | {"max_position_embeddings": 32},
        "not what the recorded swap writes: it is 32 instead of 64",
    ),
    "an unknown version": ("alibi", lambda c: c | {"posswap": c["posswap"] | {"version": 9}}, "has version 9"),
    "an unknown base": (
        "alibi",
        lambda c: c | {"posswap": c["posswap"] | {"base_type": "martian"}},
        "base_type 'martian' is not a model type",
    ),
    "a scheme that does not fit": (
        "alibi",
        lambda c: c | {"posswap": c["posswap"] | {"scheme": {"name": "sinusoidal"}}},
        "the recorded swap cannot be applied to llama",
    ),
    "another route": (
        "linear",
        lambda c: c | {"posswap": c["posswap"] | {"site": "attention"}},
        "it records a native swap, which would be plugin here",
    ),
}


@pytest.mark.parametrize("trap", list(RECORD_TRAPS))
def test_traps_in_the_record(trap: str, tmp_path: Path) -> None:
    scheme, change, said = RECORD_TRAPS[trap]
    model = build("llama")
    patch_model(model, scheme, max_length=64)
    model.save_pretrained(tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    diagnosis = doctor(edited(tmp_path / "x", tmp_path / "y", **change(copy.deepcopy(config))))
    assert any(kind == "error" and said in what for kind, _, what in found(diagnosis)), diagnosis


def test_a_table_that_is_too_short(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path / "x")
    path = edited(tmp_path / "x", tmp_path / "y", n_positions=64)
    assert any("wpe.weight [32, 64] instead of [64, 64]" in what for _, _, what in found(doctor(path)))
    (tmp_path / "x" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))
    said = found(doctor(tmp_path / "x"))
    assert said == [
        (
            "warning",
            "tokenizer_config.json",
            "model_max_length is 1024, and the position table ends at 32: longer texts are an error.",
        )
    ]
    (tmp_path / "x" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1e30}))
    assert doctor(tmp_path / "x").clean


def test_roberta_counts_its_offset(tmp_path: Path) -> None:
    build("roberta").save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": LENGTH}))
    assert found(doctor(tmp_path)) == []
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": LENGTH + 2}))
    assert "the position table ends at 32" in doctor(tmp_path).findings[0].what


def test_a_tokenizer_that_cuts_texts_short(tmp_path: Path) -> None:
    model = build("llama")
    patch_model(model, "yarn", factor=4.0)
    hf_posswap.save(model, tmp_path / "x")
    (tmp_path / "x" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": LENGTH}))
    assert "model_max_length is 32, and the model is meant for 128" in doctor(tmp_path / "x").findings[0].what


def test_rope_settings_that_nothing_reads(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path / "x")
    path = edited(tmp_path / "x", tmp_path / "y", rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=1e4)
    said = found(doctor(path))
    assert any("GPT2LMHeadModel has no rotary module, so this has no effect" in what for _, _, what in said)


def test_old_angles_among_the_weights(llama: Path, tmp_path: Path) -> None:
    path = edited(llama, tmp_path / "x")
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"model.rotary_emb.inv_freq": torch.ones(8)}, path / "model.safetensors")
    diagnosis = doctor(path)
    assert diagnosis.clean
    assert "angles saved with the weights are not read" in diagnosis.findings[0].what


def test_sharded_weights_and_base_models(tmp_path: Path) -> None:
    model = build("gpt2")
    model.save_pretrained(tmp_path / "x", max_shard_size="50KB")
    assert (tmp_path / "x" / "model.safetensors.index.json").is_file()
    assert found(doctor(tmp_path / "x")) == []
    model.transformer.save_pretrained(tmp_path / "base")
    path = edited(tmp_path / "base", tmp_path / "head", architectures=["GPT2LMHeadModel"])
    assert found(doctor(path)) == []


def test_weights_of_another_kind_are_a_note(tmp_path: Path) -> None:
    build("gpt2").config.save_pretrained(tmp_path)
    assert [f.what for f in doctor(tmp_path).findings] == ["none could be checked."]
    torch.save({}, tmp_path / "pytorch_model.bin")
    diagnosis = doctor(tmp_path)
    assert diagnosis.clean
    assert "they are not safetensors" in diagnosis.findings[0].what


def test_a_model_that_no_family_describes(tmp_path: Path) -> None:
    from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

    small = ImageGPTConfig(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    ImageGPTForCausalImageModeling(small).save_pretrained(tmp_path)
    diagnosis = doctor(tmp_path)
    assert diagnosis.positions == "model type imagegpt, whose positions no family of hf_posswap describes"
    assert diagnosis.clean


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_without_its_record_is_found(tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = build("gpt2")
    patch_model(model, "rope")
    hf_posswap.save(add_adapter(model, config), tmp_path / "x")
    assert doctor(tmp_path / "x").clean
    held = json.loads((tmp_path / "x" / "posswap.json").read_text())
    (tmp_path / "x" / "posswap.json").write_text(json.dumps(held | {"record": {}}))
    assert "has version None" in doctor(tmp_path / "x").findings[0].what
    peft.get_peft_model(build("gpt2"), config).save_pretrained(tmp_path / "y")
    said = [what for _, _, what in found(doctor(tmp_path / "y"))]
    assert any("base_model_name_or_path is empty" in what for what in said)
    assert any("does not name its base's positions" in what for what in said)


@pytest.mark.parametrize("length", [0, 4, 50])
def test_a_cut_weights_file_is_refused(length: int, llama: Path, tmp_path: Path) -> None:
    path = edited(llama, tmp_path / "x")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="has no readable safetensors header"):
        doctor(path)


def test_weights_without_their_end_are_refused(llama: Path, tmp_path: Path) -> None:
    path = edited(llama, tmp_path / "x")
    weights = path / "model.safetensors"
    assert header_shapes(weights)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is cut off: its tensors take"):
        doctor(path)


def _entry(shape: str, end: str = "4") -> bytes:
    return f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, {end}]}}}}'.encode()


@pytest.mark.parametrize(
    "header",
    [
        b"[1]", b'{"a": {"shape": "x"}}', b'{"a": 3}', b'{"a": {}}', b"nonsense", _entry('"1"'), _entry("[1.5]"),
        _entry("[Infinity]"), _entry("[NaN]"), _entry("[-1]"), _entry("[true]"), _entry("[1]", "1e999"),
    ],
)  # fmt: skip
def test_a_hostile_safetensors_header_is_refused(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="has no readable safetensors header"):
        header_shapes(path)
    path.write_bytes(struct.pack("<Q", 2**63) + header)
    with pytest.raises(CheckpointError, match="a header of 9223372036854775808 bytes"):
        header_shapes(path)


def test_shapes_are_those_of_the_weights(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    assert header_shapes(llama / "model.safetensors") == {name: tuple(t.shape) for name, t in weights.items()}


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", "{", "cannot read config.json"),
        ("config.json", "[1]", "config.json of .* must hold an object, got list"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "../x"}}',
            "must map each weight to a file in its folder",
        ),
        ("model.safetensors.index.json", '{"weight_map": 3}', "must map each weight to a file in its folder"),
    ],
)
def test_a_damaged_json_file_is_refused_by_name(
    file: str, content: str, said: str, llama: Path, tmp_path: Path
) -> None:
    path = edited(llama, tmp_path / "x")
    (path / file).write_text(content)
    with pytest.raises(CheckpointError, match=said):
        doctor(path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither a config.json nor an adapter_config.json"):
        doctor(tmp_path)
    with pytest.raises(CheckpointError, match="'no/such-model' holds neither .*there is no such folder here"):
        doctor("no/such-model")


def test_the_command_exits_1_where_a_trap_is_found(llama: Path, tmp_path: Path) -> None:
    clean = CliRunner().invoke(app, ["doctor", str(llama)])
    assert clean.exit_code == 0
    assert "Nothing found." in clean.stdout
    lost = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    bad = edited(llama, tmp_path / "x", rope_parameters=lost)
    result = CliRunner().invoke(app, ["doctor", str(bad), "--json"])
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert said == json.loads(json.dumps(doctor(bad).to_dict()))
    assert said["clean"] is False
    assert {"severity", "where", "what", "do", "code"} == set(said["findings"][0])
    shown = CliRunner().invoke(app, ["doctor", str(bad)])
    assert shown.exit_code == 1
    assert "error" in shown.stdout
    nothing = CliRunner().invoke(app, ["doctor", str(tmp_path / "missing")])
    assert nothing.exit_code == 4
    assert nothing.stderr.count("\n") == 1


def test_windows_that_differ_by_layer(tmp_path: Path) -> None:
    """The config of such a class refuses to name one window of all its layers."""
    model = tiny_model("NeoMMEForMaskedLM", meta=False)
    with pytest.raises(Exception, match="per-layer attribute"):
        _ = model.config.sliding_window
    model.save_pretrained(tmp_path)
    assert doctor(tmp_path).clean


def test_values_of_other_parts_are_no_traps(tmp_path: Path) -> None:
    """A field of ESM's own, DeepSeek-V4's thetas and the names on its disk, MusicFlamingo's sound, Marian's table."""
    names = ("EsmForMaskedLM", "DeepseekV4ForCausalLM", "MusicFlamingoForConditionalGeneration", "MarianMTModel")
    for name in names:
        tiny_model(name, meta=False).save_pretrained(tmp_path / name)
        diagnosis = doctor(tmp_path / name)
        assert diagnosis.clean, diagnosis
