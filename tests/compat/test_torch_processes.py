"""A group of processes that are not there, and what FSDP2 holds whole on the first of two of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_posswap.compat import torch_processes
from hf_posswap.compat.torch_processes import fake_processes, gathered_weights, whole_gradients


def test_fake_processes() -> None:
    for count in (3, 2):
        with torch_processes.fake_processes(count):
            assert (dist.get_rank(), dist.get_world_size()) == (0, count)
            dist.all_reduce(torch.ones(2))  # waits for nobody
        assert not dist.is_initialized()


def test_can_be_fake() -> None:
    parts, whole = [[torch.ones(2, device="meta")] * 2], [torch.ones(2, device="meta")]
    with torch_processes.fake_processes(2):
        group = dist.group.WORLD
        assert group is not None
        gather = torch.ops.c10d.allgather_
        if torch_processes.can_be_fake():
            gather(parts, whole, group.boxed(), False)
        else:
            with pytest.raises(NotImplementedError, match="c10d::allgather_"):
                gather(parts, whole, group.boxed(), False)


def test_is_collective() -> None:
    assert torch_processes.is_collective(torch.ops.c10d.allreduce_.default)
    assert torch_processes.is_collective(torch.ops._c10d_functional.all_reduce.default)
    assert not torch_processes.is_collective(torch.ops.aten.add.Tensor)


needs_streams = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch (2.6) runs on no CPU"
)


def sharded() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return model


def run(model: nn.Sequential, *, sums: bool) -> None:
    model.set_requires_gradient_sync(not sums)  # type: ignore[operator]
    model(torch.ones(1, 4)).sum().backward()


@needs_streams
def test_gathered_weights() -> None:
    def sizes(held: list[Tensor]) -> list[int]:
        return [one.untyped_storage().nbytes() for one in held]

    with fake_processes(2):
        model = sharded()
        assert gathered_weights(model) == []
        during = []
        model[1].register_forward_pre_hook(lambda *_: during.append(sizes(gathered_weights(model))))
        run(model, sums=False)
        assert during == [[0, 4 * 24]]  # of the second layer, while it runs
        assert sizes(gathered_weights(model)) == [0, 0]


@needs_streams
def test_whole_gradients() -> None:
    with fake_processes(2):
        model = sharded()
        assert whole_gradients(model) == []
        run(model, sums=True)
        assert [gradient.shape for gradient in whole_gradients(model)] == [(6, 4), (4, 6)]
        run(model, sums=False)
        assert whole_gradients(model) == []
