"""In two processes, under DDP and FSDP2, losses in chunks give the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_posswap import patch_model
from hf_posswap.training.chunked_loss import causal_loss
from hf_posswap.training.distill import DistillSettings, distillation_loss, make_teacher
from hf_posswap.training.longce import LongCESettings, longce_loss
from tests.training.tiny_models import VOCABULARY, WINDOW, tiny

ROWS, LENGTH = 4, 40
Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def model_and_losses() -> tuple[Any, dict[str, Loss]]:
    model = tiny("gpt2")
    patch_model(model, "kerple", max_length=2 * WINDOW)
    teacher = make_teacher(model)
    how: dict[str, Any] = {"window": WINDOW, "chunk": 7}
    return model, {
        "causal": lambda wrapped, part: causal_loss(wrapped, part, chunk=7),
        "distill": lambda wrapped, part: distillation_loss(wrapped, teacher, part, DistillSettings(), **how),
        "relations": lambda wrapped, part: distillation_loss(
            wrapped, teacher, part, DistillSettings(relations=1.0), **how
        ),
        "longce": lambda wrapped, part: longce_loss(wrapped, part, LongCESettings(context=8), chunk=7),
    }


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for name, g in found.items()}


def in_a_process(rank: int, meeting: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    half = ROWS // 2
    part = {name: value[rank * half : (rank + 1) * half] for name, value in batch().items()}
    found = {}
    for name in model_and_losses()[1]:
        for wrapper, wrap in (("ddp", DistributedDataParallel), ("fsdp2", sharded)):
            model, losses = model_and_losses()
            wrapped = wrap(model)  # DDP averages gradients for as long as it is there
            losses[name](wrapped, part).backward()
            found[f"{name} {wrapper}"] = gradients(model)
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_give_the_gradients_of_one(tmp_path: Path) -> None:
    places = (str(tmp_path / "meeting"), str(tmp_path / "found.pt"))
    torch.multiprocessing.start_processes(in_a_process, places, nprocs=2, start_method="fork")
    found = torch.load(tmp_path / "found.pt")
    kinds = ("causal", "distill", "relations", "longce")
    assert set(found) == {f"{kind} {wrapper}" for kind in kinds for wrapper in ("ddp", "fsdp2")}
    for name, theirs in found.items():
        model, losses = model_and_losses()
        losses[name.split()[0]](model, batch()).backward()
        expected = gradients(model)
        assert theirs.keys() == expected.keys()
        for parameter, gradient in expected.items():
            torch.testing.assert_close(theirs[parameter], gradient, atol=1e-6, rtol=1e-4, msg=f"{name}: {parameter}")
