"""What compat asks of torch's modules and of real wrappers around them, of the torch that is installed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune

from hf_posswap.compat import torch_modules


class Doubled(nn.Linear):
    """A linear layer, twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_parameters_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta")))

    monkeypatch.setattr(nn.Module, "register_parameter", register_on_meta)
    with torch_modules.parameters_as_given():
        assert nn.Linear(2, 2).weight.device.type == "cpu"
        with torch_modules.parameters_as_given():
            assert nn.Linear(2, 2).weight.device.type == "cpu"
        assert built_in_a_thread().device.type == "meta"
    assert nn.Module.register_parameter is register_on_meta
    assert nn.Linear(2, 2).weight.device.type == "meta"


def built_in_a_thread() -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: nn.Linear(2, 2).weight).result()


def test_parameters_as_given_leaves_what_others_put_back_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    register = nn.Module.register_parameter
    monkeypatch.setattr(nn.Module, "register_parameter", lambda *given: register(*given))
    with torch_modules.parameters_as_given():
        saved = nn.Module.register_parameter  # another thread's init_empty_weights begins,
        nn.Module.register_parameter = register  # and the first one ends
    assert nn.Module.register_parameter is register
    monkeypatch.setattr(nn.Module, "register_parameter", saved)
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_copy_module() -> None:
    """A forward put on an instance runs the copy there, and leaves the original alone."""
    model = Doubled(2, 2)
    original = model.forward
    model.forward = lambda x: original(x) + 1  # type: ignore[method-assign]
    shared = torch_modules.copy_module(model, {id(weight): weight for weight in model.parameters()})
    apart = torch_modules.copy_module(model)
    x = torch.ones(1, 2)
    assert torch.equal(shared(x), model(x))
    assert shared.weight is model.weight
    before = model(x)
    with torch.no_grad():
        apart.weight.zero_()
        apart.bias.zero_()
    assert torch.equal(apart(x), torch.ones(1, 2))
    assert torch.equal(model(x), before)


def test_pre_hooks() -> None:
    module, order = nn.Linear(2, 2), []
    hooks = [lambda *_: order.append("first"), lambda *_: order.append("second")]
    handles = [module.register_forward_pre_hook(hook) for hook in hooks]
    assert torch_modules.pre_hooks(module) == hooks
    module(torch.ones(1, 2))
    assert order == ["first", "second"]
    handles[0].remove()
    assert torch_modules.pre_hooks(module) == hooks[1:]


def test_foreign_code(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Doubled(2, 2))
    prune.l1_unstructured(module[0], "weight", amount=1)
    assert torch_modules.foreign_code(module) == []
    hook = functools.partial(print)
    for register in (module[1].register_forward_hook, module[0].register_forward_pre_hook):
        with register(hook):
            assert torch_modules.foreign_code(module) == [hook]
    forward = nn.Linear.forward
    for mine in (functools.wraps(forward)(lambda self, x: x), torch.no_grad()(lambda self, x: x)):
        monkeypatch.setattr(nn.Linear, "forward", mine)
        assert torch_modules.foreign_code(module) == [mine]
    monkeypatch.undo()
    assert torch_modules.foreign_code(module) == []


def test_give_class() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    weight, plain = module.weight, module(x)
    torch_modules.give_class(module, Doubled)
    assert torch.equal(module(x), 2 * plain)
    assert module.weight is weight
    torch_modules.give_class(module, nn.Linear)
    assert torch.equal(module(x), plain)


def test_give_class_to_a_module_with_a_hook_of_accelerate() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    plain = module(x)
    hooks.add_hook_to_module(module, hooks.ModelHook())
    torch_modules.give_class(module, Doubled)
    assert torch.equal(module(x), 2 * plain)


def test_give_class_leaves_a_forward_of_the_instance_that_a_hook_wraps() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Renamed(nn.Linear):
        """A linear layer."""

    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    plain, forward = module(x), module.forward
    module.forward = lambda *given: 3 * forward(*given)  # type: ignore[method-assign]
    hooks.add_hook_to_module(module, hooks.ModelHook())
    torch_modules.give_class(module, Renamed)
    assert torch.equal(module(x), 3 * plain)


def test_computes() -> None:
    module, seen = nn.Linear(2, 2), set()

    def watch(*_: Any) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_locals.get("self") is module:
                seen.add(frame.f_code.co_name)
            frame = frame.f_back

    module.register_forward_hook(watch)  # it runs behind the forward, inside the call
    module(torch.ones(1, 2))
    called = {name for name in seen if torch_modules.computes(name)}
    assert called == {"_call_impl", "_wrapped_call_impl"}
    assert torch_modules.computes("forward")
    assert not any(map(torch_modules.computes, ("load_state_dict", "train", "apply")))


class Counted(torch_modules.TensorHooks):
    """Counts its conversions, and writes twice its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dtypes = nn.Parameter(torch.ones(2)), [torch.float32]

    def convert_tensors(self, convert: Callable[[], Any]) -> None:
        super().convert_tensors(convert)
        self.dtypes.append(self.weight.dtype)

    def write_state(self, state: Any, prefix: str) -> None:
        state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]


def test_convert_tensors() -> None:
    module = Counted()
    outer = nn.Sequential(module)
    assert outer.half() is outer
    assert module.to(torch.float64) is module
    outer.to_empty(device="cpu")
    assert module.dtypes == [torch.float32, torch.float16, torch.float64, torch.float64]


def test_write_state() -> None:
    module = Counted()
    assert torch.equal(nn.Sequential(module).state_dict()["0.weight"], 2 * module.weight)
    assert torch.equal(module.weight, torch.ones(2))


def test_write_state_of_a_module_that_changes_nothing() -> None:
    class Plain(torch_modules.TensorHooks, nn.Linear):
        """A linear layer."""

    module = Plain(2, 2)
    state = module.state_dict()
    assert all(torch.equal(state[name], held) for name, held in module.named_parameters())
    assert module.double().weight.dtype == torch.float64


def test_state_metadata() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    metadata = torch_modules.state_metadata(state)
    assert set(metadata) == {"", "0"}
    metadata["0"] = {"version": 1}  # which has no num_batches_tracked
    del state["0.num_batches_tracked"]
    assert nn.Sequential(nn.BatchNorm1d(2)).load_state_dict(state).missing_keys == []
    metadata["0"] = {"version": 2}
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        nn.Sequential(nn.BatchNorm1d(2)).load_state_dict(state)


def test_state_metadata_of_a_plain_dict() -> None:
    assert torch_modules.state_metadata({"weight": torch.ones(1)}) == {}


class Restless(nn.Module):
    """A module whose forward replaces and writes into buffers, and leaves attributes and hooks behind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.replaced, self.written = nn.Buffer(torch.ones(2)), nn.Buffer(torch.full((2,), torch.nan))
        self.plain, self.lengths, self.known = torch.zeros(2), [1], {"a": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("replaced", self.replaced + 1, persistent=False)
        self.register_buffer("added", self.replaced)
        self.written.fill_(3.0)
        self.plain += 1
        self.lengths.append(2)
        self.known["b"] = 2
        self.new = x
        self.linear.register_forward_pre_hook(lambda *_: None)
        return self.linear(x) + torch.rand(2)


def test_unchanged() -> None:
    model = nn.Sequential(Restless(), nn.Dropout()).train()
    model[0].eval()
    model[0].linear.weight.requires_grad_(False)
    first, replaced, buffers = model[0], model[0].replaced, vars(model[0])["_buffers"]
    names = set(vars(first))

    def run_and_raise() -> None:
        with torch_modules.unchanged(model):
            model.eval()(torch.ones(1, 2))
            model.requires_grad_(True)
            raise ValueError("after the forward")

    with pytest.raises(ValueError, match="after the forward"):
        run_and_raise()
    assert (first.training, first.linear.training, model[1].training, model.training) == (False, False, True, True)
    assert (first.linear.weight.requires_grad, first.linear.bias.requires_grad) == (False, True)
    assert set(vars(first)) == names
    assert (first.replaced is replaced, vars(first)["_buffers"] is buffers) == (True, True)
    assert torch.equal(replaced, torch.ones(2))
    assert first.written.isnan().all()
    assert torch.equal(first.plain, torch.zeros(2))
    assert (first.lengths, first.known) == ([1], {"a": 1})
    assert list(model.state_dict()) == ["0.replaced", "0.written", "0.linear.weight", "0.linear.bias"]
    assert torch_modules.pre_hooks(first.linear) == []


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_compiled_original() -> None:
    module = nn.Linear(2, 2)
    assert torch_modules.compiled_original(torch.compile(module, backend="eager")) is module
    assert torch_modules.compiled_original(module) is None
    assert torch_modules.compiled_original("no module") is None


def test_kind_of_wrapper() -> None:
    module = nn.Linear(2, 2)
    assert torch_modules.kind_of_wrapper(module) is None
    assert torch_modules.kind_of_wrapper(torch.compile(module, backend="eager")) == "torch.compile's wrapper"
    assert torch_modules.kind_of_wrapper(checkpoint_wrapper(module)) == "a wrapper for activation checkpointing"


def test_kind_of_wrapper_of_fsdp(process_group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
    assert torch_modules.kind_of_wrapper(wrapped) == "FSDP's wrapper"


def test_name_without_wrappers(process_group: None) -> None:
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    names = [name for name, _ in nn.Sequential(nn.Linear(2, 2)).named_parameters()]
    for wrapped in (inner, torch.compile(inner, backend="eager"), nn.parallel.DistributedDataParallel(inner)):
        assert [torch_modules.name_without_wrappers(name) for name, _ in wrapped.named_parameters()] == names
