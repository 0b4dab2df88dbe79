"""The suite's own rules hold: each is broken on purpose in a small suite that runs in a fresh pytest."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

ROOT = Path(__file__).resolve().parents[1]
PLANTED = """
import random
import warnings

import pytest
import torch
from transformers.utils import logging


@pytest.mark.parametrize("name", ["one", "two"])
def test_on_real_checkpoints(shared_checkpoints, name):
    assert (shared_checkpoints / name).exists()


def test_logs_a_deprecation():
    logging.get_logger("transformers.models").warning_once("`torch_dtype` is deprecated! Use `dtype` instead!")


def test_warns_as_transformers():
    warnings.warn_explicit("going away", FutureWarning, "modeling_utils.py", 1, module="transformers.modeling_utils")


@pytest.mark.slow
def test_slow():
    raise AssertionError("slow tests run only where they are asked for")


@pytest.mark.gpu
def test_gpu():
    assert torch.cuda.is_available()


@pytest.mark.parametrize("turn", [0, 1])
def test_seeded(turn):
    assert (random.random(), torch.rand(()).item()) == (random.Random(0).random(), first_number())


def first_number():
    return torch.rand((), generator=torch.Generator().manual_seed(0)).item()
"""


@pytest.fixture(scope="module")
def closing_lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what pytest prints of the planted suite, which has no checkpoints beside it."""
    root = tmp_path_factory.mktemp("nothing-beside") / "project"
    (root / "tests").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", root / "tests" / "conftest.py")
    shutil.copy(ROOT / "pyproject.toml", root / "pyproject.toml")
    (root / "tests" / "test_planted.py").write_text(PLANTED)
    command = [sys.executable, "-m", "pytest", "-n1", "-rA", "-p", "no:cacheprovider", "tests"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=200).stdout


@pytest.mark.slow
def test_missing_checkpoints_are_announced(closing_lines: str) -> None:
    assert "2 tests skipped: real checkpoints not beside the project" in closing_lines


def test_transformers_deprecations_fail_a_test(closing_lines: str) -> None:
    assert "ERROR tests/test_planted.py::test_logs_a_deprecation" in closing_lines
    assert "FAILED tests/test_planted.py::test_warns_as_transformers" in closing_lines


def test_slow_is_left_out_and_gpu_skipped_without_one(closing_lines: str) -> None:
    assert "test_slow" not in closing_lines
    if not torch.cuda.is_available():
        assert "no CUDA device" in closing_lines


def test_every_test_starts_from_the_same_seed(closing_lines: str) -> None:
    assert closing_lines.count("PASSED tests/test_planted.py::test_seeded") == 2


def test_this_process_is_offline_and_modest(worker_id: str) -> None:
    assert constants.HF_HUB_OFFLINE
    assert constants.HF_HUB_DISABLE_TELEMETRY
    if worker_id != "master":
        assert torch.get_num_threads() == 1


COLLECTING = """
import json
import sys

import pytest


class Names:
    def pytest_collection_finish(self, session):
        self.found = [item.nodeid for item in session.items]


found = {}
for share in json.loads(sys.argv.pop(1)):
    names = Names()
    given = ["--share", share] if share else []
    pytest.main(["-n0", "-qq", "--collect-only", "-p", "no:cacheprovider", *given, *sys.argv[1:]], plugins=[names])
    found[share] = names.found
print("FOUND", json.dumps(found))
"""


def test_searches_for_garbage_pass_over_what_was_there_before_the_tests() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(gc.get_objects())


@pytest.mark.slow
def test_shares_are_disjoint_and_together_everything() -> None:
    """One process collects four times: most of what a collection takes is to import what is tested."""
    shares = json.dumps(["", "1/3", "2/3", "3/3"])
    command = [sys.executable, "-c", COLLECTING, shares, "tests/schemes/test_rope_types.py"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert "FOUND" in out.stdout, out.stdout + out.stderr
    found = json.loads(out.stdout.rpartition("FOUND")[2])
    everything = found.pop("")
    assert len(everything) > 10
    assert all(found.values())
    assert sorted(sum(found.values(), [])) == sorted(everything)


def test_no_share_of_a_few_chosen_tests_is_empty(tmp_path: Path) -> None:
    """Names fall in shares by a hash, which left one share of eight without any of transformers' eleven tests."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "conftest.py")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    cases = "@pytest.mark.parametrize('case', range(11))\ndef test_few(case): pass\ndef test_other(): pass\n"
    (tmp_path / "test_few.py").write_text("import pytest\n" + cases)
    shares = json.dumps(["", *(f"{share}/16" for share in range(1, 17))])
    command = [sys.executable, "-c", COLLECTING, shares, "-k", "test_few and not other", "test_few.py"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "FOUND" in out.stdout, out.stdout + out.stderr
    found = json.loads(out.stdout.rpartition("FOUND")[2])
    everything = found.pop("")
    assert len(everything) == 11
    assert all(found.values())
    assert set(sum(found.values(), [])) == set(everything)


LARGE = """
import pytest


@pytest.mark.parametrize("case", range(40))
def test_large(case):
    pass


@pytest.mark.parametrize("case", range(4))
def test_large_of_four(case):
    pass


@pytest.mark.parametrize("case", range(3))
def test_small(case):
    pass
"""
PARTS = """
import json
import os

import pytest


class Names:
    def pytest_collection_finish(self, session):
        self.found = [item.nodeid for item in session.items]


found = {}
for part in ["", *"01234567", "slow", "half", "all"]:
    names = Names()
    os.environ.update({"POSSWAP_PART": part} if part not in ("", "slow") else {})
    chosen = ["-m", "slow and rotated"] if part == "slow" else []
    ended = pytest.main(["-n0", "-qq", "--collect-only", "-p", "no:cacheprovider", *chosen, "tests"], plugins=[names])
    found[part] = int(ended) or names.found
print("FOUND", json.dumps(found))
"""


def test_eight_parts_are_every_case_of_a_large_test(tmp_path: Path) -> None:
    for folder in ("contract", "docs"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / "test_cases.py").write_text(LARGE)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests" / "conftest.py")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env.pop("POSSWAP_PART", None)
    command = [sys.executable, "-c", PARTS]
    out = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert "FOUND" in out.stdout, out.stdout + out.stderr
    found = json.loads(out.stdout.rpartition("FOUND")[2])
    assert found["half"] == pytest.ExitCode.USAGE_ERROR
    assert "POSSWAP_PART expects 0 to 7, or all, got 'half'." in out.stdout + out.stderr
    assert found[""] == found["0"]
    large = [[name for name in found[part] if "contract" in name and "large" in name] for part in "01234567"]
    assert {len(names) for names in large} == {5 + 1}
    every = set().union(*large)
    assert len(every) == 40 + 4
    assert sorted(found["slow"]) == sorted(every - set(large[7]))  # the part before it was "7"
    others = [[name for name in found[part] if name not in every] for part in "01234567"]
    assert all(names == others[0] for names in others)
    assert len(others[0]) == 3 + 40 + 4 + 3
    assert sorted(found["all"]) == sorted([*others[0], *every])


@pytest.mark.slow
def test_a_share_that_is_none_is_refused() -> None:
    command = [sys.executable, "-m", "pytest", "--share", "4/3", "-n0", "tests/test_rope_layout.py"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "--share expects K/N with K from 1 to N, got '4/3'." in out.stderr
