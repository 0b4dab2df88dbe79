"""What accelerate keeps to itself, of the accelerate that is installed: hooks, a launch, the state of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import hooks
from torch import nn

from hf_posswap.compat import accelerate_state
from hf_posswap.compat.accelerate_state import is_connected
from hf_posswap.patching.verify.verify_swap import copy_sharing_weights
from tests import forked
from tests.training.tiny_models import tiny


@pytest.fixture
def offloaded() -> Any:
    """Return a linear layer whose weights accelerate keeps on the CPU, and brings for a forward."""
    return accelerate.cpu_offload(nn.Sequential(nn.Linear(2, 2)), torch.device("cpu"), offload_buffers=True)[0]


def test_hook_of(offloaded: nn.Module) -> None:
    assert isinstance(accelerate_state.hook_of(offloaded), hooks.ModelHook)
    assert accelerate_state.hook_of(nn.Linear(2, 2)) is None


def test_set_hook(offloaded: nn.Module) -> None:
    class Counting(hooks.ModelHook):
        count = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return args, kwargs

    counting = Counting()
    before = accelerate_state.hook_of(offloaded)
    accelerate_state.set_hook(offloaded, counting)
    offloaded(torch.ones(1, 2, device="meta"))
    accelerate_state.set_hook(offloaded, before)
    offloaded(torch.ones(1, 2))
    assert counting.count == 1


def test_offloading_hooks(offloaded: Any) -> None:
    (hook,) = accelerate_state.offloading_hooks(offloaded)
    assert offloaded.weight.is_meta
    assert hook.weights_map["weight"].shape == (2, 2)
    assert hook.execution_device == torch.device("cpu")
    assert hook.tied_params_map is None or isinstance(hook.tied_params_map, dict)
    assert list(accelerate_state.offloading_hooks(nn.Linear(2, 2))) == []


def test_offloading_hooks_in_a_sequence(offloaded: Any) -> None:
    hooks.add_hook_to_module(offloaded, hooks.ModelHook(), append=True)
    assert isinstance(accelerate_state.hook_of(offloaded), hooks.SequentialHook)
    assert len(list(accelerate_state.offloading_hooks(offloaded))) == 1


@pytest.mark.parametrize("several", [False, True])
def test_without_offload(offloaded: Any, several: bool) -> None:
    if several:
        hooks.add_hook_to_module(offloaded, hooks.ModelHook(), append=True)
    expected = offloaded(torch.ones(1, 2))
    (hook,) = accelerate_state.offloading_hooks(offloaded)
    for name in ("weight", "bias"):
        setattr(offloaded, name, nn.Parameter(hook.weights_map[name].clone()))
    accelerate_state.set_hook(offloaded, accelerate_state.without_offload(accelerate_state.hook_of(offloaded)))
    assert list(accelerate_state.offloading_hooks(offloaded)) == []
    assert torch.equal(offloaded(torch.ones(1, 2)), expected)
    assert not offloaded.weight.is_meta  # it stays where it was put


def test_rebind_wrapped_forward(offloaded: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    expected = 2 * offloaded(torch.ones(1, 2))
    offloaded.__class__ = Doubled
    accelerate_state.rebind_wrapped_forward(offloaded)
    assert torch.equal(offloaded(torch.ones(1, 2)), expected)
    accelerate_state.rebind_wrapped_forward(nn.Linear(2, 2))  # without a hook there is nothing to do


def test_take_out_of_autocast() -> None:
    model, ids = tiny("llama"), torch.arange(8)[None]
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # an earlier one refuses another precision
    with torch.no_grad():
        before = model(ids).logits
        prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
        assert not torch.equal(prepared(ids).logits, before)
        assert torch.equal(copy_sharing_weights(model)(ids).logits, before)
        assert not torch.equal(prepared(ids).logits, before)
        accelerate_state.take_out_of_autocast(model)
        assert torch.equal(model(ids).logits, before)


FILES = Path(__file__).resolve().parents[2] / "recipes" / "accelerate"


def test_launch_arguments() -> None:
    arguments = accelerate_state.launch_arguments(FILES / "fsdp2.yaml", None)
    assert (arguments.use_fsdp, arguments.num_processes, arguments.mixed_precision) == (True, 8, "bf16")
    assert accelerate_state.launch_arguments(FILES / "ddp.yaml", 3).num_processes == 3
    assert accelerate_state.launch_arguments(FILES / "deepspeed-zero3.yaml", None).use_deepspeed


@pytest.mark.slow
def test_launch_environment(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    file = FILES / "cpu.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = accelerate_state.launch_environment(accelerate_state.launch_arguments(file, None))
    assert {name for name in told if f'"{name}": "{told[name]}"' not in done.stdout} == set()
    sharded = accelerate_state.launch_environment(accelerate_state.launch_arguments(FILES / "fsdp2.yaml", 2))
    assert (sharded["ACCELERATE_USE_FSDP"], sharded["FSDP_VERSION"]) == ("true", "2")


def test_no_launch() -> None:
    from accelerate import Accelerator

    known = Accelerator(cpu=True)
    with accelerate_state.no_launch():
        assert not is_connected()
        assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"
    assert is_connected()
    assert (known.mixed_precision, Accelerator().mixed_precision) == ("no", "no")


def run(code: str) -> None:
    process = forked.start(lambda: forked.afresh(lambda: exec(code, {})))
    process.join()
    assert process.exitcode == 0


def test_is_connected() -> None:
    run(
        "from accelerate import Accelerator\n"
        "from hf_posswap.compat.accelerate_state import is_connected\n"
        "assert not is_connected()\n"
        "Accelerator(cpu=True)\n"
        "assert is_connected()\n"
    )


def test_shard_by_fsdp() -> None:
    run(
        "from accelerate import Accelerator, PartialState\n"
        "from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin\n"
        "from hf_posswap.compat.accelerate_state import shard_by_fsdp\n"
        "accelerator = Accelerator(cpu=True)\n"
        "assert accelerator.distributed_type == DistributedType.NO\n"
        "plugin = FullyShardedDataParallelPlugin(fsdp_version=2)\n"
        "shard_by_fsdp(plugin)\n"
        "assert accelerator.distributed_type == PartialState().distributed_type == DistributedType.FSDP\n"
        "assert accelerator.state.fsdp_plugin is plugin\n"
        "assert accelerator.is_fsdp2\n"
    )
