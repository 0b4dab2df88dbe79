"""The test class that a child process runs: transformers' common tests, on one family, stock or swapped.

The environment says which: UPSTREAM_FOLDER, UPSTREAM_FAMILY, UPSTREAM_SWAPPED.
"""

from __future__ import annotations

import os
import unittest
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.upstream.borrowed import borrow
from tests.upstream.families import FAMILIES, Family, ModelTester
from tests.upstream.generating import Generating
from tests.upstream.swapping import swapping_class


def suite(folder: Path, family: Family, swapped: bool) -> type:
    """Return the test class of a family."""
    stock = [getattr(transformers, name) for name in family.models]
    classes = [swapping_class(cls, family) for cls in stock] if swapped else stock
    common: Any = borrow(folder)

    class TestSuite(common.ModelTesterMixin, Generating, unittest.TestCase):  # type: ignore[misc]
        all_model_classes = tuple(classes)
        all_generative_model_classes = tuple(cls for cls in classes if cls.can_generate())
        test_resize_embeddings = True
        is_encoder_decoder = family.config in ("BartConfig", "T5Config")

        def setUp(self) -> None:
            torch.manual_seed(0)
            self.model_tester = ModelTester(family)

    return TestSuite


if "UPSTREAM_FOLDER" in os.environ:  # otherwise it is but looked through for doctests
    TestSuite = suite(
        Path(os.environ["UPSTREAM_FOLDER"]),
        FAMILIES[os.environ["UPSTREAM_FAMILY"]],
        swapped=os.environ["UPSTREAM_SWAPPED"] == "1",
    )
