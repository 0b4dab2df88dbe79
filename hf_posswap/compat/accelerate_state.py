"""What accelerate keeps to itself: its hooks on modules, how it launches processes, the state that a process shares.

The hooks, private attributes of modules, keep weights elsewhere. All are of `accelerate.hooks.add_hook_to_module`,
alike in accelerate 1.12 to 1.15.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from argparse import Namespace

    from accelerate.hooks import AlignDevicesHook, ModelHook
    from accelerate.utils import FullyShardedDataParallelPlugin


def hook_of(module: nn.Module) -> ModelHook | None:
    """Return accelerate's hook of `module`, or None.

    Touches `module._hf_hook`. Without it offloaded weights are taken for weights on meta.
    """
    return vars(module).get("_hf_hook")


def set_hook(module: nn.Module, hook: ModelHook) -> None:
    """Replace accelerate's hook on `module`; the module's forward calls the new one.

    Touches `module._hf_hook`. Without it a table that was brought into memory would be taken away by the next forward.
    """
    module._hf_hook = hook


def offloading_hooks(module: nn.Module) -> Iterator[AlignDevicesHook]:
    """Yield accelerate's hooks of `module` that keep its own tensors elsewhere.

    Touches `hooks` of a `SequentialHook`, `offload` and `weights_map` of an `AlignDevicesHook`. Without it weights that
    lie elsewhere are not found.
    """
    hook = hook_of(module)
    for each in () if hook is None else getattr(hook, "hooks", (hook,)):
        if getattr(each, "offload", False) and each.weights_map is not None:
            yield each


def without_offload(hook: ModelHook) -> ModelHook:
    """Return a hook that moves inputs as `hook` does, and no weights.

    Touches the same as `offloading_hooks`. Without it a table that was brought into memory would not stay there.
    """
    resting = copy.copy(hook)
    if hasattr(hook, "hooks"):
        resting.hooks = tuple(map(without_offload, hook.hooks))
    else:
        resting.offload = False
    return resting


def rebind_wrapped_forward(module: nn.Module) -> None:
    """Have the hook of a `module` whose class was exchanged run the forward of the new class.

    Touches `module._old_forward`, the bound method that the hook wraps. Without it a module with a hook computes what
    its old class computes.
    """
    if "_old_forward" in vars(module):
        module._old_forward = type(module).forward.__get__(module)


def take_out_of_autocast(module: nn.Module) -> None:
    """Give `module` the forward that it had before `Accelerator.prepare` put one with autocast in its place, if it did.

    Touches `_original_forward` of a prepared model (accelerate 1.12 to 1.15). Without it a model that a Trainer trains
    in mixed precision would be probed in that precision, whose noise hides and fakes effects of positions.
    """
    if (original := vars(module).pop("_original_forward", None)) is not None:
        vars(module)["forward"] = original


def launch_arguments(file: Path, processes: int | None) -> Namespace:
    """Return the arguments of `accelerate launch --config_file FILE`, its defaults filled in.

    Touches `accelerate.commands.launch._validate_launch_command` (accelerate 1.12 to 1.15), which reads the file.
    Without it a configuration would be read otherwise here than by the launcher.

    Args:
        file: as accelerate config writes it.
        processes: --num_processes; None: as the file says.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    options = [] if processes is None else ["--num_processes", str(processes)]
    given = launch_command_parser().parse_args(["--config_file", str(file), *options, "nothing.py"])
    arguments, _, _ = _validate_launch_command(given)
    return arguments


def launch_environment(arguments: Namespace) -> dict[str, str]:
    """Return what accelerate launch would set in the environment of its processes.

    Touches `accelerate.utils.launch` (accelerate 1.12 to 1.15), which no page documents. Without it sharding and mixed
    precision would be set up otherwise than by the launcher.
    """
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    if arguments.use_deepspeed:
        arguments.main_process_port = 0  # any: nobody listens
        arguments.deepspeed_fields_from_accelerate_config = ""  # which the launcher fills in when it starts
        _, environment = prepare_deepspeed_cmd_env(arguments)
    elif arguments.use_fsdp or arguments.multi_gpu:
        arguments.main_process_port = 0
        environment = prepare_multi_gpu_env(arguments)
    else:
        _, environment = prepare_simple_launcher_cmd_env(arguments)
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


@contextmanager
def no_launch() -> Iterator[None]:
    """Clear accelerate's state about this process and the others inside the block; restore it afterwards.

    Touches `_shared_state` of `AcceleratorState`, `PartialState` and `GradientState` (accelerate 1.12 to 1.15). Without
    it a second launch in one process would be the first one again.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    states = [state_class._shared_state for state_class in (AcceleratorState, PartialState, GradientState)]
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state.clear()
            state.update(values)


def is_connected() -> bool:
    """Return whether accelerate has connected this process with those of its launch.

    Touches `accelerate.state.is_initialized` (accelerate 1.12 to 1.15), which no page documents. Without it a launch
    that somebody else connected would be disconnected at the end.
    """
    from accelerate.state import is_initialized

    return bool(is_initialized())


def shard_by_fsdp(plugin: FullyShardedDataParallelPlugin) -> None:
    """Tell all parts of accelerate in this process that weights are sharded, as the FSDP `plugin` says.

    Touches `AcceleratorState._shared_state` and `PartialState._shared_state` (accelerate 1.12 to 1.15); the one is
    filled up from the other. Without it FSDP2 on CPUs is silently DDP.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
