"""Launches a dry run by accelerate's file, in one process that acts as the first of several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from yaml import YAMLError

from hf_posswap.compat.accelerate_state import launch_arguments, launch_environment, no_launch
from hf_posswap.compat.torch_processes import can_be_fake, fake_processes
from hf_posswap.errors import ConfigError, OptionError, UnknownNameError, UnsupportedModelError
from hf_posswap.training.config.shipped import LAUNCHERS, shipped_recipes
from hf_posswap.utils.user_paths import expand_home

_FIRST = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
_NOT_DRY = {
    "use_deepspeed": "DeepSpeed, whose engine manages the memory of weights and optimizer",
    "use_megatron_lm": "Megatron-LM",
    "tpu": "TPUs",
    "use_parallelism_config": "sequence parallelism (context parallelism, Ulysses)",
}


@contextmanager
def launched(file: Path | None, processes: int | None) -> Iterator[None]:
    """Make this process act, within the block, as the first of those that accelerate launch would start.

    Args:
        file: of accelerate; None: DDP, or a single process.
        processes: number of processes; None: the file's, or 1 without a file.

    Raises:
        ConfigError: the file cannot be read, or asks for something that a dry run does not support.
        OptionError: `processes` is below 1, or a launcher started this process.
        UnsupportedModelError: there are several processes, and this torch cannot communicate fake tensors.
    """
    if processes is not None and processes < 1:
        raise OptionError(f"--processes is a whole number of at least 1, got {processes}.")
    if dist.is_initialized() or "RANK" in os.environ:
        raise OptionError("a dry run takes one process, and a launcher started this one: call it without a launcher.")
    environment = {} if file is None else _launch_environment(file, processes)
    count = int(environment.pop("count", processes or 1))
    if count > 1 and not can_be_fake():
        raise UnsupportedModelError(
            f"a dry run of {count} processes needs a torch that can communicate fake tensors, as torch 2.13 can; this "
            f"is torch {torch.__version__}. Dry-run one process, or use a newer torch."
        )
    first_rank = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), **_FIRST} if count > 1 else {}
    with ExitStack() as stack:
        stack.enter_context(_set_environment(environment | first_rank))
        stack.enter_context(no_launch())
        if count > 1:
            stack.enter_context(fake_processes(count))
        yield


def count_and_sharding(file: Path | None, processes: int | None) -> tuple[int, bool]:
    """Return the number of processes of a launch, and whether they shard weights; arguments as in `launched`."""
    if file is None:
        return processes or 1, False
    arguments = launch_arguments(file, processes)
    return int(arguments.num_processes), bool(arguments.use_fsdp)


def launch_file(given: str) -> Path:
    """Return the accelerate file that `given` names: a path, or a file of the package by name.

    Raises:
        UnknownNameError: there is no such file.

    Example:
        >>> launch_file("fsdp2").name == launch_file("fsdp2.yaml").name == "fsdp2.yaml"
        True
    """
    path = expand_home(given)
    if path.is_file():
        return path
    known = {name: recipe.path for name, recipe in shipped_recipes().items() if name.startswith(f"{LAUNCHERS}/")}
    known_path = known.get(f"{LAUNCHERS}/{path.name.removesuffix('.yaml')}")
    if known_path is None:
        names = [name.removeprefix(f"{LAUNCHERS}/") for name in known]
        raise UnknownNameError("file of accelerate", given, [*names, "the path of a file"])
    return known_path


def _launch_environment(file: Path, processes: int | None) -> dict[str, str]:
    try:
        arguments = launch_arguments(file, processes)
        count = int(arguments.num_processes or 0)
        unsupported = next((why for name, why in _NOT_DRY.items() if getattr(arguments, name, False)), None)
        if arguments.mixed_precision == "fp8":
            unsupported = "float8, whose kernels torch has only on a GPU"
        if unsupported is None:
            environment = launch_environment(arguments)
    except (ValueError, OSError, KeyError, TypeError, AttributeError, YAMLError) as error:
        raise ConfigError(f"{file} is not a readable accelerate file: {error}") from error
    if unsupported is not None:
        raise ConfigError(
            f"{file} asks for {unsupported}, which a dry run does not support. It supports one process, DDP and FSDP2 "
            "(posswap recipes accelerate/fsdp2)."
        )
    if count < 1:
        raise ConfigError(f"{file} starts {count} processes: give num_processes there, or --processes.")
    # how weights are loaded does not affect a step
    environment |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"} if arguments.use_fsdp else {}
    return environment | {"count": str(count)}


@contextmanager
def _set_environment(changes: dict[str, str]) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
