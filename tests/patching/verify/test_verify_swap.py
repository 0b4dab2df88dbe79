"""verify_swap passes what is right (the contract suite runs it on every pair) and fails on every sabotage."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import FalconConfig, FalconForSequenceClassification, T5Config, T5ForConditionalGeneration

from hf_posswap import patch_model, verify_swap
from hf_posswap.errors import NotPatchedError, SwapVerificationError
from hf_posswap.patching.sites.attention.edits import PositionHook, StartHook
from hf_posswap.patching.sites.embedding.table_edits import LengthHook
from hf_posswap.schemes import Blend, LongRope, Rope, SSMax, native
from hf_posswap.testing.contract.points.gradients import with_lora
from hf_posswap.testing.tiny import tiny_config, tiny_model
from tests.contract.models import LENGTH, build
from tests.contract.pairs import gap, logits, words
from tests.patching.plan.test_swap_plan import snapshot


def drop_hook(path: str, kind: type) -> Callable[[Any], None]:
    def sabotage(model: Any) -> None:
        hooks = model.get_submodule(path)._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
            del hooks[key]

    return sabotage


def overwrite(path: str) -> Callable[[Any], None]:
    def sabotage(model: Any) -> None:
        owner, _, leaf = path.rpartition(".")
        with torch.no_grad():
            getattr(model.get_submodule(owner), leaf).mul_(1.5)

    return sabotage


def native_config(model: Any) -> None:
    attention = model.transformer.h[1].attn
    attention.config = attention.config.native


def native_table(model: Any) -> None:
    model.transformer.wpe = build("gpt2").transformer.wpe


def native_rotary(model: Any) -> None:
    model.model.rotary_emb = build("llama").model.rotary_emb


def thawed_table(model: Any) -> None:
    model.transformer.wpe.weight.requires_grad_(True)


def short_table(model: Any) -> None:
    model.transformer.wpe = build("gpt2").transformer.wpe


def other_angles(model: Any) -> None:
    mechanism = model.transformer.posswap
    mechanism._fixed = mechanism._fixed._replace(inv_freq=mechanism._fixed.inv_freq * 1.01)


def other_slopes(model: Any) -> None:
    model.transformer.posswap.constant_slopes = model.transformer.posswap.constant_slopes * 2


def other_scheme(model: Any) -> None:
    donor = build("gpt2")
    patch_model(donor, "alibi")
    model.transformer.posswap = donor.transformer.posswap


def forgotten_record(model: Any) -> None:
    del model.config.posswap


def other_length(model: Any) -> None:
    model.config.max_position_embeddings = 7


def infinite_weight(model: Any) -> None:
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = torch.inf


def deaf_to_positions(model: Any) -> None:
    """Structure untouched, yet every query stands at 0: only behaviour tells."""
    mechanism = model.transformer.posswap
    mechanism.rotate_query = mechanism.rotate_key = _unrotated


def _unrotated(x: Any, prepared: Any) -> Any:
    return x


def absolute_positions(model: Any) -> None:
    """Rotates queries alone: no longer relative."""
    model.transformer.posswap.rotate_key = _unrotated


SABOTAGE: dict[str, tuple[tuple[str, str, Any], Callable[[Any], None], str]] = {
    "position hook": (("gpt2", "rope", 64), drop_hook("transformer.h.1.attn", PositionHook), "does not carry"),
    "config view": (("gpt2", "rope", 64), native_config, "does not carry the scheme"),
    "start hook": (("gpt2", "rope", 64), drop_hook("transformer", StartHook), "separates forwards is missing"),
    "length hook": (("gpt2", "sinusoidal", 64), drop_hook("transformer", LengthHook), "watches the length is gone"),
    "table is back": (("gpt2", "rope", 64), native_table, "the position table is still there"),
    "table overwritten": (("gpt2", "sinusoidal", 64), overwrite("transformer.wpe.weight"), "differs from its formula"),
    "table thawed": (("gpt2", "sinusoidal", 64), thawed_table, "trainable where it should be frozen"),
    "table shorter": (("gpt2", "learned", 64), short_table, "32 rows instead of 64"),
    "angles of the mechanism": (("gpt2", "rope", 64), other_angles, "of the mechanism changed"),
    "slopes of the mechanism": (("gpt2", "alibi", 64), other_slopes, "of the mechanism changed"),
    "another scheme": (("gpt2", "rope", 64), other_scheme, "AlibiMechanism is in the place of a RotaryMechanism"),
    "native angles": (("llama", "yarn", 64), overwrite("model.rotary_emb.inv_freq"), "planned frequencies"),
    "native rotary is back": (("llama", "yarn", 64), native_rotary, "planned frequencies"),
    "rotation beside a bias": (("llama", "alibi", 64), native_rotary, "native rotation is still active"),
    "still angles turn": (("llama", "nope", 64), native_rotary, "planned frequencies"),
    "record": (("gpt2", "rope", 64), forgotten_record, "config.posswap is gone"),
    "length in the config": (("gpt2", "rope", 64), other_length, "the config has 7 instead of 64"),
    "infinite logits": (("gpt2", "rope", 64), infinite_weight, "not finite"),
    "rotation that does nothing": (("gpt2", "rope", 64), deaf_to_positions, "do not depend on the position ids"),
    "rotation of queries alone": (("gpt2", "rope", 64), absolute_positions, "shifting all positions"),
}


@pytest.mark.parametrize("what", list(SABOTAGE))
def test_verify_swap_finds_sabotage(what: str) -> None:
    (name, scheme, length), sabotage, message = SABOTAGE[what]
    model = build(name)
    patch_model(model, scheme, max_length=length)
    verify_swap(model)
    sabotage(model)
    with pytest.raises(SwapVerificationError, match=message):
        verify_swap(model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_without_positions_one_by_one_verify_as_nope_does(name: str) -> None:
    model = build(name)
    every = {layer: "nope" for layer in range(model.config.num_hidden_layers)}
    found = verify_swap(patch_model(model, "per_layer", layers=every)).checks
    assert found.keys() == verify_swap(patch_model(build(name), "nope")).checks.keys()
    assert found["spread positions"] == "the logits move by 0"


def test_a_model_without_a_swap_is_refused() -> None:
    with pytest.raises(NotPatchedError, match="carries no swap: nothing to verify"):
        verify_swap(build("gpt2"))


@pytest.mark.parametrize("tokens", [0, 1, True, 2.5, "12"])
def test_an_impossible_number_of_tokens_is_refused(tokens: Any) -> None:
    model = build("gpt2")
    patch_model(model, "rope")
    with pytest.raises(SwapVerificationError, match="tokens must be a whole number >= 2"):
        verify_swap(model, tokens=tokens)


def test_verifying_changes_nothing() -> None:
    model = build("gpt2")
    patch_model(model, "rope", max_length=64)
    model.train()
    model.transformer.h[0].eval()
    ids = words(1, LENGTH)
    before, modes = snapshot(model), [module.training for module in model.modules()]
    expected = logits(model, ids)
    verify_swap(model)
    assert snapshot(model) == before
    assert [module.training for module in model.modules()] == modes
    assert gap(logits(model, ids), expected) == 0


def test_the_report_names_each_check_and_what_was_found() -> None:
    model = build("llama")
    patch_model(model, "rope", site="attention")
    report = verify_swap(model)
    assert "0 away, as they should be: an identity" in report.checks["unswapped model"]
    assert all(line.startswith("ok  ") for line in str(report).splitlines())


def test_how_far_the_outputs_moved_stands_beside_how_far_they_spread() -> None:
    model = build("llama")
    patch_model(model, "yarn", factor=4.0)
    text = verify_swap(model).checks["unswapped model"]
    found = re.fullmatch(r"its logits, of standard deviation (\S+), are up to (\S+) away", text)
    assert found is not None, text
    spread, moved = map(float, found.groups())
    assert 0 < spread < moved < 20 * spread  # a largest difference of thousands of values of that spread
    assert spread == pytest.approx(float(logits(build("llama"), words(2, LENGTH)).std()), rel=0.3)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "sinusoidal"])
def test_a_trained_cast_or_adapted_model_still_verifies(scheme: str) -> None:
    model = build("gpt2")
    patch_model(model, scheme, max_length=64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    verify_swap(model)
    verify_swap(model.to(torch.bfloat16))


@pytest.mark.parametrize("scheme", ["t5", "native + nope:logit_scale=0.3", "native + kerple"])
def test_the_models_own_learned_bias_still_verifies_once_it_is_trained(scheme: str) -> None:
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
    model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0)).eval()
    patch_model(model, scheme)
    assert verify_swap(model)
    tables = [parameter for name, parameter in model.named_parameters() if name.endswith("table")]
    with torch.no_grad():
        for table in tables:
            table.add_(torch.randn_like(table))
    assert len(tables) == 2
    assert verify_swap(model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("original_length", [8, 16])
def test_angles_that_change_at_a_shorter_length_than_the_models_verify(name: str, original_length: int) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i / 3 for i in range(8)], "factor": 2.0}
    longrope = LongRope(**factors, original_length=original_length)
    for scheme in (longrope, longrope + SSMax(), {0: longrope, 1: Rope()}, Blend(new=Rope(base=500.0), weight=0.5)):
        assert verify_swap(patch_model(build(name), scheme))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_model_inside_peft_verifies() -> None:
    model = with_lora(build("gpt2"), "gpt2")
    patch_model(model, "rope", max_length=64)
    verify_swap(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_term_added_to_the_models_own_bias_is_proved_where_an_adapter_trains_it() -> None:
    """PEFT's `modules_to_save` replaces the mechanism by a wrapper around its copies."""
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
    model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0)).eval()
    patch_model(model, native() + "kerple", max_length=64)
    expected = verify_swap(model).checks
    adapted = get_peft_model(model, LoraConfig(target_modules=["q", "v"], modules_to_save=["posswap"]))
    assert verify_swap(adapted).checks.keys() == expected.keys()


@pytest.mark.parametrize(
    ("name", "scheme", "changes"),
    [
        ("BertForMultipleChoice", "alibi", {}),
        ("DistilBertForMultipleChoice", "rope", {}),
        ("RobertaForMultipleChoice", "learned", {}),
        ("Dinov2Backbone", "rope_2d", {"image_size": 32, "patch_size": 8}),
    ],
)
def test_a_head_of_several_texts_and_a_backbone_verify(name: str, scheme: str, changes: dict[str, Any]) -> None:
    model = patch_model(tiny_model(name, meta=False, **changes), scheme)
    assert "finite" in verify_swap(model).checks


@pytest.mark.parametrize("labels", [2, 3, 400])
def test_a_head_of_one_row_per_text_is_proved_where_no_positions_are_given(labels: int) -> None:
    config: Any = tiny_config(FalconConfig)
    config.num_labels, config.pad_token_id = labels, 0
    model: Any = FalconForSequenceClassification(config).eval()
    verify_swap(patch_model(model, "rope:base=5000", max_length=64))
    model.transformer.rotary_emb.inv_freq.mul_(1.5)
    with pytest.raises(SwapVerificationError):
        verify_swap(model)
