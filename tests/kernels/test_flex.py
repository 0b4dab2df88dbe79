"""ALiBi under flex_attention: read from positions, with nothing of [Q, K]."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posswap import patch_model, set_backend
from hf_posswap.errors import BackendWarning
from hf_posswap.geometry import Geometry
from hf_posswap.kernels import flex
from hf_posswap.kernels.flex import ByDistance, Penalty, attend_read, fits_flex
from hf_posswap.kernels.merge import Region
from hf_posswap.patching.sites.attention import backends
from hf_posswap.patching.sites.attention.backends import flex_bias
from hf_posswap.patching.sites.attention.forward_memo import Span
from hf_posswap.schemes import Alibi, Kerple, T5Bias
from hf_posswap.schemes.alibi import AlibiMechanism
from tests.patching.sites.attention.test_situations import IDS, LEFT, LENGTH, SITUATIONS, counted
from tests.stock import with_cache

ignored = pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
"""transformers passes the flag itself."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backend of each call."""
    found: list[str] = []
    real = backends.choose
    monkeypatch.setattr(backends, "choose", lambda request: found.append(real(request)) or found[-1])  # type: ignore[func-returns-value]
    return found


def mechanism_of(name: str, causal: bool) -> Any:
    geometry = Geometry(48, 6, 6, 8, 2, 64, causal=causal)
    schemes: dict[str, Any] = {
        "t5": T5Bias(init_std=1.0, max_distance=9, num_buckets=8),
        "kerple": Kerple(),
        "learned slopes": Alibi(learned=True),
    }
    if name == "alibi":
        return AlibiMechanism([0.5, 0.25, 0.0, 0.031, 1.7, 0.0078], interpolation=2.0)
    return schemes[name].resolve(geometry, None).mechanism(geometry)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "learned slopes"])
@torch.no_grad()
def test_it_reads_as_the_dense_bias(name: str, causal: bool) -> None:
    mechanism = mechanism_of(name, causal)
    keys = torch.arange(10)[None] - torch.tensor([[0], [3]])
    span = Span(torch.tensor([[4, 5, 9], [0, 1, 30]]), 10, is_prefill=False, cached=keys)
    read, dense = flex_bias(mechanism, span, 2), mechanism.bias(span.query, span.key)
    assert dense.shape == (2, 6, 3, 10)
    for place in torch.cartesian_prod(*map(torch.arange, dense.shape)):
        assert read[tuple(place)] == dense[tuple(place)]


def test_learned_slopes_are_read_by_distance_where_their_gradients_are_wanted() -> None:
    mechanism, at = mechanism_of("learned slopes", True), torch.arange(12)[None]
    span = Span(at, 12, is_prefill=True)
    with_gradient, frozen = flex_bias(mechanism, span, 1), flex_bias(mechanism.requires_grad_(False), span, 1)
    assert isinstance(with_gradient, ByDistance)
    assert isinstance(frozen, Penalty)
    shape = (1, 6, 12, 12)
    assert torch.equal(dense(with_gradient, shape), dense(frozen, shape))
    mechanism.requires_grad_(True)
    dense(flex_bias(mechanism, span, 1), shape).sum().backward()
    apart = float((at[0, :, None] - at).abs().sum())
    torch.testing.assert_close(mechanism.raw_slopes.grad, -mechanism.raw_slopes.detach().sigmoid() * apart)


@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_positions_are_read_in_32_bits_wherever_they_begin(name: str) -> None:
    at = torch.arange(12)[None]
    near, far = (
        flex_bias(mechanism_of(name, True), Span(start + at[:, 4:], 12, is_prefill=False, cached=start + at), 1)
        for start in (0, 2**31 - 6)
    )
    assert near is not None
    assert far is not None
    assert near.query.dtype == near.key.dtype == torch.int32
    assert torch.equal(dense(near, (1, 6, 8, 12)), dense(far, (1, 6, 8, 12)))


@pytest.mark.slow
@ignored
def test_what_is_learned_is_given_as_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def spy(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, position_bias: Any = None, **_: Any) -> Any:
        given.append(position_bias)
        return torch.zeros_like(q).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", spy)
    model, ids = llama("t5"), torch.arange(8)[None]
    model.set_attn_implementation("flex_attention")
    model(ids)
    model.requires_grad_(False)
    model(ids)
    assert isinstance(given[0], Tensor)
    assert isinstance(given[1], ByDistance)


def llama(scheme: str = "alibi") -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    patch_model(model, scheme, max_length=512, **({"init_std": 1.0} if scheme == "t5" else {}))
    return model


@ignored
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["alibi", "t5"])
@torch.no_grad()
def test_flex_equals_sdpa_with_padding(scheme: str) -> None:
    model, ids = llama(scheme), torch.randint(3, 67, (2, 160))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("flex_attention")
    found = model(ids, attention_mask=mask).logits
    assert (found - expected)[mask.bool()].abs().max() < 5e-5


def dense(bias: Any, shape: tuple[int, ...]) -> Tensor:
    return bias[torch.meshgrid(*map(torch.arange, shape), indexing="ij")]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["alibi", "t5"])
@torch.no_grad()
def test_the_compiled_call_equals_the_formula(name: str, causal: bool) -> None:
    torch.manual_seed(0)
    span = Span(torch.stack([torch.arange(150), 3 * torch.arange(150)]), 150, is_prefill=True)
    bias = flex_bias(mechanism_of(name, causal), span, 2)
    assert bias is not None
    query, key, value = (torch.randn(2, heads, 150, 16) for heads in (6, 3, 3))
    assert fits_flex(query, value, bias)
    found = attend_read(query, key, value, bias, scaling=0.3, causal=causal)
    added = dense(bias, (2, 6, 150, 150))
    if causal:
        added = added.masked_fill(torch.ones(150, 150, dtype=torch.bool).triu(1), -torch.inf)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (key, value))
    expected = (query.double() @ keys.double().mT * 0.3 + added.double()).softmax(-1) @ values.double()
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_a_model_under_the_backend(taken: list[str]) -> None:
    model, ids = llama("t5"), torch.randint(3, 67, (2, 160))
    expected = model(ids).logits
    set_backend(model, "flex")
    assert (model(ids).logits - expected).abs().max() < 5e-5
    with torch.enable_grad():
        assert (model(ids).logits - expected).abs().max() < 5e-5, "a CPU has no gradient of it: the plain way"
    assert taken == ["plain", "flex", "plain"]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "name"), [*zip(cycle(["alibi", "t5"]), SITUATIONS)])
@torch.no_grad()
def test_masks_under_the_backend(scheme: str, name: str, taken: list[str]) -> None:
    """Padded, packed, with gaps, from any position; only what adds numbers is left to the formula."""
    model, arguments = llama(scheme), SITUATIONS[name]
    arguments = {key: x.float() if x.is_floating_point() else x for key, x in arguments.items()}
    ids = IDS if name != "packed" else IDS[:1]  # without a mask documents are found in one row alone
    given = arguments.get("attention_mask", torch.ones_like(ids))
    real_tokens = given.bool() if given.dim() == 2 else torch.ones_like(ids, dtype=torch.bool)
    set_backend(model, "plain")
    expected = model(ids, use_cache=False, **arguments).logits
    set_backend(model, "flex")
    found = model(ids, use_cache=False, **arguments).logits
    assert taken[1] == ("plain" if given.is_floating_point() else "flex")
    assert (found - expected)[real_tokens].abs().max() < 5e-5


@pytest.mark.slow
@torch.no_grad()
def test_chunks_upon_a_cache_under_the_backend() -> None:
    model = llama("t5")
    expected = model(IDS, attention_mask=LEFT, position_ids=counted(LEFT)).logits
    set_backend(model, "flex")
    cache, logits = DynamicCache(config=model.config), []
    for part in torch.arange(LENGTH).split(15):
        seen = LEFT[:, : int(part[-1]) + 1]
        given = {"attention_mask": seen, "position_ids": counted(LEFT)[:, part], **with_cache(model, cache)}
        logits.append(model(IDS[:, part], **given, use_cache=True).logits)
    assert (torch.cat(logits, dim=1) - expected)[LEFT.bool()].abs().max() < 5e-5


@pytest.mark.slow
@pytest.mark.usefixtures("stock_compiles")
@torch.no_grad()
def test_a_graph_takes_the_backend(taken: list[str]) -> None:
    """The operator of a graph compiles flex_attention while the graph runs."""
    model = llama("t5")
    expected = model(IDS, attention_mask=LEFT, use_cache=False).logits
    set_backend(model, "flex")
    taken.clear()
    run = torch.compile(lambda: model(IDS, attention_mask=LEFT, use_cache=False).logits, fullgraph=True)
    assert (run() - expected)[LEFT.bool()].abs().max() < 5e-5
    assert taken == ["flex"]


def test_a_compiler_that_fails_means_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda function, device: 1 / 0)
    flex.flex_available.cache_clear()
    model, ids = llama("alibi").requires_grad_(False), torch.randint(3, 67, (2, 20))
    expected = model(ids).logits
    set_backend(model, "flex")
    try:
        with pytest.warns(BackendWarning, match=r"flex_attention does not work on torch .*ZeroDivisionError") as told:
            found = [model(ids).logits for _ in range(2)]
    finally:
        flex.flex_available.cache_clear()
    assert len(told) == 1
    assert all(torch.equal(one, expected) for one in found)


def test_a_shape_that_is_not_compiled_means_the_plain_way(monkeypatch: pytest.MonkeyPatch, taken: list[str]) -> None:
    """The trial went well, and a later call finds an error in torch's compiler: nothing ends, and it is told once."""

    def failing(*arguments: Any, **options: Any) -> Tensor:
        raise TorchDynamoException("LoweringException: no such symbol")

    monkeypatch.setattr(flex, "_compiled", lambda function, device: failing)
    monkeypatch.setattr(flex, "flex_available", lambda *arguments: True)
    monkeypatch.setattr(flex, "_refused", set())
    model, ids = llama("t5").requires_grad_(False), torch.randint(3, 67, (2, 20))
    expected = model(ids).logits
    set_backend(model, "flex")
    taken.clear()
    with pytest.warns(
        BackendWarning, match=r"does not compile .* queries \[2, 4, 20, 16\] on cpu .*no such symbol"
    ) as told:
        found = [model(ids).logits for _ in range(2)]
    assert len(told) == 1
    assert taken == ["flex", "plain", "plain"]
    assert all(torch.equal(one, expected) for one in found)


@ignored
@pytest.mark.gpu
def test_flex_on_a_gpu_gives_gradients_and_needs_memory_of_order_length() -> None:
    model, ids = llama().to("cuda"), torch.randint(3, 67, (1, 4096), device="cuda")
    model(ids[:, :512], labels=ids[:, :512]).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation("flex_attention")
    model(ids[:, :512], labels=ids[:, :512]).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-3, rtol=1e-2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        model(ids, use_cache=False)
    dense = 4 * 4096**2 * 4  # [H, Q, K] in float32
    assert torch.cuda.max_memory_allocated() - before < dense / 4


@pytest.mark.parametrize(("low", "high"), [(0, None), (128, None), (0, 128), (256, None), (0, 256), (128, 384)])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (128, 128), (129, 129), (300, 300), (1000, 1000), (300, 200), (200, 300)]
)
def test_the_blocks_of_a_mask_are_those_of_torch(rows: int, columns: int, low: int, high: int | None) -> None:
    blocks = flex.past_blocks(rows, columns, torch.device("cpu"), low, high)
    expected = create_block_mask(blocks.mask_mod, None, None, rows, columns, device="cpu")
    assert_same_blocks(blocks, expected)
    apart = torch.arange(rows)[:, None] - torch.arange(columns)
    in_bounds = (apart >= low) if high is None else (apart >= low) & (apart < high)
    assert torch.equal(create_mask(blocks.mask_mod, None, None, rows, columns, device="cpu")[0, 0], in_bounds)


@pytest.mark.parametrize("region", [Region(50, 0, 1), Region(50, 1, 2), Region(50, 2, None), Region(300, 0, 1)])
@pytest.mark.parametrize("start", [0, 7, 130])
@pytest.mark.parametrize("length", [1, 128, 129, 700])
def test_the_blocks_of_chunks_are_those_of_torch(length: int, start: int, region: Region) -> None:
    blocks = flex.past_blocks(
        length, length, torch.device("cpu"), region.low or 0, region.high, size=region.size, start=start
    )
    at = torch.arange(start, start + length)
    in_region = region.holds(at[:, None], at) & (at[:, None] >= at)
    assert torch.equal(create_mask(blocks.mask_mod, None, None, length, length, device="cpu")[0, 0], in_region)
    assert_same_blocks(blocks, create_block_mask(blocks.mask_mod, None, None, length, length, device="cpu"))


def assert_same_blocks(found: BlockMask, expected: BlockMask) -> None:
    """Check that two masks have the same blocks, listed in the same order."""
    assert found.seq_lengths == expected.seq_lengths
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = f"{kind}_num_blocks", f"{kind}_indices"
        count = getattr(expected, counts)
        assert torch.equal(getattr(found, counts), count)
        ours, theirs = getattr(found, indices), getattr(expected, indices)
        assert ours.dtype == theirs.dtype == torch.int32
        listed = torch.arange(ours.shape[-1]) < count[..., None]
        assert torch.equal(ours[listed], theirs[listed])


def masks(rows: int, columns: int) -> dict[str, Tensor]:
    """Return masks [B or 1, 1, Q, K] of rows that see nothing, gaps, windows, documents and what no rule describes."""
    row, column = torch.arange(rows)[:, None] + columns - rows, torch.arange(columns)
    causal, document = row >= column, torch.arange(columns) // 90
    padded = torch.stack([causal & (column >= first) for first in (0, 5, 140)])
    return {
        "padded": padded[:, None],
        "window": (causal & (row - column < 40))[None, None],
        "documents": (causal & (document[-rows:, None] == document))[None, None],
        "gap": (causal & ((column < 3) | (column >= 150)))[None, None],
        "any": torch.rand(3, 1, rows, columns, generator=torch.Generator().manual_seed(0)) < 0.3,
    }


@pytest.mark.parametrize("name", [*masks(2, 2)])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 128), (129, 300), (300, 300)])
def test_the_blocks_of_a_given_mask_are_those_of_torch(rows: int, columns: int, name: str) -> None:
    mask = masks(rows, columns)[name]
    found = flex.shown_blocks(mask)
    expected = create_block_mask(found.mask_mod, len(mask), None, rows, columns, device="cpu")
    assert_same_blocks(found, expected)
    assert torch.equal(create_mask(found.mask_mod, len(mask), None, rows, columns, device="cpu"), mask)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*masks(2, 2)])
@pytest.mark.parametrize(("rows", "columns"), [(150, 300), (300, 300)])
@torch.no_grad()
def test_the_compiled_call_with_a_mask_equals_the_formula(rows: int, columns: int, name: str) -> None:
    torch.manual_seed(0)
    positions = torch.stack([start + torch.arange(columns) for start in (0, 7, 31)])
    span = Span(positions[:, -rows:], columns, is_prefill=False, cached=positions)
    bias, mask = flex_bias(mechanism_of("t5", True), span, 3), masks(rows, columns)[name]
    assert bias is not None
    query, key, value = (torch.randn(3, *shape, 16) for shape in ((6, rows), (3, columns), (3, columns)))
    found = attend_read(query, key, value, bias, scaling=0.3, causal=True, shown=flex.shown_blocks(mask))
    keys, values = (x.repeat_interleave(2, dim=1).double() for x in (key, value))
    scores = query.double() @ keys.mT * 0.3 + dense(bias, (3, 6, rows, columns)).double()
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0) @ values
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("settled", [1, 100, 128, 200])
def test_a_settled_bias_by_two_calls_is_that_of_the_formula(settled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls as they are written: compiled, they need a GPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # it has gradients, not compiled
    monkeypatch.setattr(flex, "_compiled", lambda function, device: function)
    torch.manual_seed(0)
    shapes = (2, 4, 500, 16), (2, 2, 500, 16), (2, 2, 500, 16), (4, settled + 1)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    found = flex.attend_settled(*leaves, scaling=0.3)
    expected = flex._formula(*leaves, settled)
    assert (found - expected).abs().max() < 1e-12
    weight = torch.randn_like(found)
    grads = [torch.autograd.grad((out * weight).sum(), leaves) for out in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


@pytest.mark.parametrize("kernel", [flex.REGIONS, flex.CHUNK_REGIONS, flex.MASKED_REGIONS])
@pytest.mark.parametrize("learned", [False, True])
def test_regions_by_their_calls_are_those_of_the_formula(
    learned: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls as they are written, in the trial of a GPU: compiled, they need one."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "_compiled", lambda function, device: function)
    for length in (150, 300, 400):
        errors = flex._errors_by_regions(kernel, "cpu", length, learned)
        assert len(errors) == (1 + (7 if kernel == flex.CHUNK_REGIONS else 5) if learned else 1)
        assert all(error < 1e-4 for error in errors)
