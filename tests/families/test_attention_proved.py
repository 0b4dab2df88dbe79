"""Every model type that the rotary rule lets into attention: RoPE re-applied there equals the native model exactly."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import hf_posswap
from hf_posswap.families.rotary import ATTENTION_PROVED

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "vocab_size": 67,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2,
    "n_group": 1, "topk_group": 1, "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}  # fmt: skip


def tiny(model_type: str) -> Any:
    """Return a tiny random causal model of `model_type`, with four layers so that every pattern of layers shows."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    cls = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(cls.__init__).parameters) | set(getattr(cls, "__dataclass_fields__", {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(cls(**{k: v for k, v in SMALL.items() if k in known})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(ATTENTION_PROVED))
@torch.no_grad()
def test_rope_inside_attention_equals_native(model_type: str) -> None:
    model = tiny(model_type)
    native = hf_posswap.describe_positions(model).native
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    own_type = model.config.rope_parameters["rope_type"]
    if own_type != "default":  # a plain RoPE is then another mechanism: compare with a plain native one
        hf_posswap.patch_model(model, "rope")
        reference = model(ids, use_cache=False).logits
        hf_posswap.unpatch_model(model)
    else:
        reference = model(ids, use_cache=False).logits
    hf_posswap.patch_model(model, "rope", site="attention")
    full = model(ids, use_cache=False).logits
    assert torch.equal(full, reference), f"{model_type} ({native}): {float((full - reference).abs().max())}"

    cache, steps = None, []
    for start in range(0, 24, 6):
        out = model(ids[:, start : start + 6], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), full, atol=1e-4, rtol=0)
