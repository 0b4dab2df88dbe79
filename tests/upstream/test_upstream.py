"""transformers' own tests, on swapped models: what is green on stock is green swapped, but for `known.json`.

It needs transformers' tests, which only its sdist carries: `.ci/upstream` downloads them and says where they are. By
default a handful of tests a family; POSSWAP_UPSTREAM=all runs the whole list.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.upstream.families import FAMILIES

HERE = Path(__file__).parent
FOLDER = os.environ.get("POSSWAP_UPSTREAM_TESTS")
ALL = os.environ.get("POSSWAP_UPSTREAM") == "all"
KNOWN: list[dict[str, Any]] = json.loads((HERE / "known.json").read_text(encoding="utf-8"))
HANDFUL = (
    "test_save_load",
    "test_torch_save_load",
    "test_determinism",
    "test_batching_equivalence",
    "test_training",
    "test_attention_outputs",
    "test_hidden_states_output",
    "test_resize_tokens_embeddings",
    "test_inputs_embeds",
    "test_model_outputs_equivalence",
    "test_can_be_initialized_on_meta",
    "(test_eager_matches_sdpa_inference and fp32_pad_left and not kernels and not mask and not attentions)",
    "test_from_pretrained_no_checkpoint",
    "test_correct_missing_keys",
    "test_can_load_ignoring_mismatched_shapes",
    "test_init_weights_can_init_buffers",
    "test_load_save_without_tied_weights",
    "test_generate",
)

PYTEST = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(HERE), "-p", "no:cacheprovider"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="transformers' tests are not at hand: run .ci/upstream"),
]


def test_each_known_exception_has_a_reason_and_families() -> None:
    assert KNOWN
    for one in KNOWN:
        assert set(one) == {"reason", "families", "tests"}
        assert len(one["reason"]) > 40
        assert set(one["families"]) <= set(FAMILIES)
        assert all(name.startswith("test_") for name in one["tests"])


def outcomes(family: str, swapped: bool, folder: Path, names: Sequence[str] = ()) -> dict[str, str]:
    """Return what became of the tests of the suite: "passed", "skipped", or the first line of why one failed.

    Args:
        family: of `FAMILIES`.
        swapped: whether the models are.
        folder: for the report.
        names: of tests to run; none: those that the environment asks for.
    """
    report = folder / f"{family}-{swapped}.xml"
    suite = str(HERE / "suite.py")
    chosen = [f"{suite}::TestSuite::{name}" for name in names] or [
        suite,
        *([] if ALL else ["-k", " or ".join(HANDFUL)]),
    ]
    where = {"UPSTREAM_FOLDER": str(FOLDER), "UPSTREAM_FAMILY": family, "UPSTREAM_SWAPPED": str(int(swapped))}
    root = {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(
        [*PYTEST, *chosen, f"--junitxml={report}"],
        env=os.environ | where | root,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert report.exists(), run.stdout + run.stderr
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, said = case.get("name", "").partition(" ")[0], _outcome(case)
        if found.get(name, "passed") in ("passed", "skipped"):  # each subtest is a case of that name
            found[name] = said if found.get(name) != "passed" or said != "skipped" else "passed"
    return found


def known(family: str, name: str) -> bool:
    """Return whether it is known that a test fails on swapped models of a family."""
    return any(family in one["families"] and any(fnmatch(name, test) for test in one["tests"]) for one in KNOWN)


def _outcome(case: ElementTree.Element) -> str:
    for bad in ("failure", "error"):
        if (found := case.find(bad)) is not None:
            return (found.get("message") or bad).splitlines()[0]
    return "passed" if case.find("skipped") is None else "skipped"


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_green_on_stock_is_green_swapped(family: str, tmp_path: Path) -> None:
    swapped = outcomes(family, True, tmp_path)
    assert sum(said == "passed" for said in swapped.values()) >= 5, swapped
    red = {name: said for name, said in swapped.items() if said not in ("passed", "skipped")}
    stock = outcomes(family, False, tmp_path, list(red)) if red else {}
    broken = {name: why for name, why in red.items() if stock[name] == "passed"}
    unknown = [f"{family} {name}: {why}" for name, why in broken.items() if not known(family, name)]
    assert not unknown, "\n".join(unknown)
    mended = [name for name in swapped if known(family, name) and name not in broken]
    assert not mended, f"{family}: no longer broken, take it out of known.json: {', '.join(mended)}"
