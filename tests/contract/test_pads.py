"""Where the tokens of a padded row stand without position ids: where its stock class would have them."""

from __future__ import annotations

from hf_posswap.testing.contract.points import pads
from tests.contract.points import as_tests

globals().update(as_tests(pads))  # a test for each point
