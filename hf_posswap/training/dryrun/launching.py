"""The launch of a dry run: what accelerate's file says, in one process that takes itself for the first of several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from yaml import YAMLError

from hf_posswap.compat.accelerate_launch import launch_arguments, launch_environment, no_launch
from hf_posswap.compat.torch_processes import can_be_fake, fake_processes
from hf_posswap.errors import ConfigError, OptionError, UnknownNameError, UnsupportedModelError
from hf_posswap.training.config.shipped import LAUNCHERS, shipped_recipes
from hf_posswap.utils.user_paths import expand_home

_FIRST = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
_NOT_DRY = {
    "use_deepspeed": "DeepSpeed, whose engine keeps weights and optimizer in memory of its own",
    "use_megatron_lm": "Megatron-LM",
    "tpu": "TPUs",
    "use_parallelism_config": "a sequence that several processes share (context parallelism, Ulysses)",
}


@contextmanager
def launched(file: Path | None, processes: int | None) -> Iterator[None]:
    """Let this process be, in the block, the first of those that accelerate launch would start.

    Args:
        file: of accelerate; None: processes that hold all weights each (DDP), or one alone.
        processes: how many; None: as the file says, 1 without a file.

    Raises:
        ConfigError: the file cannot be read, or asks for what a dry run cannot do: named.
        OptionError: `processes` is no number of processes, or this process is one of several already.
        UnsupportedModelError: there are several, and this torch cannot send what has no numbers.
    """
    if processes is not None and processes < 1:
        raise OptionError(f"--processes is a whole number of at least 1, got {processes}.")
    if dist.is_initialized() or "RANK" in os.environ:
        raise OptionError("a dry run takes one process, and this one was started by a launcher: call it by itself.")
    said = {} if file is None else _environment(file, processes)
    count = int(said.pop("count", processes or 1))
    if count > 1 and not can_be_fake():
        raise UnsupportedModelError(
            f"a dry run of {count} processes needs a torch whose processes can send tensors without numbers, as "
            f"torch 2.13 does; this is torch {torch.__version__}. Run it dry for one process, or with a newer torch."
        )
    several = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), **_FIRST} if count > 1 else {}
    with ExitStack() as stack:
        stack.enter_context(_environment_of(said | several))
        stack.enter_context(no_launch())
        if count > 1:
            stack.enter_context(fake_processes(count))
        yield


def count_and_sharding(file: Path | None, processes: int | None) -> tuple[int, bool]:
    """Return how many processes a launch has, and whether they share weights; arguments as of `launched`."""
    if file is None:
        return processes or 1, False
    arguments = launch_arguments(file, processes)
    return int(arguments.num_processes), bool(arguments.use_fsdp)


def launch_file(given: str) -> Path:
    """Return the file of accelerate that `given` means: a path, or one that comes with the package, by its name.

    Raises:
        UnknownNameError: there is neither.

    Example:
        >>> launch_file("fsdp2").name == launch_file("fsdp2.yaml").name == "fsdp2.yaml"
        True
    """
    path = expand_home(given)
    if path.is_file():
        return path
    known = {name: one.path for name, one in shipped_recipes().items() if name.startswith(f"{LAUNCHERS}/")}
    found = known.get(f"{LAUNCHERS}/{path.name.removesuffix('.yaml')}")
    if found is None:
        names = [name.removeprefix(f"{LAUNCHERS}/") for name in known]
        raise UnknownNameError("file of accelerate", given, [*names, "the path of a file"])
    return found


def _environment(file: Path, processes: int | None) -> dict[str, str]:
    try:
        arguments = launch_arguments(file, processes)
        count = int(arguments.num_processes or 0)
        refused = _refused(arguments)
        if refused is None:
            found = launch_environment(arguments)
    except (ValueError, OSError, KeyError, TypeError, AttributeError, YAMLError) as error:
        raise ConfigError(f"{file} is no file of accelerate that can be read: {error}") from error
    if refused is not None:
        raise ConfigError(
            f"{file} asks for {refused}: that cannot be dry-run. What can: one process, DDP and FSDP2 "
            "(posswap recipes accelerate/fsdp2)."
        )
    if count < 1:
        raise ConfigError(f"{file} starts {count} processes: give num_processes there, or --processes.")
    # how weights are loaded has no part in a step
    found |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"} if arguments.use_fsdp else {}
    return found | {"count": str(count)}


def _refused(arguments: Any) -> str | None:
    """Return what a launch asks for that cannot be run dry; None: nothing."""
    if arguments.mixed_precision == "fp8":
        return "float8, whose kernels torch has on a GPU alone"
    return next((why for name, why in _NOT_DRY.items() if getattr(arguments, name, False)), None)


@contextmanager
def _environment_of(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
