"""What FSDP2 holds whole, on the first of two processes of which the other is not there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_posswap.compat.torch_fsdp import gathered_weights, whole_gradients
from hf_posswap.compat.torch_processes import fake_processes

pytestmark = pytest.mark.skipif(
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


def test_whole_gradients() -> None:
    with fake_processes(2):
        model = sharded()
        assert whole_gradients(model) == []
        run(model, sums=True)
        assert [gradient.shape for gradient in whole_gradients(model)] == [(6, 4), (4, 6)]
        run(model, sums=False)
        assert whole_gradients(model) == []
