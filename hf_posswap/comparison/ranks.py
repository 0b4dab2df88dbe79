"""The processes of a distributed launch, such as `accelerate launch`: they share the units and their results."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from hf_posswap.compat.accelerate_state import is_connected
from hf_posswap.errors import MissingDependencyError, PosswapError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_PATIENCE = timedelta(days=7)  # units may take long, and a launcher ends all processes when one dies


@dataclass(frozen=True)
class Ranks:
    """This process among the processes of a launch.

    Attributes:
        index: index of this process; only process 0, the main one, writes results and shows progress.
        count: number of processes.
        device: the device that the launch assigns to this process; None without a launch.
    """

    index: int = 0
    count: int = 1
    device: torch.device | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes results and shows progress."""
        return self.index == 0

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every process, by index. All processes must call it."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        return gather_object([value])

    def agree(self, action: Callable[[], T]) -> T:
        """Run `action` in every process and return this process's result. All processes must call it.

        Raises:
            PosswapError: the error of the first process that fails is raised in all, so that none waits for it.
            Exception: any other error, such as a lack of memory: in the others as a PosswapError that names it.
        """
        if self.count == 1:
            return action()
        results, error, message = [], None, None
        try:
            results.append(action())
        except Exception as raised:
            error = raised
            message = (
                raised
                if isinstance(raised, PosswapError)
                else PosswapError(f"process {self.index} failed: {type(raised).__name__}: {raised}")
            )
        first = next((raised for raised in self.gather(message) if raised is not None), None)
        if error is not None and not isinstance(error, PosswapError):
            raise error
        if first is not None:
            raise first
        return results[0]


def open_ranks(*, alone: bool = False) -> Ranks:
    """Return this process's `Ranks`; the first call connects the processes of the launch.

    Args:
        alone: whether this process works alone, even in a launch of several processes.

    Raises:
        MissingDependencyError: there are several processes, and accelerate is not installed.

    Example:
        >>> open_ranks().count
        1
    """
    if alone or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Ranks()
    import torch

    try:
        from accelerate import PartialState
    except ImportError as error:
        raise MissingDependencyError("accelerate", "train") from error
    connects = not is_connected()
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type == "mps":  # none that several processes can use
        on_cpu = True
    state = PartialState(cpu=on_cpu, timeout=_PATIENCE)  # keeps an existing connection
    if connects:
        atexit.register(state.destroy_process_group)
    return Ranks(state.process_index, state.num_processes, state.device)


def is_main_process() -> bool:
    """Return whether this is the main process of its launch, or there is no launch.

    Example:
        >>> is_main_process()
        True
    """
    return os.environ.get("RANK", "0") == "0"
