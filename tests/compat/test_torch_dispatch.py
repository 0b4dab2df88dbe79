"""What compat sees of operators, of the torch that is installed, against the public functions above them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_posswap.compat import torch_dispatch
from hf_posswap.compat.torch_dispatch import WIDENED, PrivateRandomness, gpu_autocast
from hf_posswap.compat.torch_tensors import fake_mode
from hf_posswap.errors import BackendWarning

aten = torch.ops.aten


def test_call() -> None:
    seen = []

    class Seeing(torch_dispatch.Watch):
        def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen.append(func)
            return super().call(func, args, kwargs)

    with Seeing():
        weight = torch.ones(2, 2, requires_grad=True)
        (weight @ weight).sum().backward()
    assert seen.count(aten.mm.default) == 3  # one forward, two backward


def test_tensors_in() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert torch_dispatch.tensors_in((one, 3), {"held": [two, None]}) == [one, two]


def test_reads_number() -> None:
    seen = []

    class Seeing(torch_dispatch.Watch):
        def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen.append(torch_dispatch.reads_number(func))
            return super().call(func, args, kwargs)

    held = torch.ones(2)
    with Seeing():
        held.sum()
        assert not any(seen)
        bool(held.sum())
        held[0].item()
    assert sum(seen) == 2


def test_argument_names() -> None:
    assert torch_dispatch.argument_names(aten.mm.default) == ["self", "mat2"]


def test_writes() -> None:
    assert torch_dispatch.writes(aten.add_.Tensor)
    assert not torch_dispatch.writes(aten.view.default)


def test_storage_key() -> None:
    held, other = torch.ones(4), torch.ones(4)
    keys = [torch_dispatch.storage_key(one.untyped_storage()) for one in (held, held[1:].view(3, 1), other)]
    assert keys[0] == keys[1] != keys[2]


def test_without_modes() -> None:
    class Refusing(torch_dispatch.Watch):
        def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise AssertionError

    with Refusing(), fake_mode(), torch_dispatch.without_modes():
        assert float(torch.ones(3).sum()) == 3


def test_resized_storages() -> None:
    sizes = []
    storage = torch.ones(4).untyped_storage()
    with torch_dispatch.resized_storages(lambda one: sizes.append(one.nbytes())):
        storage.resize_(0)
        storage.resize_(8)
    storage.resize_(4)
    assert sizes == [0, 8]


def test_resized_storages_of_other_threads_are_not_told_of() -> None:
    original, sizes, others = torch.UntypedStorage.resize_, [], []
    first = torch_dispatch.resized_storages(lambda one: sizes.append(one.nbytes()))

    def work() -> None:
        second = torch_dispatch.resized_storages(lambda one: others.append(one.nbytes()))
        with second:
            torch.ones(4).untyped_storage().resize_(0)
            first_ends.set()
            assert first_ended.wait(60)
            torch.ones(4).untyped_storage().resize_(32)

    first_ends, first_ended = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        with first:
            done = threads.submit(work)
            assert first_ends.wait(60)
            torch.ones(4).untyped_storage().resize_(8)
        first_ended.set()
        done.result()
    assert (sizes, others) == ([8], [0, 32])
    assert torch.UntypedStorage.resize_ is original


DRAWS: dict[str, Callable[[], Tensor]] = {
    "module": lambda: nn.Linear(3, 3).weight.detach(),
    "randn": lambda: torch.randn(3),
    "rand": lambda: torch.rand(3),
    "randn_like": lambda: torch.randn_like(torch.ones(3)),
    "randperm": lambda: torch.randperm(50),
    "randint": lambda: torch.randint(1000, (3,)),
    "randint from": lambda: torch.randint(5, 1000, (3,)),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "normal_": lambda: torch.empty(3).normal_(),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 9),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(3)),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(3, 3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_call_of_private_randomness(name: str) -> None:
    def drawn(seed: int) -> Tensor:
        with PrivateRandomness(seed):
            return DRAWS[name]()

    before = torch.get_rng_state()
    one, same, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_call_keeps_a_generator_that_is_given() -> None:
    expected = torch.randn(3, generator=torch.Generator().manual_seed(5))
    with PrivateRandomness(1):
        assert torch.equal(torch.randn(3, generator=torch.Generator().manual_seed(5)), expected)


@pytest.mark.gpu
def test_call_draws_on_the_device_where_models_are_built() -> None:
    before = torch.cuda.get_rng_state()
    with PrivateRandomness(1), torch.device("cuda"):
        weights = [nn.Linear(3, 3).weight, torch.randn(3), torch.empty(3).normal_()]
    assert {each.device.type for each in weights} == {"cuda"}
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("name", WIDENED)
def test_what_is_widened_is_so_on_a_gpu_alone(name: str) -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"aten::{name}", "AutocastCUDA")
    assert not has(f"aten::{name}", "AutocastCPU")


def test_gpu_autocast() -> None:
    x = torch.linspace(0.1, 2.0, 6, dtype=torch.bfloat16).view(2, 3).requires_grad_()
    asked = (lambda: x.pow(3), lambda: functional.layer_norm(x, (3,)), lambda: x.softmax(-1), lambda: x.sum())
    with torch.autocast("cpu", torch.bfloat16):
        assert {ask().dtype for ask in asked} == {torch.bfloat16}
        with gpu_autocast():
            assert {ask().dtype for ask in asked} == {torch.float32}
            assert torch.softmax(x, -1, dtype=torch.float64).dtype == torch.float64
            torch.testing.assert_close(x.pow(3), x.float().pow(3))
            x.pow(3).sum().backward()
        assert {ask().dtype for ask in asked} == {torch.bfloat16}
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (3 * x.float() ** 2).bfloat16().detach(), rtol=2**-7, atol=0)
    with gpu_autocast():
        assert x.pow(3).dtype == torch.bfloat16  # without autocast nothing is widened


def test_gpu_autocast_is_of_its_thread_alone() -> None:
    x = torch.linspace(0.1, 2.0, 6, dtype=torch.bfloat16).view(2, 3)

    def results() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [x.pow(3), functional.layer_norm(x, (3,)), x.softmax(-1), x.sum(), functional.softplus(x)]

    expected = results()
    with gpu_autocast(), ThreadPoolExecutor(1) as threads:
        found = threads.submit(results).result()
        assert {each.dtype for each in results()} == {torch.float32}
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(found, expected, strict=True))


HERE = [
    pytest.param("cpu", torch.float32, 1e-5, id="cpu"),
    pytest.param("cuda", torch.bfloat16, 5e-2, id="cuda", marks=pytest.mark.gpu),
]


def inputs(device: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, 2, 16, 8, dtype=dtype, device=device).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize(("device", "dtype", "near"), HERE)
def test_fused_attention(device: str, dtype: torch.dtype, near: float) -> None:
    query, key, value = inputs(device, dtype)
    out, sums, *_ = torch_dispatch.fused_attention(device)(query, key, value, 0.0, True)
    scores = (query @ key.transpose(-1, -2)).float() / 8**0.5
    hidden = torch.ones(16, 16, dtype=torch.bool, device=device).triu(1)
    expected = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(out, scaled_dot_product_attention(query, key, value, is_causal=True), atol=near, rtol=0)
    torch.testing.assert_close(sums[..., :16], expected, atol=near, rtol=near)


@pytest.mark.parametrize(("device", "dtype", "near"), HERE)
def test_fused_attention_backward(device: str, dtype: torch.dtype, near: float) -> None:
    given = inputs(device, dtype)
    out, sums, *rest = torch_dispatch.fused_attention(device)(*given, 0.0, True)
    grad = torch.ones_like(out)
    more = (None, None, 16, 16) if device == "cuda" else ()
    unread = (torch.zeros(2, dtype=torch.int64, device=device),) * 2 if device == "cuda" else ()
    found = torch_dispatch.fused_attention_backward(device)(grad, *given, out, sums, *more, 0.0, True, *unread)
    expected = torch.autograd.grad(scaled_dot_product_attention(*given, is_causal=True).sum(), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=near, rtol=near)


@pytest.mark.parametrize(("device", "dtype", "near"), HERE)
def test_fused_takes_groups(device: str, dtype: torch.dtype, near: float) -> None:
    """Where it says yes, the public function agrees: told to use these operators alone, it takes groups."""
    query, (key, value) = inputs(device, dtype)[0], (x[:, :1] for x in inputs(device, dtype)[1:])
    if not torch_dispatch.fused_takes_groups(device):
        pytest.skip("this torch is not known to take groups")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    out, *_ = torch_dispatch.fused_attention(device)(query, key, value, 0.0, True)
    torch.testing.assert_close(out, expected, atol=near, rtol=0)


def test_efficient_attention() -> None:
    names = [argument.name for argument in torch_dispatch.efficient_attention().default._schema.arguments]
    assert names == ["query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale"]
    query, key, value = (one.detach().to("meta") for one in inputs("cpu", torch.float32))
    assert torch_dispatch.efficient_attention()(query, key, value, None, True, 0.1, True)[0].shape == query.shape


def test_with_autograd() -> None:
    """In the kernel of an operator autograd records nothing, but in the block."""

    def kernel(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            assert leaf.square().grad_fn is None
        with torch_dispatch.with_autograd():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(leaf.square().sum(), leaf)[0]

    operator = torch.library.custom_op("tests_posswap::twice", kernel, mutates_args=(), schema="(Tensor x) -> Tensor")
    x = torch.arange(3.0, requires_grad=True)
    assert torch.equal(operator(x), 2 * torch.arange(3.0))


def test_works_correctly(recwarn: pytest.WarningsRecorder) -> None:
    def tried(device: str) -> list[float]:
        return [float(torch.ones(1, device=device)) - 1]  # a fake tensor has no number

    def failing(device: str) -> list[float]:
        raise RuntimeError

    with fake_mode(), torch.autocast("cpu"):
        assert torch_dispatch.works_correctly("a kernel", "cpu", tried)
    assert not torch_dispatch.works_correctly("a kernel", "cpu", failing)
    assert torch_dispatch.works_correctly("a kernel", "cpu", lambda device: [0.0, torch_dispatch.TOLERANCE[device]])
    assert not torch_dispatch.works_correctly("a kernel", "cpu", lambda device: [0.0, float("nan"), 0.0])
    assert not torch_dispatch.works_correctly("a kernel", "cpu", lambda device: [1 / 0])
    assert not torch_dispatch.works_correctly("a kernel", "cpu", lambda device: [])
    said = [str(each.message) for each in recwarn if each.category is BackendWarning]
    reasons = ("RuntimeError", "from the formula by nan", "ZeroDivisionError: division by zero", "an unknown number")
    assert len(said) == 4
    assert all(reason in message for reason, message in zip(reasons, said, strict=True))


def test_cudnn_attention() -> None:
    names = torch_dispatch.argument_names(torch_dispatch.cudnn_attention().default)
    assert names[:5] == ["query", "key", "value", "attn_bias", "compute_log_sumexp"]
    assert names[5:] == ["dropout_p", "is_causal", "return_debug_mask", "scale"]


def test_many_kinds() -> None:
    made = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    run = torch.compile(lambda x: x.sin() + 1, backend=backend, dynamic=False)
    for size in range(2, 22):
        with torch_dispatch.many_kinds():
            run(torch.ones(size))
    assert len(made) == 20
    for size in range(22, 26):
        run(torch.ones(size))
    assert len(made) == 20  # the limit is torch's own again


def test_attend_with_sums() -> None:
    query, key, value = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
    out, sums = torch_dispatch.attend_with_sums(query, key, value, scale=0.3, enable_gqa=True)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = query @ keys.mT * 0.3
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(sums, scores.logsumexp(-1))


def test_is_exporting() -> None:
    """In a graph of torch.compile it says no, which `torch.compiler.is_exporting` did not before torch 2.13."""
    seen = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            exporting = torch_dispatch.is_exporting()
            return x + 1 if exporting is None else x + 2 if exporting else x + 3

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(str(graph.code))
        return graph.forward

    if not hasattr(torch.compiler, "is_exporting"):
        assert torch_dispatch.is_exporting() is None
        return
    x = torch.zeros(2)
    assert torch.equal(torch.compile(Asking(), backend=backend, fullgraph=True)(x), x + 3)
    assert len(seen) == 1
    for strict in (True, False):
        assert torch.equal(torch.export.export(Asking(), (x,), strict=strict).module()(x), x + 2)
    assert torch_dispatch.is_exporting() is False


def test_uncaptured() -> None:
    options = torch_dispatch.uncaptured()
    operator = torch.library.custom_op("tests_posswap::read", lambda x: x + float(x[0]), mutates_args=(),
                                       schema="(Tensor x) -> Tensor", **options)  # fmt: skip
    operator.register_fake(torch.empty_like)
    overload = torch.ops.tests_posswap.read.default
    assert [tag in overload.tags for tag in options.get("tags", ())] == [True] * bool(options)
    assert torch.equal(operator(torch.ones(2)), torch.full((2,), 2.0))


def test_compile_errors() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise AttributeError("no such symbol")

    with pytest.raises(torch_dispatch.compile_errors(), match="no such symbol"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
