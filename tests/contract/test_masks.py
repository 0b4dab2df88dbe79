"""Padding is not seen, documents do not leak, and every attention implementation gives the same."""

from __future__ import annotations

import pytest

from hf_posswap.testing.contract.points import masks
from hf_posswap.testing.contract.points.masks import PADDED, right_padded
from tests.contract.limits import CONVOLVED
from tests.contract.others import ALL
from tests.contract.pairs import CHANGE, gap, logits
from tests.contract.points import as_tests

globals().update(as_tests(masks))  # a test for each point


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONVOLVED)
def test_a_native_class_convolves_padding(name: str) -> None:
    model = ALL[name].build()
    ids, mask = right_padded()
    found = logits(model, ids, attention_mask=mask)
    assert gap(found[1, :-PADDED], logits(model, ids[1:, :-PADDED])[0]) > CHANGE
