"""Keys that kvpress hides from single heads are hidden by a swapped model, too, or the call stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_posswap import patch_model
from hf_posswap.errors import UnsupportedSwapError
from tests.contract.models import build
from tests.contract.pairs import words
from tests.stock import with_cache

IDS = words(1, 12)
HIDDEN = (torch.tensor([0, 0, 0]), torch.tensor([0, 1, 1]), torch.tensor([2, 4, 5]))
"""Which keys are hidden, as kvpress says it: indices of rows, heads and keys."""


def swapped(scheme: str, attention: str = "sdpa") -> Any:
    model = build("llama")
    model.set_attn_implementation(attention)
    return patch_model(model, scheme, max_length=64)


def steps(model: Any, hidden: Any) -> Tensor:
    """Return logits of two steps behind ten tokens, of which each layer's `hidden` are hidden after the prefill."""
    cache = DynamicCache()
    with torch.no_grad():
        model(IDS[:, :10], **with_cache(model, cache))
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = hidden
        return torch.cat([model(IDS[:, at : at + 1], **with_cache(model, cache)).logits for at in (10, 11)], dim=1)


@pytest.mark.parametrize(
    ("scheme", "attention", "message"),
    [
        ("self_extend", "sdpa", "a scheme with split scores would attend to them all the same"),
        ("rerope", "sdpa", "a scheme with split scores"),
        ("dual_chunk", "eager", "a scheme with split scores"),
        ("alibi", "eager", "eager attention would attend to them all the same. What works: .*'sdpa'"),
    ],
)
def test_attention_that_would_not_hide_them_is_refused(scheme: str, attention: str, message: str) -> None:
    model = swapped(scheme, attention)
    expected = steps(model, None)
    with pytest.raises(UnsupportedSwapError, match=f"kvpress hides keys from single heads of this model .*{message}"):
        steps(model, HIDDEN)
    assert torch.equal(steps(model, None), expected)  # a text that is read anew


@pytest.mark.parametrize("scheme", ["alibi", "t5", "xpos", "nope"])
def test_a_press_by_head_equals_a_mask_of_each_head(scheme: str) -> None:
    """Chunks of several tokens as well, which other backends may compute."""
    kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")
    assert kvpress.AdaKVPress
    model = swapped(scheme)
    cache = DynamicCache()
    heads = model.config.num_attention_heads // model.config.num_key_value_heads
    with torch.no_grad():
        model(IDS[:, :8], **with_cache(model, cache))
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = HIDDEN
        found = [model(IDS[:, low:high], **with_cache(model, cache)).logits for low, high in ((8, 11), (11, 12))]
    index = torch.arange(12)
    shown = (index <= index[:, None]).expand(1, model.config.num_attention_heads, 12, 12).clone()
    for head, key in zip(HIDDEN[1].tolist(), HIDDEN[2].tolist(), strict=True):
        shown[:, head * heads : (head + 1) * heads, 8:, key] = False
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": shown}), with_kwargs=True, prepend=True
        )
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits[:, 8:]
    assert torch.allclose(torch.cat(found, dim=1), expected, atol=1e-5)
