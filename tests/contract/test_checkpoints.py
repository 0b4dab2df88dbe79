"""Saved and loaded again in this process; tests/checkpoints/test_matrix.py does it in fresh ones."""

from __future__ import annotations

from hf_posswap.testing.contract.points import saving
from tests.contract.points import as_tests

globals().update(as_tests(saving))  # a test for each point
