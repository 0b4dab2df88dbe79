"""Layers that a caller runs by hand, outside of the model's forward: nothing of an earlier call is taken for this one.

Stages of a pipeline, interleaved batches and loops of one's own call decoder layers themselves, with caches of their
own, and may write into the tensors that they pass again.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model, set_backend
from hf_posswap.rope_math import CosSin, rotate
from hf_posswap.schemes import SCHEMES as SCHEMES_BY_NAME
from hf_posswap.schemes import bias
from hf_posswap.schemes.mechanism import Mechanism
from tests.stock import RELEASE, with_cache

CONFIG = LlamaConfig(
    vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
)  # fmt: skip
SCHEMES = [("alibi", {}), ("t5", {"init_std": 1.0}), ("self_extend", {"window": 6}), ("xpos", {})]
MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
NEAR = 1e-5


def swapped(scheme: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    patch_model(model, scheme, max_length=128, **options)
    return model


def by_hand(
    model: Any, ids: Tensor, positions: Tensor, cache: Any = None, mask: Tensor | None = None, name: str = ""
) -> Tensor:
    """Return the logits of layers that are called one by one, each given `cache` as it calls it, or as `name`."""
    hidden = model.model.embed_tokens(ids)
    angles = model.model.rotary_emb(hidden, position_ids=positions)
    for layer in model.model.layers:
        held = {name: cache} if name else with_cache(layer, cache)
        hidden = layer(hidden, attention_mask=mask, position_ids=positions, **held, position_embeddings=angles)
    return model.lm_head(model.model.norm(hidden))


@MODES
@pytest.mark.parametrize(("scheme", "options"), SCHEMES, ids=lambda one: str(one))
def test_two_caches_of_one_length_are_told_apart(scheme: str, options: dict[str, Any], mode: Any) -> None:
    model, ids = swapped(scheme, options), torch.arange(6)[None] + 5
    with mode():
        caches = [DynamicCache(config=CONFIG), DynamicCache(config=CONFIG)]
        for cache, stands in zip(caches, ([0, 1, 2, 3, 4], [0, 1, 2, 3, 30]), strict=True):
            model(ids[:, :5], position_ids=torch.tensor([stands]), **with_cache(model, cache))
        expected = [
            model(ids[:, 5:], position_ids=torch.tensor([[40]]), **with_cache(model, copy.deepcopy(cache))).logits
            for cache in caches
        ]
        at = torch.tensor([[40]])
        found = [by_hand(model, ids[:, 5:], at, cache) for cache in caches]
    assert (expected[0] - expected[1]).abs().max() > 1e-2
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < NEAR


@MODES
@pytest.mark.parametrize("backend", ["auto", "fused"])
@pytest.mark.parametrize(("scheme", "options"), SCHEMES, ids=lambda one: str(one))
def test_what_is_written_into_ids_and_masks_is_seen(
    scheme: str, options: dict[str, Any], backend: str, mode: Any
) -> None:
    model, ids = swapped(scheme, options), torch.arange(8)[None] + 5
    fused = {"alibi": "row", "t5": "hankel", "self_extend": "merge"}.get(scheme, "auto")
    if fused != "auto":
        set_backend(model, fused if backend == "fused" else "auto")
    with mode():
        at, mask = torch.arange(8)[None].clone(), torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
        by_hand(model, ids, at, mask=mask)
        at[:, 4:] += 20
        moved = by_hand(model, ids, at, mask=mask)
        mask[..., 5:, :2] = False
        hidden = by_hand(model, ids, at, mask=mask)
        fresh = [by_hand(model, ids, at.clone(), mask=one) for one in (torch.ones_like(mask).tril(), mask.clone())]
    assert (fresh[0] - fresh[1]).abs().max() > 1e-3
    for one, other in zip((moved, hidden), fresh, strict=True):
        assert (one - other).abs().max() < NEAR


@MODES
def test_a_mask_of_one_query_that_is_written_into_is_seen(mode: Any) -> None:
    model, ids, at = swapped("alibi", {}), torch.tensor([[9]]), torch.tensor([[5]])
    with mode():
        cache = DynamicCache(config=CONFIG)
        model(torch.arange(5)[None], **with_cache(model, cache))
        mask = torch.ones(1, 1, 1, 6, dtype=torch.bool)
        seen = by_hand(model, ids, at, copy.deepcopy(cache), mask)
        mask[..., :3] = False
        hidden = by_hand(model, ids, at, copy.deepcopy(cache), mask)
        fresh = by_hand(model, ids, at.clone(), copy.deepcopy(cache), mask.clone())
    assert (seen - hidden).abs().max() > 1e-3
    assert (hidden - fresh).abs().max() < NEAR


def test_a_forward_that_failed_is_over() -> None:
    model, ids = swapped("alibi", {}), torch.arange(6)[None] + 5
    memos = next(hook.memos for module in model.modules() for hook in module._forward_pre_hooks.values()
                if hasattr(hook, "memos"))  # fmt: skip
    failing = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(ids, use_cache=False)
    failing.remove()
    assert not memos.of_thread().in_forward
    assert not memos.of_thread().entries


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # since 5.24
@pytest.mark.parametrize(("scheme", "options"), SCHEMES, ids=lambda one: str(one))
def test_the_name_that_caches_had_before_is_taken_too(scheme: str, options: dict[str, Any]) -> None:
    """By the model, and by a layer that other code calls, as code of the Hub does."""
    model, ids, at = swapped(scheme, options), torch.arange(6)[None] + 5, torch.arange(6)[None]
    with torch.no_grad():
        whole, cache = model(ids).logits, DynamicCache(config=CONFIG)
        model(ids[:, :4], past_key_values=cache)
        assert cache.get_seq_length() == 4
        step = model(ids[:, 4:5], past_key_values=cache).logits
        last = by_hand(model, ids[:, 5:], at[:, 5:], cache, name="past_key_values")
    assert cache.get_seq_length() == 6
    assert (torch.cat([step, last], dim=1) - whole[:, 4:]).abs().max() < 5 * NEAR  # the decay of xPos is rounded


@pytest.mark.skipif(RELEASE < (5, 24), reason="the name is not deprecated yet")
def test_the_old_name_is_deprecated_for_a_swapped_model_as_for_a_stock_one() -> None:
    for model in (LlamaForCausalLM(CONFIG).eval(), swapped("alibi", {})):
        with pytest.warns(FutureWarning, match="`past_key_values` is deprecated and will be removed"):
            model(torch.arange(5)[None], past_key_values=DynamicCache(config=CONFIG))


LONG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.1,
)  # fmt: skip
TEXT = torch.arange(1200).view(2, 600).mul(7).remainder(59) + 3
GAP = torch.ones_like(TEXT).index_fill(1, torch.arange(100, 110), 0)  # with which a bias is computed in blocks


@pytest.mark.parametrize("scheme", ["fire", "kerple", "t5:init_std=1.0", "alibi:learned=true"])
def test_gradients_of_a_functional_call_are_those_of_its_parameters(scheme: str) -> None:
    """The backward makes the bias again, when the module has its own parameters back: q, k, v got others' gradients."""
    torch.manual_seed(0)
    model = patch_model(LlamaForCausalLM(LONG), scheme)
    other = {
        name: (own.detach() + 0.3 * torch.randn_like(own) * ("posswap" in name)).requires_grad_()
        for name, own in model.named_parameters()
    }
    arguments = {"input_ids": TEXT, "attention_mask": GAP, "labels": TEXT, "use_cache": False}

    def gradients(backend: str) -> tuple[Tensor, ...]:
        set_backend(model, backend)
        loss = torch.func.functional_call(model, other, (), arguments).loss
        return torch.autograd.grad(loss, [*other.values()])

    for found, expected in zip(gradients("chunked"), gradients("plain"), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("backend", ["chunked", "auto"])
def test_a_query_that_sees_nothing_has_finite_gradients_under_a_bias_that_hides_keys(backend: str) -> None:
    @bias("local-bias")
    def local_bias(distance: Tensor, *, window: int = 20) -> Tensor:
        """Hide far keys."""
        return torch.where(distance.abs() >= window, -torch.inf, -0.01 * distance.abs())

    mask = torch.ones_like(TEXT)
    mask[0, 100:300] = 0
    labels = TEXT.masked_fill((mask == 0) | (mask.roll(1, dims=1) == 0), -100)  # of no query that sees nothing
    found = {}
    try:
        for way in (backend, "plain"):
            torch.manual_seed(0)
            model = patch_model(LlamaForCausalLM(LONG), "local-bias")
            set_backend(model, way)
            model(TEXT, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
            found[way] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    finally:
        SCHEMES_BY_NAME.remove("local-bias")
    for ours, theirs in zip(found[backend], found["plain"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3)


class LearnedAngles(Mechanism):
    """A rotation whose angles are a parameter."""

    rotates = True

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = torch.nn.Parameter(10000.0 ** (-torch.arange(head_dim // 2, dtype=torch.float32) * 2 / head_dim))

    def prepare(self, positions: Tensor, length: Tensor) -> CosSin:
        angles = positions[:, None, :, None].float() * self.theta
        return CosSin(angles.cos(), angles.sin())

    def rotate_query(self, query: Tensor, prepared: CosSin) -> Tensor:
        return rotate(query, prepared, "half")

    def rotate_key(self, key: Tensor, prepared: CosSin) -> Tensor:
        return rotate(key, prepared, "half")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_learned_rotation_trains_under_checkpointing(reentrant: bool) -> None:
    """Its tables, which have gradients, were shared by layers that each make them again."""
    gradients = []
    for checkpoints in (False, True):
        model = swapped("xpos", {}).train()
        model.model.posswap = LearnedAngles(8)
        if checkpoints:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(TEXT[:, :20] % 61, labels=TEXT[:, :20] % 61, use_cache=False).loss.backward()
        gradients.append(model.model.posswap.theta.grad)
    assert bool(gradients[0].abs().sum() > 0)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_jump_of_positions_makes_pieces_for_the_lengths_that_occur_alone() -> None:
    model = swapped("dynamic", {"factor": 4.0, "follow": "query"})
    jumped = torch.tensor([[0, 1, 2, 3, 10**6, 10**6 + 1]])
    pieces = model.model.posswap.pieces(jumped, jumped)
    assert len(pieces) == 2
    with torch.no_grad():
        assert bool(model(TEXT[:1, :6], position_ids=jumped).logits.isfinite().all())
