"""Cached keys stand where they stood: behind right padding, behind ids that skip, behind holes in a prompt's mask."""

from __future__ import annotations

from hf_posswap.testing.contract.points import key_positions
from tests.contract.points import as_tests

globals().update(as_tests(key_positions))  # a test for each point
