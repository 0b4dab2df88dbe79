"""The loss in chunks is transformers' own loss, gradients included, and holds no more logits than it says."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from hf_posswap import add_adapter, patch_model
from hf_posswap.errors import DataError, OptionError, UnsupportedModelError
from hf_posswap.training.chunked_loss import causal_loss, chunking_problem, masked_loss, sum_in_chunks
from hf_posswap.training.head import BodyAndHead, run_body_and_head
from tests.training.tiny_models import VOCABULARY, tiny

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""For configs that drop what they do not know."""
FAMILIES = {
    "gpt2": lambda: tiny("gpt2"),
    "llama": lambda: tiny("llama"),
    "llama tied": lambda: tiny("llama", tie_word_embeddings=True),
    "gemma2": lambda: made("Gemma2", final_logit_softcapping=2.0),
    "gemma3": lambda: made("Gemma3", "Gemma3TextConfig", final_logit_softcapping=2.0),
    "cohere": lambda: made("Cohere", logit_scale=0.25),
    "granite": lambda: made("Granite", logits_scaling=5.0),
    "opt": lambda: made("OPT", ffn_dim=48, word_embed_proj_dim=16),
    "gpt_neox": lambda: made("GPTNeoX"),
    "mixtral": lambda: made("Mixtral", num_local_experts=2),
    "bert": lambda: tiny("bert"),
    "roberta": lambda: made("Roberta", head="ForMaskedLM"),
    "electra": lambda: made("Electra", head="ForMaskedLM", embedding_size=16),
    "albert": lambda: made("Albert", head="ForMaskedLM", embedding_size=16),
    "modernbert": lambda: made("ModernBert", head="ForMaskedLM", cls_token_id=1, sep_token_id=2),
}
MASKED = {"bert", "roberta", "electra", "albert", "modernbert"}


def made(name: str, config: str | None = None, head: str = "ForCausalLM", **options: Any) -> Any:
    torch.manual_seed(3)
    held = getattr(transformers, config or f"{name}Config")(**SHAPE | options)
    model = getattr(transformers, f"{name}{head}")(held)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def batch(rows: int = 3, length: int = 24) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (rows, length))
    labels = ids.clone()
    labels[0, : length // 3] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def graded(model: Any, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model: Any, ours: Tensor, own: Tensor, tolerance: float = 1e-4) -> None:
    found, gradients = graded(model, ours)
    wanted, expected = graded(model, own)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == expected.keys()
    noise = 0.01 * max(gradient.norm() for gradient in expected.values())  # a key's bias has none, but for noise
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= tolerance * (gradient.norm() + noise), name


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_the_models_own(name: str) -> None:
    model, inputs = FAMILIES[name](), batch()
    loss = masked_loss if name in MASKED else causal_loss
    compare(model, loss(model, inputs, chunk=7), model(**inputs).loss)
    assert chunking_problem(model, inputs, chunk=1024, causal=name not in MASKED) is None
    assert "forward" not in vars(model)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("scheme", ["rope", "alibi", "kerple"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_in_swapped_models_too(kind: str, scheme: str) -> None:
    model, inputs = tiny(kind), batch(length=40)
    patch_model(model, scheme, max_length=128)
    compare(model, causal_loss(model, inputs, chunk=16), model(**inputs).loss)


@pytest.mark.parametrize("targets", [["c_attn"], ["c_attn", "lm_head"]])
@pytest.mark.parametrize("modules", [None, ["wte"]])
def test_adapters_have_the_loss_of_the_whole(targets: list[str], modules: list[str] | None) -> None:
    model, inputs = tiny("gpt2"), batch()
    patch_model(model, "kerple")
    config = peft.LoraConfig(target_modules=targets, modules_to_save=modules, fan_in_fan_out=True)
    config.init_lora_weights = False
    wrapped = add_adapter(model, config).eval()
    compare(wrapped, causal_loss(wrapped, inputs, chunk=7), wrapped(**inputs).loss)
    assert chunking_problem(wrapped, inputs, chunk=7, causal=True) is None


def test_shifted_labels_are_taken_as_they_are() -> None:
    model, inputs = tiny("llama"), batch()
    shifted = functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    ours = causal_loss(model, {"input_ids": inputs["input_ids"], "shift_labels": shifted}, chunk=5)
    torch.testing.assert_close(ours, model(**inputs).loss)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_accumulated_gradients_are_those_of_the_big_batch(checkpointing: bool) -> None:
    model, inputs = tiny("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train(), batch(rows=4)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    items = (inputs["labels"][:, 1:] != -100).sum()
    _, expected = graded(model, model(**inputs).loss)
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 4)):
        micro = {name: value[rows] for name, value in inputs.items()}
        causal_loss(model, micro, chunk=9, num_items=items).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-4)


def test_a_share_without_labels_adds_nothing() -> None:
    model, inputs = tiny("gpt2"), batch()
    nothing = inputs | {"labels": torch.full_like(inputs["labels"], -100)}
    loss = causal_loss(model, nothing, chunk=8, num_items=10)
    loss.backward()
    assert loss == 0
    with pytest.raises(DataError, match="no token of this batch is counted"):
        causal_loss(model, nothing, chunk=8)


def test_frozen_bodies_and_frozen_heads() -> None:
    inputs = batch()
    for frozen in ("model.", "lm_head"):
        model = tiny("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        compare(model, causal_loss(model, inputs, chunk=7), model(**inputs).loss)


def test_without_gradients_it_is_the_same_number() -> None:
    model, inputs = tiny("gpt2"), batch()
    with torch.no_grad():
        torch.testing.assert_close(causal_loss(model, inputs, chunk=7), model(**inputs).loss)


@pytest.mark.parametrize("precision", ["autocast", "weights"])
def test_bfloat16_stays_near_the_whole_loss(precision: str) -> None:
    model, inputs = tiny("llama"), batch()
    model = model.to(torch.bfloat16) if precision == "weights" else model
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        ours, own = causal_loss(model, inputs, chunk=7), model(**inputs).loss
    torch.testing.assert_close(ours.float(), own.float(), rtol=1e-2, atol=1e-2)
    found, expected = graded(model, ours)[1], graded(model, own)[1]
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-3, name


def test_no_more_logits_are_made_than_a_chunk() -> None:
    model, inputs = tiny("gpt2"), batch(rows=3, length=60)
    made: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: made.append(output.numel() // VOCABULARY))
    causal_loss(model, inputs, chunk=16).backward()
    assert max(made) == 16
    assert sum(made) >= 60 * 3 - 23


def test_dropout_of_the_body_is_drawn_once() -> None:
    model, inputs = tiny("gpt2").train(), batch()
    torch.manual_seed(1)
    ours = causal_loss(model, inputs, chunk=7)
    torch.manual_seed(1)
    torch.testing.assert_close(ours, model(**inputs).loss)


def test_a_models_own_loss_beside_the_logits_is_refused_by_name() -> None:
    model, inputs = FAMILIES["mixtral"](), batch()
    model.config.output_router_logits = True
    with pytest.raises(
        UnsupportedModelError, match=r"MixtralForCausalLM adds a router's loss .*output_router_logits=Fa"
    ):
        causal_loss(model, inputs, chunk=7)
    assert "adds a router's loss" in (chunking_problem(model, inputs, chunk=7, causal=True) or "")


def test_a_decoder_whose_own_loss_predicts_no_next_token_is_seen() -> None:
    model = made("Bart", d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48)
    inputs = batch()
    assert "BartForCausalLM has a loss of" in (chunking_problem(model, inputs, chunk=7, causal=True) or "")
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
    compare(model, causal_loss(model, inputs, chunk=7), functional.cross_entropy(logits.mT, inputs["labels"][:, 1:]))


def test_the_proof_sees_another_loss_and_another_gradient() -> None:
    model, inputs = tiny("llama"), batch()
    forward = type(model).forward

    class Sharper(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            if output.loss is not None:
                output.loss = output.loss * self.factor + (1 - self.factor) * output.loss.detach()
                output.loss = output.loss + self.more
            return output

    model.__class__, model.factor, model.more = Sharper, 1.0, 0.5
    assert "has a loss of" in (chunking_problem(model, inputs, chunk=7, causal=True) or "")
    model.factor, model.more = 2.0, 0.0
    assert "a different gradient than its own loss" in (chunking_problem(model, inputs, chunk=7, causal=True) or "")
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_what_cannot_be_taken_apart_is_refused() -> None:
    model, inputs = tiny("gpt2"), batch()
    with pytest.raises(OptionError, match="chunk is a whole number of at least 1 token, got 0"):
        causal_loss(model, inputs, chunk=0)
    with pytest.raises(DataError, match=r"a loss needs labels, got attention_mask, input_ids"):
        causal_loss(model, {name: inputs[name] for name in ("input_ids", "attention_mask")}, chunk=4)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is compiled as a whole"):
        causal_loss(torch.compile(model), inputs, chunk=4)
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel is in DataParallel, .*one process per GPU"):
        causal_loss(torch.nn.DataParallel(model), inputs, chunk=4)
    model.base_model_prefix = "absent"
    with pytest.raises(UnsupportedModelError, match="does not call its 'absent'"):
        causal_loss(model, inputs, chunk=4)
    assert "forward" not in vars(model)


def test_an_error_in_the_middle_leaves_the_model_whole() -> None:
    model, inputs = tiny("gpt2"), batch()
    body = model.transformer

    def fails(apart: BodyAndHead) -> Tensor:
        with pytest.raises(RuntimeError, match="shape|size|mat"):
            apart.head(apart.states.flatten(0, 1)[:, :5])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_body_and_head(model, {"input_ids": inputs["input_ids"]}, fails)
    assert model.transformer is body
    assert all("forward" not in vars(module) for module in model.modules())


@given(rows=st.integers(1, 20), chunk=st.integers(1, 25), frozen=st.booleans())
def test_chunks_add_up_to_the_whole_with_its_gradients(rows: int, chunk: int, frozen: bool) -> None:
    torch.manual_seed(rows)
    states = torch.randn(rows, 3, requires_grad=not frozen)
    weight = torch.randn(4, 3, requires_grad=True)
    total = sum_in_chunks(lambda some, where: (some @ weight.T).logsumexp(-1).sum(), states, chunk)
    found = torch.autograd.grad(total * 3, [weight] if frozen else [weight, states])
    own = (states @ weight.T).logsumexp(-1).sum()
    torch.testing.assert_close(total, own)
    for one, other in zip(found, torch.autograd.grad(own * 3, [weight] if frozen else [weight, states]), strict=True):
        torch.testing.assert_close(one, other)
