"""Random numbers of a context's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_random import PrivateRandomness

DRAWS: dict[str, Callable[[], Tensor]] = {
    "module": lambda: nn.Linear(3, 3).weight.detach(),
    "randn": lambda: torch.randn(3),
    "rand": lambda: torch.rand(3),
    "randn_like": lambda: torch.randn_like(torch.ones(3)),
    "randperm": lambda: torch.randperm(50),
    "randint": lambda: torch.randint(1000, (3,)),
    "randint from": lambda: torch.randint(5, 1000, (3,)),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "normal_": lambda: torch.empty(3).normal_(),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 9),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(3)),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(3, 3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_call(name: str) -> None:
    def drawn(seed: int) -> Tensor:
        with PrivateRandomness(seed):
            return DRAWS[name]()

    before = torch.get_rng_state()
    one, same, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_call_keeps_a_generator_that_is_given() -> None:
    expected = torch.randn(3, generator=torch.Generator().manual_seed(5))
    with PrivateRandomness(1):
        assert torch.equal(torch.randn(3, generator=torch.Generator().manual_seed(5)), expected)


@pytest.mark.gpu
def test_call_draws_on_the_device_where_models_are_built() -> None:
    before = torch.cuda.get_rng_state()
    with PrivateRandomness(1), torch.device("cuda"):
        weights = [nn.Linear(3, 3).weight, torch.randn(3), torch.empty(3).normal_()]
    assert {each.device.type for each in weights} == {"cuda"}
    assert torch.equal(torch.cuda.get_rng_state(), before)
