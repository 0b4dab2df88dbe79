"""The state that accelerate shares between all parts of a process."""

from __future__ import annotations

from typing import Any


def is_connected() -> bool:
    """Return whether accelerate has connected this process with those of its launch.

    Touches `accelerate.state.is_initialized` (accelerate 1.12 to 1.15), which no page documents. Without it a launch
    that somebody else connected would be disconnected at the end.
    """
    from accelerate.state import is_initialized

    return bool(is_initialized())


def shard_by_fsdp(plugin: Any) -> None:
    """Tell all parts of accelerate in this process that weights are sharded, as the FSDP `plugin` says.

    Touches `AcceleratorState._shared_state` and `PartialState._shared_state` (accelerate 1.12 to 1.15); the one is
    filled up from the other. Without it FSDP2 on CPUs is silently DDP.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
