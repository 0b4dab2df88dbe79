"""bfloat16 models: angles and slopes stay in float32, wherever the cast happens."""

from __future__ import annotations

from hf_posswap.testing.contract.points import precision
from tests.contract.points import as_tests

globals().update(as_tests(precision))  # a test for each point
