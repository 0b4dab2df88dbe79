"""The processes of one launch, such as `accelerate launch` starts: they share the units and agree on what was found."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from hf_posswap.compat.accelerate_state import is_connected
from hf_posswap.errors import MissingDependencyError, PosswapError

T = TypeVar("T")
_PATIENCE = timedelta(days=7)  # units take as long as they take; a launcher ends all when one process dies


@dataclass(frozen=True)
class Ranks:
    """This process among those that measure together.

    Attributes:
        index: of this process; 0 is the main one, which alone writes results and shows progress.
        count: of processes.
        device: that the launch gives this process; None: there is no launch.
    """

    index: int = 0
    count: int = 1
    device: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes results and shows progress."""
        return self.index == 0

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every process, in their order. All of them must call it."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        return gather_object([value])

    def agree(self, action: Callable[[], T]) -> T:
        """Return what `action` gives in this process. All of them must call it.

        Raises:
            PosswapError: that of the first process in which there is one, in all of them: so that none waits for it.
        """
        if self.count == 1:
            return action()
        found, error = [], None
        try:
            found.append(action())
        except PosswapError as raised:
            error = raised
        first = next((raised for raised in self.gather(error) if raised is not None), None)
        if first is not None:
            raise first
        return found[0]


def open_ranks(*, alone: bool = False) -> Ranks:
    """Return this process among those of its launch; the first call connects them.

    Args:
        alone: whether this process works by itself, although others were started with it.

    Raises:
        MissingDependencyError: there are several processes, and accelerate is not installed.

    Example:
        >>> open_ranks().count
        1
    """
    if alone or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Ranks()
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise MissingDependencyError("accelerate", "train") from error
    made = not is_connected()
    state = PartialState(cpu=_on_cpu(), timeout=_PATIENCE)  # a launch that is connected already stays as it is
    if made:
        atexit.register(state.destroy_process_group)
    return Ranks(state.process_index, state.num_processes, state.device)


def is_main_process() -> bool:
    """Return whether this process is the one of its launch that speaks: true where there is no launch.

    Example:
        >>> is_main_process()
        True
    """
    return os.environ.get("RANK", "0") == "0"


def _on_cpu() -> bool:
    """Return whether the launch asks for the CPU, or there is nothing else that processes can share work on."""
    import torch

    asked = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return asked or kind is None or kind.type == "mps"
