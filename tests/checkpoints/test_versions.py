"""Checkpoints saved on each of several releases of transformers, loaded on each: equal logits and tokens, or a refusal.

Each release lies in a folder of its own that goes before the installed one on the path of a child process; pip
downloads it. Where pip reaches no index the tests are skipped, loudly; with POSSWAP_RELEASES=required they fail.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from hf_posswap import versions
from tests.checkpoints.versions_child import CASES

PROJECT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("versions_child.py")
RELEASES = ("5.14.0", "5.18.0", "5.23.0", "5.24.0")
"""The oldest that pyproject.toml takes, the newest, the one before its `cache`, and one between."""
TOLERANCE = 1e-5  # releases round logits of size 10 otherwise: masks and rotations are made in another order
NOT_DOWNLOADED = "pip reaches no index that has other releases of transformers"
PIP_INSTALL = [sys.executable, "-m", "pip", "install", "--no-compile", "--retries=1", "--timeout=20"]
REFUSALS = {
    "auto": "contains custom code",
    "stock": "pip install hf-posswap, then hf_posswap.load",
}
NATIVE = {"llama-yarn", "gpt2-sinusoidal"}
Found = dict[str, dict[str, float | str]]


def child(overlay: Path, home: Path, *arguments: str) -> dict[str, Any]:
    """Return what versions_child.py reports on the transformers in `overlay`."""
    path = [overlay] if arguments[-1] == "bare" else [overlay, PROJECT]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HOME": str(home),  # the cache of remote code too
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(CHILD), *arguments],
        capture_output=True,
        stdin=subprocess.DEVNULL,  # transformers may ask whether to run the code
        text=True,
        timeout=900,
        cwd=home,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["transformers"] == overlay.name
    return dict(report["found"])


def install(release: str, folder: Path) -> Path:
    """Return a folder that holds `transformers` of a release, with what it needs and what is not installed here."""
    target = folder / release
    pip_install(target, "--no-deps", f"transformers=={release}")
    (held,) = importlib.metadata.distributions(name="transformers", path=[str(target)])
    needed = [Requirement(line) for line in held.requires or ()]
    missing = [str(one) for one in needed if one.marker is None and not is_installed(one)]
    if missing:  # 5.14 takes older tokenizers and an older huggingface_hub than 5.24
        pip_install(target, *missing)
    return target


def is_installed(needed: Requirement) -> bool:
    try:
        return needed.specifier.contains(importlib.metadata.version(needed.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def pip_install(target: Path, *arguments: str) -> None:
    """Install into a folder; skip, or fail, where pip reaches no index."""
    done = subprocess.run(
        [*PIP_INSTALL, "--target", str(target), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env={name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"},
        check=False,
    )
    if done.returncode and "(from versions: none)" in done.stderr and os.environ.get("POSSWAP_RELEASES") != "required":
        pytest.skip(NOT_DOWNLOADED)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def overlays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("releases")
    return {release: install(release, folder) for release in RELEASES}


@pytest.fixture(scope="module")
def saved(overlays: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Return, by the release that saved, the folder with a checkpoint of each case and what was reported of them."""
    root = tmp_path_factory.mktemp("saved")

    def save(release: str) -> tuple[Path, Any]:
        home = tmp_path_factory.mktemp("home")
        return root / release, child(overlays[release], home, "save", str(root / release))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(RELEASES, pool.map(save, RELEASES), strict=True))


@pytest.fixture(scope="module", params=RELEASES)
def loaded(
    request: pytest.FixtureRequest,
    overlays: dict[str, Path],
    saved: dict[str, tuple[Path, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Found]:
    """Return, by mode, what one release made of what each saved: by "release/case", the ways of loading."""

    def load(mode: str) -> Found:
        folders = [str(folder) for folder, _ in saved.values()]
        found = child(overlays[request.param], tmp_path_factory.mktemp("home"), "load", *folders, mode)
        return {"/".join(Path(path).parts[-2:]): ways for path, ways in found.items()}

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(("plugin", "bare"), pool.map(load, ("plugin", "bare")), strict=True))


def wrong(found: Found, ways: Iterable[str]) -> dict[str, float | str]:
    """Return what did not load with the logits and tokens that it was saved with, in one of `ways`."""
    every = {f"{name}, {way}": by_way[way] for name, by_way in found.items() for way in ways}
    assert len(every) >= len(RELEASES)
    return {name: gap for name, gap in every.items() if isinstance(gap, str) or not gap <= TOLERANCE}


def of_route(found: Found, native: bool) -> Found:
    return {name: ways for name, ways in found.items() if (name.partition("/")[2] in NATIVE) == native}


def test_the_releases_span_the_tested_range() -> None:
    assert versions.tested()["transformers"][0] == RELEASES[0]
    assert versions.tested()["transformers"][-1] == RELEASES[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_release_saves_what_generates_as_each_row_does_by_itself(saved: dict[str, tuple[Path, Any]]) -> None:
    reports = {f"{release}/{name}": one for release, (_, found) in saved.items() for name, one in found.items()}
    assert len(reports) == len(RELEASES) * len(CASES)
    expected = {name: {"route": "native" if name in NATIVE else "plugin", "as alone": True} for name in CASES}
    assert {name: one for name, one in reports.items() if one != expected[name.partition("/")[2]]} == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_with_the_package_it_loads_what_each_saved(loaded: dict[str, Found]) -> None:
    assert wrong(loaded["plugin"], ("load", "auto")) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_code_in_a_checkpoint_loads_what_each_saved(loaded: dict[str, Found]) -> None:
    assert wrong(loaded["bare"], ("remote",)) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_the_package_it_loads_native_swaps_and_refuses_every_other(loaded: dict[str, Found]) -> None:
    assert wrong(of_route(loaded["bare"], native=True), ("auto", "stock")) == {}
    plugin = of_route(loaded["bare"], native=False)
    for way, message in REFUSALS.items():
        assert {name: ways[way] for name, ways in plugin.items() if message not in str(ways[way])} == {}
