"""accelerate's shared state as compat reads and writes it, each in a process of its own."""

from __future__ import annotations

from tests import forked


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
