"""What a forward has to wait for on a GPU: values that Python reads from tensors.

On the meta device a tensor has no values, and every read of one raises: what runs there waits for nothing, so that a
CUDA graph can hold it. One read is allowed in a forward of more than one token: whether rows whose stock class counts
positions from padding may share one row of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posswap import patch_model
from hf_posswap.errors import PosswapError
from hf_posswap.patching.sites.attention import positions
from hf_posswap.schemes import SCHEMES
from hf_posswap.testing.tiny import tiny_model
from tests.stock import cache_in, with_cache

ENCODERS = ("bert", "roberta")
FAST, SLOW = ("llama", "bloom", "bert"), ("gpt_neox", "gpt2", "opt", "mpt", "gptj", "falcon", "roberta")
"""Rotation of all and of a part of a head, tables, ALiBi of their own, pairs side by side, and both-sided attention."""
FAMILIES = [*FAST, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]
FIELDS: dict[str, dict[str, Any]] = {
    "longrope": {"long_factor": [2.0] * 8, "factor": 4.0},
    "rnope": {"every": 2},
    "learned": {"extend": "tile"},
}
LENGTH = 24


def swapped(family: str, scheme: str) -> Any:
    """Return a tiny model with the scheme, or skip where it is none of the family's."""
    model = tiny_model(family, meta=False)
    if family not in ENCODERS:
        model.config.pad_token_id = None  # stock code looks for it in the ids, to warn
    try:
        return patch_model(model, scheme, max_length=512, **FIELDS.get(scheme, {}))
    except PosswapError as error:
        pytest.skip(f"{family} takes no {scheme}: {str(error).splitlines()[0]}")


def read(model: Any, family: str) -> None:
    """Read two texts at a time, padded where stock code does not look at the mask, and decode upon a cache."""
    ids = torch.full((2, LENGTH), 5, device=model.device)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    with torch.no_grad():
        model(ids)
        if model.config._attn_implementation == "eager":  # with sdpa it reads whether the mask hides anything
            model(ids, attention_mask=mask)
        if family not in ENCODERS:
            cache = cache_in(model(ids, use_cache=True))
            model(ids[:, :1], **with_cache(model, cache), use_cache=True)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_reads_one_value_at_most_and_a_step_of_decoding_none(
    family: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def noted(positions: torch.Tensor, index: torch.Tensor) -> bool:
        asked.append(positions.shape[1])
        return False

    monkeypatch.setattr(positions, "_is_plain", noted)
    model = swapped(family, scheme).to("meta")
    if scheme == "dynamic" and type(model) is type(tiny_model(family)):
        with pytest.raises(RuntimeError, match="item"):
            read(model, family)  # stock code reads the length from the positions
        return
    read(model, family)
    assert asked.count(LENGTH) <= 3  # of three forwards


def test_a_read_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="item"):
        bool(torch.ones(1, device="meta").all())
