"""Makes inductor compile for an absent GPU: emulates the device, and leaves the rest to the real compiler.

`_emulated_cuda` returns the named card's answers of `torch.cuda` and of Triton's driver to inductor. Tensors are fake,
and Dynamo and autograd trace them as CPU tensors, because the autograd engine accepts no CUDA tensors without a driver;
inductor gets the traced graph with the card instead of the CPU (`_on_card`). flex_attention has no gradient on a CPU:
that check is off, and the forward keeps the log-sum-exp as on a GPU (`_keeping_logsumexp`). Everything else is
PyTorch's and Triton's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from hf_posswap.kernels import flex

KIB = 1024
PLACE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that inductor reads.

    Attributes:
        name: the card's.
        capability: its compute capability.
        processors: its multiprocessors.
        shared: bytes of shared memory that a block may take: CUDA C++ Programming Guide, "Technical Specifications per
            Compute Capability", https://docs.nvidia.com/cuda/cuda-c-programming-guide/.
        cache: bytes of its second-level cache.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    shared: int
    cache: int

    def properties(self) -> SimpleNamespace:
        """Return the fields of `torch.cuda.get_device_properties` that inductor reads."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name, major=major, minor=minor, multi_processor_count=self.processors, warp_size=32,
            total_memory=80 << 30, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
            max_threads_per_block=1024, L2_cache_size=self.cache, shared_memory_per_block=48 * KIB,
            shared_memory_per_block_optin=self.shared, shared_memory_per_multiprocessor=self.shared + KIB,
        )  # fmt: skip


CARDS = {
    "sm80": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * KIB, 40 << 20),
    "sm90": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * KIB, 50 << 20),
}


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel.

    Attributes:
        name: inductor's.
        direction: "forward" or "backward".
        config: of the launch: blocks, warps, stages.
        dynamic_shared: bytes of shared memory that the launch asks for.
        cubin: the binary.
        source: inductor's, in Triton.
    """

    name: str
    direction: str
    config: dict[str, Any]
    dynamic_shared: int
    cubin: bytes
    source: str


@contextmanager
def lowering(card: Card, kernels: list[CompiledKernel]) -> Iterator[None]:
    """Lower calls of `kernels.flex` with fake CPU tensors for `card` in the block, and append theirs to `kernels`.

    Leaves Triton's driver and PyTorch's cached card changed, so use a separate process.
    """
    import triton
    from torch._inductor import compile_fx, config
    from torch.nn.attention import flex_attention
    from triton.backends.compiler import GPUTarget

    major, minor = card.capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    lower: Any = partial(_lower, card, kernels)
    backend = partial(compile_fx.compile_fx, inner_compile=lower)
    compiled = functools.cache(lambda function, device: torch.compile(function, backend=backend))  # as for a GPU
    with ExitStack() as stack:
        settings = {"compile_threads": 1, "force_disable_caches": True, "use_static_triton_launcher": False}
        stack.enter_context(config.patch(settings))
        stack.enter_context(patch.object(flex, "_compiled", compiled))
        stack.enter_context(patch.object(flex_attention, "_validate_device", lambda *tensors: None))
        options = _keeping_logsumexp(flex_attention._apply_kernel_options)
        stack.enter_context(patch.object(flex_attention, "_apply_kernel_options", options))
        stack.callback(flex.past_blocks.cache_clear)  # they are fake
        stack.enter_context(FakeTensorMode())
        yield


def _keeping_logsumexp(original: Callable[..., Any]) -> Callable[..., Any]:
    def options(*arguments: Any, **named: Any) -> Any:
        kernel_options = original(*arguments, **named)
        kernel_options["OUTPUT_LOGSUMEXP"] = torch.is_grad_enabled()
        return kernel_options

    return options


def _lower(
    card: Card, kernels: list[CompiledKernel], graph: GraphModule, inputs: list[Any], **settings: Any
) -> Callable[..., Any]:
    """Compile `graph` for `card`, and return a function that runs the original graph on fake tensors."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx_inner

    direction = "backward" if settings.get("is_backward") else "forward"

    def compile_one(self: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        kernel, compiled = _compile(name, source, direction)
        kernels.extend(compiled)
        return kernel

    with _emulated_cuda(card), patch.object(AsyncCompile, "triton", compile_one):
        compile_fx_inner(*_on_card(graph, inputs), **settings)

    def run(arguments: list[Any]) -> Any:
        return graph(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _compile(name: str, source: str, direction: str) -> tuple[Any, list[CompiledKernel]]:
    """Compile a kernel for each config as inductor's worker process does, without loading it."""
    from torch._inductor.async_compile import _load_triton_kernel_from_source
    from torch._inductor.runtime import triton_helpers

    unset: Any = getattr(triton_helpers, "skip_gpu_driver_setup", nullcontext)  # of torch 2.15
    with unset(), patch.object(triton_helpers, "set_driver_to_gpu", lambda: None):
        kernel = _load_triton_kernel_from_source(name, source)
        kernel.precompile(warm_cache_only=True)
    kernels = []
    template_args = kernel.inductor_meta.get("config_args", {})  # constants in the template's source
    blocks = {key: size for key, size in template_args.items() if key.startswith("BLOCK_")}
    for result in kernel.compile_results:
        launch_config = result.config
        config = {
            **blocks,
            **launch_config.kwargs,
            "num_warps": launch_config.num_warps,
            "num_stages": launch_config.num_stages,
        }
        binary = result.kernel
        kernels.append(CompiledKernel(name, direction, config, binary.metadata.shared, binary.asm["cubin"], source))
    return kernel, kernels


@contextmanager
def _emulated_cuda(card: Card) -> Iterator[None]:
    """Make `torch.cuda` report `card` within the block."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses import fake_tensor
    from torch.utils import _triton

    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: card.properties(),
        "get_device_capability": lambda device=None: card.capability,
        "get_rng_state": lambda device=None: state,
        "set_rng_state": lambda state, device=None: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
            if hasattr(CudaInterface, name):  # it copied torch's functions
                stack.enter_context(patch.object(CudaInterface, name, staticmethod(answer)))
        _triton.has_triton.cache_clear()  # asked before there was a card
        if hasattr(fake_tensor, "init_gpu_context"):  # it would begin CUDA
            stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        yield


def _on_card(graph: GraphModule, inputs: list[Any]) -> tuple[GraphModule, list[Any]]:
    """Return a copy of `graph` and `inputs` whose fake tensors are the card's."""
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=PLACE)

    moved_graph = copy.deepcopy(graph)
    with mode:
        for node in (
            node for module in moved_graph.modules() if isinstance(module, GraphModule) for node in module.graph.nodes
        ):
            if "val" in node.meta:
                node.meta["val"] = tree_map(moved, node.meta["val"])
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": PLACE}
        return moved_graph, [moved(value) for value in inputs]
