"""The swaps on a GPU: the same numbers as on the CPU, also after moving, in bfloat16 and past the window."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_posswap
from hf_posswap.errors import UnsupportedSwapError
from tests.stock import cache_in, with_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("rope", {}),
    ("rope", {"site": "attention"}),
    ("yarn", {"site": "attention"}),
    ("dynamic", {"site": "attention"}),
    ("alibi", {}),
    ("nope", {}),
    ("sinusoidal", {}),
    ("learned", {"extend": "interpolate"}),
]


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=67, n_positions=32, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2)
    return GPT2LMHeadModel(config).eval()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def swapped(build: Any, scheme: str, options: dict[str, Any]) -> Any:
    if options.get("site") == "attention" and scheme in ("sinusoidal", "learned"):
        pytest.skip("a table is no matter of attention")
    model = build()
    try:
        hf_posswap.patch_model(model, scheme, max_length=128, **options)
    except UnsupportedSwapError as error:
        pytest.skip(str(error))
    return model


@pytest.mark.parametrize(("scheme", "options"), SCHEMES, ids=lambda value: str(value))
@pytest.mark.parametrize("build", [gpt2, llama])
@torch.no_grad()
def test_logits_on_cuda_equal_those_on_the_cpu(build: Any, scheme: str, options: dict[str, Any]) -> None:
    model = swapped(build, scheme, options)
    ids = torch.randint(3, 67, (2, 100))
    expected = model(ids).logits
    model.to("cuda")
    found = model(ids.cuda()).logits.cpu()
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=1e-3)  # TF32 off by default; kernels sum otherwise
    assert torch.equal(model.to("cpu")(ids).logits, expected)


@pytest.mark.parametrize(("scheme", "options"), SCHEMES, ids=lambda value: str(value))
@pytest.mark.parametrize("build", [gpt2, llama])
@torch.no_grad()
def test_bfloat16_steps_equal_full(build: Any, scheme: str, options: dict[str, Any]) -> None:
    model = swapped(build, scheme, options)
    if not model._posswap.plan.cached_equals_full:
        pytest.skip("cached and full forward differ by the scheme's nature")
    model.to("cuda", torch.bfloat16)
    ids = torch.randint(3, 67, (2, 64), device="cuda")
    full = model(ids).logits.float()
    cache, steps = None, []
    for i in range(0, 64, 8):
        out = model(ids[:, i : i + 8], **with_cache(model, cache), use_cache=True)
        cache = cache_in(out)
        steps.append(out.logits.float())
    error = (torch.cat(steps, 1) - full).abs().max()
    assert error < 0.05 * full.abs().max()


@pytest.mark.parametrize("build", [gpt2, llama])
def test_gradients_reach_every_parameter(build: Any) -> None:
    model = swapped(build, "alibi", {}).to("cuda").train()
    ids = torch.randint(3, 67, (2, 64), device="cuda")
    model(ids, labels=ids, attention_mask=torch.ones_like(ids)).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
