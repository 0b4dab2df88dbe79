"""The meter on plain tensors: memory by hand, operations by torch's own counter and by the formula of attention."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from hf_posswap.compat.torch_dispatch import storage_key
from hf_posswap.training.dryrun.meter import Meter


def test_memory_is_counted_once_and_given_back() -> None:
    weight = torch.ones(1000)
    meter = Meter(lambda: {storage_key(weight.untyped_storage()): "weights"})
    meter.begin()
    with meter:
        meter.hold([weight])
        one = weight + 1
        view = one[10:].view(-1, 2)
        two = torch.cat((one, one))
        assert meter.memory.now == 4 * 4000
        del two
        assert meter.memory.now == 4 * 2000
        del one
        assert meter.memory.now == 4 * 2000  # the view holds it
        del view
        three = weight * 2
    peak = meter.settle()
    assert (peak.now, peak.peak) == (4 * 2000, 4 * 4000)
    assert peak.at_peak == {"weights": 4000, "activations": 12000}
    assert len(three) == 1000


def test_a_peak_is_looked_for_anew() -> None:
    meter = Meter(dict)
    with meter:
        torch.ones(1000)
        meter.begin()
        held = torch.ones(10)
    assert meter.settle().peak == held.numel() * 4


def test_what_goes_after_the_end_is_left_alone() -> None:
    asked = []
    meter = Meter(lambda: asked.append(1) or {})  # type: ignore[func-returns-value]
    meter.begin()
    with meter:
        held = torch.ones(1000)
    assert meter.settle().now == 4000
    before = len(asked)
    del held
    assert (meter.memory.now, len(asked)) == (4000, before)


def test_storages_that_are_emptied_and_filled() -> None:
    meter = Meter(dict)
    meter.begin()
    with meter:
        held = torch.ones(1000)
        storage = held.untyped_storage()
        storage.resize_(0)
        meter.resized(storage)
        assert meter.memory.now == 0
        storage.resize_(4000)
        meter.resized(storage)
    assert meter.settle().at_peak == {"activations": 4000}
    assert meter.memory.now == 4000


def test_operations_are_torchs_own_count() -> None:
    weight, given = torch.randn(16, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    meter = Meter(dict)
    with meter, FlopCounterMode(display=False) as counter:
        linear(given, weight).square().sum().backward()
    assert meter.work.flops == counter.get_total_flops() == 3 * 2 * 4 * 8 * 16


def test_causal_attention_counts_half_of_the_scores() -> None:
    heads, length, width = 2, 64, 8
    query = torch.randn(1, heads, length, width, requires_grad=True)
    product = 2 * heads * length * length * width
    for causal in (False, True):
        meter = Meter(dict)
        with meter:
            scaled_dot_product_attention(query, query, query, is_causal=causal).sum().backward()
        # two products forward; backward the scores again, and four gradients
        assert meter.work.flops == (2 + 5) * product / (1 + causal)


def test_bytes_are_what_is_read_and_written() -> None:
    one, other = torch.ones(100), torch.ones(100)
    meter = Meter(dict)
    with meter:
        one.view(10, 10)
        assert meter.work.moved == 0
        one + other
        assert meter.work.moved == 3 * 400
        one.add_(other)
        assert meter.work.moved == 6 * 400
        torch.nn.functional.embedding(torch.tensor([0, 1]), torch.ones(50, 4))
    # two rows read and written; of what was made for it, the ids and the table, what making takes
    assert meter.work.moved >= 6 * 400 + 2 * 2 * 16
