"""Training a swapped model: gradients, checkpointing, LoRA before and after."""

from __future__ import annotations

import pytest
import torch

from hf_posswap import patch_model, unpatch_model
from hf_posswap.testing.contract.points import gradients
from tests.contract.pairs import Pair
from tests.contract.points import as_tests

globals().update(as_tests(gradients))  # a test for each point


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_weights_trained_since_the_swap_survive_unpatching(name: str) -> None:
    pair = Pair(name, "rope", "attention")
    model = pair.native()
    table = {key: value.clone() for key, value in model.state_dict().items() if "wpe" in key or "embed_pos" in key}
    patch_model(model, "rope", site="attention")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    gradients.gradients(model, pair)
    optimizer.step()
    trained = {key: value.clone() for key, value in model.state_dict().items()}
    unpatch_model(model)
    now = model.state_dict()
    assert all(torch.equal(now[key], value) for key, value in table.items())
    kept = [key for key in now if key not in table]
    assert all(torch.equal(now[key], trained[key]) for key in kept)
    assert not all(torch.equal(now[key], pair.native().state_dict()[key]) for key in kept)
