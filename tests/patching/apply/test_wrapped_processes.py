"""Wrappers for several processes: refused before a swap, and around a swapped model they give one process's numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_posswap import patch_model, unpatch_model
from hf_posswap.errors import UnsupportedSwapError
from tests.contract.models import build
from tests.contract.pairs import gap, words

PROCESSES = 2
IDS = words(2 * PROCESSES, 24)
CASES = [("gpt2", "alibi"), ("gpt2", "learned"), ("llama", "yarn"), ("llama", "fire")]


def swapped(name: str, scheme: str) -> Any:
    torch.manual_seed(3)  # a scheme may begin with random numbers
    model = build(name)
    patch_model(model, scheme, max_length=64)
    return model


def ddp(model: nn.Module) -> Any:
    # what a swap puts out of use gets no gradient
    return DistributedDataParallel(model, find_unused_parameters=True)


def sharded(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for path, block in model.named_modules():
        if re.fullmatch(r"(transformer\.h|model\.layers)\.\d+", path):
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def flat(model: nn.Module) -> Any:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {"ddp": ddp, "fsdp2": sharded, "fsdp1": flat}


def step(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of `ids`, and once more after one step of training on them."""
    before = model(input_ids=ids).logits.detach()
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05).step()
    return before, model(input_ids=ids).logits.detach()


def refusal(model: Any, *, undo: bool = False) -> str:
    try:
        unpatch_model(model) if undo else patch_model(model, "alibi")
    except UnsupportedSwapError as error:
        return str(error)
    return "not refused"


def one_process(rank: int, folder: Path) -> None:
    """Run as one of the processes: every wrapper around every swapped model."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "USE_LIBUV": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=PROCESSES)
    mine = IDS[2 * rank : 2 * rank + 2]
    found: dict[str, Any] = {}
    for kind, wrap in WRAPPERS.items():
        found[f"{kind}, not swapped"] = refusal(wrap(build("gpt2")))
        for name, scheme in CASES:
            model = wrap(swapped(name, scheme))
            found[f"{kind} {name} {scheme}"] = step(model, mine)
            found[f"{kind} {name} {scheme}, undone"] = refusal(model, undo=True)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    mp.start_processes(one_process, args=(folder,), nprocs=PROCESSES, start_method="fork")  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_a_wrapper_is_refused_with_what_to_do(found: list[dict[str, Any]], kind: str) -> None:
    said = {"ddp": "patch first, then wrap", "fsdp1": "patch first, then wrap", "fsdp2": "is spread over processes"}
    for rank in found:
        assert said[kind] in rank[f"{kind}, not swapped"]
        for name, scheme in CASES:
            assert said[kind] in rank[f"{kind} {name} {scheme}, undone"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(WRAPPERS))
@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_wrapped_after_the_swap_the_numbers_are_one_process_s(
    found: list[dict[str, Any]], name: str, scheme: str, kind: str
) -> None:
    before, after = step(swapped(name, scheme), IDS)
    for rank, of in enumerate(found):
        mine = slice(2 * rank, 2 * rank + 2)
        here, later = of[f"{kind} {name} {scheme}"]
        assert gap(here, before[mine]) < 1e-5
        assert gap(later, after[mine]) < 1e-3
    assert gap(after, before) > 1e-1
