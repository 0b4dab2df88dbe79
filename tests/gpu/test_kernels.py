"""The kernels on a GPU: fused calls against the formula, merged attention against its pieces, biases under flex."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model, rope_math, set_backend
from hf_posswap.compat.torch_dispatch import fused_attention
from hf_posswap.geometry import Layout
from hf_posswap.kernels import fused
from hf_posswap.patching.sites.attention import backends
from hf_posswap.rope_math import CosSin, compile_rotation, rotate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def llama(scheme: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    patch_model(model, scheme, max_length=4096)
    return model.to("cuda", torch.bfloat16).eval()


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that takes the name of each way of attending as it is chosen."""
    taken: list[str] = []
    real = backends.choose
    monkeypatch.setattr(backends, "choose", lambda request: taken.append(real(request)) or taken[-1])  # type: ignore[func-returns-value]
    return taken


def assert_alike(plain: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Check that gradients by parameter are those of the plain way, as far as bfloat16 says."""
    for name, expected in plain.items():
        assert (found[name] - expected).norm() <= 0.05 * expected.norm() + 1e-3, name


def test_the_fused_call_is_right_here() -> None:
    assert fused.available("cuda")


@pytest.mark.parametrize(("queries", "keys", "causal"), [(2048, 2048, True), (1500, 3000, False)])
def test_cudnn_gives_the_results_of_the_other_call(queries: int, keys: int, causal: bool) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN is taken from Hopper on")
    assert fused.cudnn_available(torch.device("cuda", torch.cuda.current_device()))
    query = torch.randn(2, queries, 9, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key, value = (torch.randn(2, 3, keys, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert queries * keys >= fused.MIN_CUDNN_QK_PAIRS
    out, sums = fused.forward(query, key, value, scaling=0.125, causal=causal)
    expected, expected_sums = fused_attention("cuda")(query, key, value, 0.0, causal, False, scale=0.125)[:2]
    torch.testing.assert_close(out, expected, atol=2**-8, rtol=2**-7)
    torch.testing.assert_close(sums, expected_sums[..., :queries], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("length", [700, 2100])  # the longer one by cuDNN, where that is faster
@pytest.mark.parametrize("scheme", ["self_extend", "rerope", "dual_chunk"])
def test_merged_attention_equals_its_pieces(scheme: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(scheme), torch.randint(3, 67, (1, length), device="cuda")
    taken = noted(monkeypatch)
    grads = []
    for way in ("plain", "merge", "flex"):
        set_backend(model, way)
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append({name: p.grad.float() for name, p in model.named_parameters()})
    assert set(taken) == {"plain", "merge", "flex"}
    assert_alike(*grads[:2])
    assert_alike(grads[0], grads[2])


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize("scheme", ["alibi", "t5", "kerple"])
@torch.no_grad()
def test_flex_reads_biases_from_positions(scheme: str) -> None:
    model, ids = llama(scheme).float(), torch.randint(3, 67, (2, 300), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("flex_attention")
    found = model(ids, attention_mask=mask).logits
    assert (found - expected)[mask.bool()].abs().max() < 5e-3


@pytest.mark.parametrize("scheme", ["alibi", "t5", "kerple", "alibi:learned=true"])
def test_flex_is_taken_by_itself_and_has_the_gradients(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(scheme), torch.randint(3, 67, (1, 2048), device="cuda")
    taken = noted(monkeypatch)
    grads, peaks = [], []
    for way in ("plain", "auto"):
        set_backend(model, way)
        model(ids, labels=ids, use_cache=False).loss.backward()  # what is compiled is compiled
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        model(ids, labels=ids, use_cache=False).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        grads.append({name: p.grad.float() for name, p in model.named_parameters()})
    assert set(taken) == {"plain", "flex"}
    assert_alike(*grads)
    assert peaks[1] < peaks[0] - 4 * 2048**2 * 4  # [H, Q, K] in float32, once at least


def gradients(model: Any, run: Any, ids: Tensor, mask: Tensor | None) -> tuple[dict[str, Tensor], int]:
    """Return the gradients by parameter of a loss over what is shown, and the peak of memory, once all is compiled."""
    labels = ids if mask is None else ids.masked_fill((mask == 0) | (mask.roll(1, dims=1) == 0), -100)
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        run(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters()}
    return found, torch.cuda.max_memory_allocated()


def left_padded(ids: Tensor) -> Tensor:
    return (torch.arange(ids.shape[1], device="cuda") >= torch.tensor([[0], [300]], device="cuda")).long()


@pytest.mark.parametrize(
    ("scheme", "way"),
    [("alibi", "flex"), ("t5", "flex"), ("kerple", "flex"), ("self_extend", "merge"), ("dual_chunk", "flex asked for")],
)
def test_padded_batches_hold_no_scores(scheme: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(scheme), torch.randint(3, 67, (2, 2048), device="cuda")
    taken = noted(monkeypatch)
    set_backend(model, "plain")
    plain, most = gradients(model, model, ids, left_padded(ids))
    way, asked, _ = way.partition(" asked for")
    set_backend(model, way if asked else "auto")
    found, least = gradients(model, model, ids, left_padded(ids))
    assert set(taken) == {"plain", way}
    assert_alike(plain, found)
    if way == "flex" and not asked:  # the formula of split scores goes by blocks of queries
        assert least < most - 2 * 4 * 2048**2 * 2  # [B, H, Q, K] in bfloat16, once at least


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(
    ("scheme", "way"), [("alibi", "flex"), ("t5", "flex"), ("self_extend", "merge"), ("dual_chunk", "merge")]
)
def test_a_compiled_model_holds_no_scores(scheme: str, way: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(scheme), torch.randint(3, 67, (2, 2048), device="cuda")
    taken = noted(monkeypatch)
    set_backend(model, "plain")
    plain, most = gradients(model, model, ids, left_padded(ids))
    set_backend(model, "auto")
    taken.clear()
    torch._dynamo.reset()
    for mask in (left_padded(ids), None):
        found, least = gradients(model, torch.compile(model, mode=mode), ids, mask)
        if mask is not None:
            assert_alike(plain, found)
            if way == "flex":
                assert least < most - 2 * 4 * 2048**2 * 2
    assert set(taken) == {way}


def test_a_compiled_rotation_in_bfloat16() -> None:
    x = torch.randn(1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(1, 1, 1024, 64, device="cuda")
    table = CosSin(angles.cos(), angles.sin())
    expected = rotate(x, table, "half")
    compile_rotation()
    try:
        assert (rotate(x, table, "half") - expected).abs().max() <= 2**-6
    finally:
        compile_rotation(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", rope_math.LAYOUTS)
def test_the_kernel_is_the_rotation_bit_by_bit(dtype: torch.dtype, layout: Layout) -> None:
    assert rope_math.kernel_available()
    wide = torch.randn(2, 1024, 3, 4, 80, device="cuda", dtype=dtype).unbind(2)[1].transpose(1, 2)
    angles = torch.rand(2, 1, 1024, 32, device="cuda") * 6
    table = CosSin(angles.cos(), angles.sin())
    x, other = (wide.detach().requires_grad_() for _ in range(2))
    assert rope_math._fits_kernel(x, table)
    found, expected = rotate(x, table, layout), rope_math._joined(other, *table, layout)
    assert torch.equal(found, expected)
    weight = torch.randn_like(found)
    for out in (found, expected):
        out.backward(weight)
    torch.testing.assert_close(x.grad, other.grad, rtol=2**-7, atol=1e-5)
