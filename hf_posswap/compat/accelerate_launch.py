"""What accelerate launch would tell the processes that it starts, without starting any."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def launch_arguments(file: Path, processes: int | None) -> Any:
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


def launch_environment(arguments: Any) -> dict[str, str]:
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
