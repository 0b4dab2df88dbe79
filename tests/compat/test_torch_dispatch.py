"""What compat sees of the operators that torch runs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hf_posswap.compat import torch_dispatch
from hf_posswap.compat.torch_fake import fake_mode

aten = torch.ops.aten


def test_call() -> None:
    seen = []

    class Seeing(torch_dispatch.Watch):
        def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen.append(func)
            return super().call(func, args, kwargs)

    with Seeing():
        weight = torch.ones(2, 2, requires_grad=True)
        (weight @ weight).sum().backward()
    assert seen.count(aten.mm.default) == 3  # one forward, two backward


def test_tensors_in() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert torch_dispatch.tensors_in((one, 3), {"held": [two, None]}) == [one, two]


def test_reads_number() -> None:
    seen = []

    class Seeing(torch_dispatch.Watch):
        def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen.append(torch_dispatch.reads_number(func))
            return super().call(func, args, kwargs)

    held = torch.ones(2)
    with Seeing():
        held.sum()
        assert not any(seen)
        bool(held.sum())
        held[0].item()
    assert sum(seen) == 2


def test_argument_names() -> None:
    assert torch_dispatch.argument_names(aten.mm.default) == ["self", "mat2"]


def test_writes() -> None:
    assert torch_dispatch.writes(aten.add_.Tensor)
    assert not torch_dispatch.writes(aten.view.default)


def test_storage_key() -> None:
    held, other = torch.ones(4), torch.ones(4)
    keys = [torch_dispatch.storage_key(one.untyped_storage()) for one in (held, held[1:].view(3, 1), other)]
    assert keys[0] == keys[1] != keys[2]


def test_without_modes() -> None:
    class Refusing(torch_dispatch.Watch):
        def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise AssertionError

    with Refusing(), fake_mode(), torch_dispatch.without_modes():
        assert float(torch.ones(3).sum()) == 3


def test_resized_storages() -> None:
    sizes = []
    storage = torch.ones(4).untyped_storage()
    with torch_dispatch.resized_storages(lambda one: sizes.append(one.nbytes())):
        storage.resize_(0)
        storage.resize_(8)
    storage.resize_(4)
    assert sizes == [0, 8]


def test_resized_storages_of_other_threads_are_not_told_of() -> None:
    original, sizes, others = torch.UntypedStorage.resize_, [], []
    first = torch_dispatch.resized_storages(lambda one: sizes.append(one.nbytes()))

    def work() -> None:
        second = torch_dispatch.resized_storages(lambda one: others.append(one.nbytes()))
        with second:
            torch.ones(4).untyped_storage().resize_(0)
            first_ends.set()
            assert first_ended.wait(60)
            torch.ones(4).untyped_storage().resize_(32)

    first_ends, first_ended = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        with first:
            done = threads.submit(work)
            assert first_ends.wait(60)
            torch.ones(4).untyped_storage().resize_(8)
        first_ended.set()
        done.result()
    assert (sizes, others) == ([8], [0, 32])
    assert torch.UntypedStorage.resize_ is original
