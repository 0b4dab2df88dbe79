"""Operators: watched while they run, drawing random numbers of a context's own, widened as on a GPU, fused."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_posswap.errors import BackendWarning
from hf_posswap.utils.format import said_by
from hf_posswap.utils.threads import shared

if TYPE_CHECKING:
    from torch._ops import OpOverload, OpOverloadPacket

    Operator: TypeAlias = OpOverload


class Watch(TorchDispatchMode):
    """A context in which `call` runs each operator, on plain and fake tensors: sharded ones come as their own parts.

    Touches `TorchDispatchMode` (torch 2.6 to 2.13), which no page of torch promises. Without it neither the memory nor
    the work of a step can be counted.
    """

    def call(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return what the operator `func` gives for these arguments.

        Touches `TorchDispatchMode.__torch_dispatch__`, which calls it. Without it subclasses would have to.
        """
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        # DTensor then runs operators on its shards
        if any(cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed") for cls in types):
            return NotImplemented
        if func is torch.ops.prim.device.default:  # fake tensors call it all the time
            return args[0].device
        return self.call(func, args, kwargs or {})


def tensors_in(*values: object) -> list[Tensor]:
    """Return the tensors in `values`, in lists and mappings too.

    Touches `torch.utils._pytree.tree_leaves` (torch 2.6 to 2.13). Without it the arguments of operators on lists of
    tensors, such as a fused optimizer's, would not be seen.
    """
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def reads_number(operator: OpOverload) -> bool:
    """Return whether `operator` gives Python the one number of a tensor, as `Tensor.item` and `bool(tensor)` do.

    Touches `torch.ops.aten._local_scalar_dense` (torch 2.6 to 2.13). Without it the places where a step waits for a
    number could not be found.
    """
    return operator is torch.ops.aten._local_scalar_dense.default


def argument_names(operator: OpOverload) -> list[str]:
    """Return the names of the arguments of `operator`, in their order.

    Touches `OpOverload._schema` (torch 2.6 to 2.13). Without it fused attention could not be asked for its shapes.
    """
    return [argument.name for argument in operator._schema.arguments]


def writes(operator: OpOverload) -> bool:
    """Return whether `operator` writes into its arguments.

    Touches the same. Without it what works in place cannot be told from what only looks at memory in another way.
    """
    return bool(operator._schema.is_mutable)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return what tells an untyped `storage` from all others that are in use.

    Touches `UntypedStorage._cdata` (torch 2.6 to 2.13). Without it views would be counted as memory of their own.
    """
    return int(storage._cdata)


def without_modes() -> AbstractContextManager[object]:
    """Return a context in which operators run as they are, whatever watches them or makes them fake around it.

    Touches `torch.utils._python_dispatch._disable_current_modes` (torch 2.6 to 2.13). Without it a kernel that is tried
    under a fake mode would be found wrong, for the rest of the process.
    """
    return _disable_current_modes()


TOLERANCE = {"cpu": 1e-5, "cuda": 5e-2}
"""Maximum difference of a kernel's result from the formula: in float32, and on a GPU in bfloat16."""


def works_correctly(kernel: str, device: str, errors: Callable[[str], Iterable[float]]) -> bool:
    """Return whether a kernel works correctly on `device`; warn if not.

    Touches what `without_modes` does, and by `errors` the kernel, which nobody promises. Without it a kernel of another
    release of torch could be wrong in silence.

    Args:
        kernel: the kernel's name in the warning.
        device: the device type.
        errors: runs the kernel on the device, and returns how far its results are from the formula's, one by one: of a
            NaN among several numbers `max` may give another.
    """
    try:
        with without_modes(), torch.autocast(device, enabled=False):  # autocast would reduce the formula's precision
            differences = [*errors(device)]
    except Exception as problem:  # any error means that the kernel does not work
        reason = f"{type(problem).__name__}: {said_by(problem)}"
    else:
        wrong = [difference for difference in differences if not difference <= TOLERANCE[device]]  # a NaN too
        if differences and not wrong:
            return True
        numbers = ", ".join(f"{each:.1e}" for each in wrong) or "an unknown number"
        reason = f"its results differ from the formula by {numbers}"
    warnings.warn(
        f"hf_posswap's {kernel} does not work on torch {torch.__version__}, {device} ({reason}). "
        "The plain paths are used instead: the same results, slower and with more memory.",
        BackendWarning,
        stacklevel=3,
    )
    return False


_told_of_sizes: ContextVar[tuple[Callable[[torch.UntypedStorage], None], ...]] = ContextVar("told_of_sizes", default=())


@contextmanager
def resized_storages(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Have `tell` called with each storage whose size this thread changes in the block: FSDP2 empties its own so.

    Touches `UntypedStorage.resize_` (torch 2.6 to 2.13), which is called past the dispatcher. Without it weights that
    FSDP2 has gathered once would count for ever.
    """

    def _begin() -> Callable[[], None]:
        original = torch.UntypedStorage.resize_

        def _resize(storage: torch.UntypedStorage, size: int) -> object:
            result = original(storage, size)
            for each in _told_of_sizes.get():
                each(storage)
            return result

        def _end() -> None:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]
        return _end

    with shared("UntypedStorage.resize_", _begin):
        before = _told_of_sizes.set((*_told_of_sizes.get(), tell))
        try:
            yield
        finally:
            _told_of_sizes.reset(before)


class PrivateRandomness(Watch):
    """A context in which this thread draws random numbers from generators of the context's own, one for each device.

    Touches `torch.Tag` on `OpOverload.tags`, and overloads called `generator` (torch 2.6 to 2.13). Without it building
    a model would draw from the process's generator, and change what other threads and the caller draw next.

    Args:
        seed: of the numbers.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def call(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
        """Return what `func` gives, by this context's generator where it draws and no other is given.

        Touches the same as the class.
        """
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        taking = func if "generator" in argument_names(func) else _with_generator(func)
        if taking is None:
            return func(*args, **kwargs)
        return taking(*args, **kwargs, generator=self._generator(kwargs.get("device"), args))

    def _generator(self, device: torch.device | str | None, args: tuple[object, ...]) -> torch.Generator:
        tensors = [each for each in args if isinstance(each, Tensor)]
        device = torch.device(device or (tensors[0].device if tensors else "cpu"))
        if device.type == "meta":
            device = torch.device("cpu")
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]


def _with_generator(func: OpOverload) -> OpOverload | None:
    """Return the overload of `func` that takes a generator; None: there is none."""
    overload = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    return getattr(func.overloadpacket, overload, None)


WIDENED = (
    "cosine_similarity", "cumprod", "cumsum", "exp", "expm1", "group_norm", "layer_norm", "linalg_vector_norm", "log",
    "log10", "log1p", "log2", "log_softmax.int", "logsumexp", "native_layer_norm", "norm.Scalar", "norm.ScalarOpt_dim",
    "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "rsqrt", "sinh", "softmax.int", "softplus",
    "sum", "sum.dim_IntList", "tan",
)  # fmt: skip
"""Operators that compute in float32 under autocast on a GPU, and in the dtype that they are given on a CPU."""
_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def gpu_autocast() -> Iterator[None]:
    """Make autocast on a CPU use float32 in the block, in this thread, for the operators for which it does on a GPU.

    Touches `torch.library.Library` under the key AutocastCPU, and `torch._C._ExcludeDispatchKeyGuard` (torch 2.6 to
    2.13). Without it a GELU or a norm in mixed precision would seem to use half of the memory that it uses on a GPU.
    """
    library, thread = torch.library.Library("aten", "IMPL"), threading.get_ident()
    for name in WIDENED:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _widening(operator, thread), "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


def _widening(operator: OpOverload, thread: int) -> Callable[..., object]:
    beneath = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def _widened(*args: object, **kwargs: object) -> object:
        with torch._C._ExcludeDispatchKeyGuard(beneath):
            here = threading.get_ident() == thread
            if here and not any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
                args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.dtype in _HALF else x, (args, kwargs))
            return operator(*args, **kwargs)

    return _widened


_GROUPS_ON_CPU = torch.__version__ >= "2.13"  # asked once: torch.compile traces no comparison of versions


def fused_attention(device: str) -> OpOverloadPacket:
    """Return the operator of fused attention on "cpu" or "cuda".

    Touches `torch.ops.aten._scaled_dot_product_flash_attention`, and `..._for_cpu` (torch 2.6 to 2.13; promised to
    nobody, so `kernels.fused` tries them before it trusts them). Without it the plain paths are taken.
    """
    name = "_scaled_dot_product_flash_attention"
    return getattr(torch.ops.aten, name if device == "cuda" else f"{name}_for_cpu")


def fused_attention_backward(device: str) -> OpOverloadPacket:
    """Return the operator of its gradient on "cpu" or "cuda".

    Touches `torch.ops.aten._scaled_dot_product_flash_attention_backward`, and `..._for_cpu_backward` (torch 2.6 to
    2.13). Without it the plain paths are taken.
    """
    name = "_scaled_dot_product_flash_attention"
    return getattr(torch.ops.aten, f"{name}_backward" if device == "cuda" else f"{name}_for_cpu_backward")


def cudnn_attention() -> OpOverloadPacket:
    """Return the operator of fused attention by cuDNN on a GPU.

    Touches `torch.ops.aten._scaled_dot_product_cudnn_attention` (torch 2.6 to 2.15; promised to nobody, so
    `kernels.fused` tries it before it trusts it). Without it the operator of `fused_attention` is taken, which takes
    twice as long on an H100.
    """
    return torch.ops.aten._scaled_dot_product_cudnn_attention


def attend_with_sums(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return flex_attention [B, H, Q, D], and the logarithm of each query's sum of exp(score) [B, H, Q].

    Touches `flex_attention`'s `return_aux` (torch 2.9 to 2.15), and `return_lse`, which was its name before (torch 2.6
    on). Without it two calls of flex_attention cannot be joined.
    """
    from torch.nn.attention import flex_attention

    if hasattr(flex_attention, "AuxRequest"):
        options["return_aux"] = flex_attention.AuxRequest(lse=True)
        out, auxiliary = flex_attention.flex_attention(query, key, value, **options)
        return out, auxiliary.lse
    return flex_attention.flex_attention(query, key, value, **options, return_lse=True)


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a function that torch.compile cannot make code for.

    Touches `torch._dynamo.exc.TorchDynamoException` (torch 2.6 to 2.15). Without it a kernel that one release of torch
    does not compile for one shape would end a training, and not only be slow.
    """
    from torch._dynamo import exc

    return (exc.TorchDynamoException,)


def many_kinds() -> AbstractContextManager[object]:
    """Return a context in which torch.compile makes code for up to 256 kinds of calls of a function.

    Touches `torch._dynamo.config.recompile_limit` (torch 2.7 to 2.15), and `cache_size_limit`, which was its name
    before. Without it the ninth kind of a bias, layout or length in a process runs as the function is written:
    flex_attention then holds all scores, with no more than a line in the log.
    """
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    return config.patch({name: 256})


def fused_takes_groups(device: str) -> bool:
    """Return whether both operators take fewer heads of keys and values than of queries on "cpu" or "cuda".

    Touches the operators above: on a CPU those of torch 2.13 and 2.15 do, those of 2.6 write beyond the gradients, and
    those between were not run, so they count as 2.6 does. The version tells, since trying it may end the process.
    Without it grouped heads break the memory.
    """
    return device == "cuda" or _GROUPS_ON_CPU


def efficient_attention() -> OpOverloadPacket:
    """Return the operator of memory-efficient attention on a GPU, for float32 and for masks.

    Touches `torch.ops.aten._scaled_dot_product_efficient_attention` (torch 2.6 to 2.13). Without it a dry run would
    hold scores that no GPU holds.
    """
    return torch.ops.aten._scaled_dot_product_efficient_attention


def is_exporting() -> bool | None:
    """Return whether the graph that is being traced will run without this package; None: unknown, before torch 2.7.

    Touches `torch.compiler._is_exporting_flag` (torch 2.7 to 2.15): in a graph of torch.compile `is_exporting()` is
    True for ever before torch 2.13. Without it such graphs would hold all scores there.
    """
    return getattr(torch.compiler, "_is_exporting_flag", None)


def uncaptured() -> dict[str, Any]:
    """Return what `torch.library.custom_op` takes for an operator that no CUDA graph may capture; empty: nothing.

    Touches `torch.Tag.cudagraph_unsafe` (torch 2.9 to 2.15), which torch.compile's mode "reduce-overhead" asks for.
    Without it that mode would fail while it captures an operator that reads numbers from the GPU.
    """
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    takes_tags = "tags" in inspect.signature(torch.library.custom_op).parameters
    return {"tags": (tag,)} if tag is not None and takes_tags else {}


@contextmanager
def with_autograd() -> Iterator[None]:
    """Let autograd record in the block, which runs in an operator's kernel: such run where it does not any more.

    Touches `torch._C._ForceDispatchKeyGuard` and the sets of dispatch keys that it takes (torch 2.6 to 2.15). Without
    it an operator could not take its gradients from autograd.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
