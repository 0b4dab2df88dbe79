"""The change of basis that keeps every score, and where a model's projections lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.training.search.rotation import balanced_bases, find_projections

HEADS, WIDTH, TOKENS = 3, 6, 400


def states() -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, correlated, the keys with something in common."""
    source = torch.Generator().manual_seed(0)
    draw = [torch.randn(HEADS, TOKENS, WIDTH, dtype=torch.float64, generator=source) for _ in range(2)]
    mixing = [torch.randn(HEADS, WIDTH, WIDTH, dtype=torch.float64, generator=source) for _ in range(2)]
    queries, keys = (x @ mix for x, mix in zip(draw, mixing, strict=True))
    return queries + 0.3, keys + 5.0


def test_scores_stay_and_dimensions_rise_by_what_they_add() -> None:
    queries, keys = states()
    for_queries, for_keys = balanced_bases(queries, keys)
    new_queries, new_keys = queries @ for_queries.mT, keys @ for_keys.mT
    torch.testing.assert_close(new_queries @ new_keys.mT, queries @ keys.mT)
    moment = new_queries.mT @ new_queries / TOKENS
    spread = torch.stack([torch.cov(head.T, correction=0) for head in new_keys])
    sizes = moment.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(moment, torch.diag_embed(sizes), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(spread, moment, atol=1e-6, rtol=1e-6)
    assert (sizes.diff(dim=1) > 0).all()


def test_the_first_dimensions_are_the_least_that_can_be_left_out() -> None:
    queries, keys = states()
    for_queries, for_keys = balanced_bases(queries, keys)
    centred = keys - keys.mean(dim=1, keepdim=True)  # what softmax sees
    exact = queries @ centred.mT
    kept = (queries @ for_queries.mT)[..., 2:] @ (centred @ for_keys.mT)[..., 2:].mT
    u, s, v = torch.linalg.svd(exact)  # no matrix of as low a rank is nearer
    best = u[..., : WIDTH - 2] @ torch.diag_embed(s[:, : WIDTH - 2]) @ v[:, : WIDTH - 2]
    torch.testing.assert_close((kept - exact).norm(dim=(1, 2)), (best - exact).norm(dim=(1, 2)))


def test_keys_that_never_move_are_no_obstacle() -> None:
    queries, keys = states()
    keys[:, :, 0] = 1.0
    for_queries, for_keys = balanced_bases(queries, keys)
    assert torch.isfinite(for_queries).all()
    assert torch.isfinite(for_keys).all()
    torch.testing.assert_close(queries @ for_queries.mT @ for_keys @ keys.mT, queries @ keys.mT, rtol=1e-5, atol=1e-5)


class Attention(nn.Module):
    """Has the projections that it is given."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


@pytest.mark.parametrize("names", [("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin")])
def test_rows_of_linear_layers(names: tuple[str, str]) -> None:
    query, key = nn.Linear(5, 6), nn.Linear(5, 6)
    found = find_projections(Attention(**dict(zip(names, (query, key), strict=True))), 2, 3)
    for part, module in zip(found, (query, key), strict=True):
        weight, bias = part.read()
        assert torch.equal(weight.flatten(0, 1).float(), module.weight)
        part.write(weight * 2, bias + 1)
        torch.testing.assert_close(module.weight.double(), weight.flatten(0, 1) * 2)
        torch.testing.assert_close(module.bias.double(), bias.flatten() + 1)


def test_columns_of_a_fused_conv1d_and_nothing_beside_them() -> None:
    fused = Conv1D(3 * 6, 5)
    values = fused.weight[:, 12:].clone()
    query, key = find_projections(Attention(c_attn=fused), 2, 3)
    assert torch.equal(query.read()[0].flatten(0, 1).float(), fused.weight[:, :6].T)
    assert torch.equal(key.read()[0].flatten(0, 1).float(), fused.weight[:, 6:12].T)
    key.write(key.read()[0] * 0, key.read()[1])
    assert not fused.weight[:, 6:12].any()
    assert fused.weight[:, :6].all()
    assert torch.equal(fused.weight[:, 12:], values)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"dense": nn.Linear(5, 6)}, "has no query and key projections that are known here"),
        ({"q_proj": nn.Linear(5, 6, bias=False), "k_proj": nn.Linear(5, 6)}, "its Linear has no bias"),
        ({"q_proj": nn.Identity(), "k_proj": nn.Identity()}, "its Identity has no bias"),
    ],
)
def test_others_are_refused(parts: dict[str, nn.Module], said: str) -> None:
    with pytest.raises(UnsupportedSwapError, match=said):
        find_projections(Attention(**parts), 2, 3)
