"""One list of tested versions: the caps of pyproject.toml, the README, the checks and the workflows agree with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from packaging.version import Version
from typer.testing import CliRunner

from hf_posswap import versions
from hf_posswap.versions import FILE
from recipes import tested_versions
from recipes.tested_versions import PACKAGES, accepted, add, beyond, in_readme, installed, sentence, untested

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NEWEST = Version(versions.tested()["transformers"][-1])


def constraints(name: str) -> dict[str, str]:
    lines = (ROOT / ".ci" / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_cap_is_the_minor_release_after_the_newest_that_is_tested() -> None:
    specifiers = {specifier.operator: specifier.version for specifier in accepted()["transformers"]}
    assert specifiers == {">=": specifiers[">="], "<": f"{NEWEST.major}.{NEWEST.minor + 1}"}
    assert versions.tested()["transformers"][0] == f"{specifiers['>=']}.0"


def test_pip_takes_every_tested_version() -> None:
    assert set(versions.tested()) == set(PACKAGES) == set(accepted())
    for package, found in versions.tested().items():
        assert [version for version in found if version not in accepted()[package]] == []


def test_the_list_is_as_the_command_writes_it() -> None:
    assert FILE.read_text(encoding="utf-8") == add({})


def test_the_readme_names_the_tested_versions() -> None:
    assert in_readme(README) == README
    assert f"transformers {versions.tested()['transformers'][0]} to {NEWEST}" in sentence()
    assert README.index(sentence()) > README.index("## Install and run")
    with pytest.raises(AssertionError, match="README.md needs <!-- badges --> and <!-- /badges --> once each"):
        in_readme("no markers")


def test_the_badges_state_what_the_list_and_pyproject_hold() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    badges = re.findall(r"!\[([a-z]+): ([^\]]+)\]\(https://img\.shields\.io/badge/(\S+)-blue\)", README)
    shown = {label: message.split(" | ") for label, message, _ in badges}
    assert shown.pop("licence") == [project["license"]]
    pythons = shown.pop("python")
    assert shown == {package: versions.tested()[package] for package in ("transformers", "torch")}
    assert pythons == [text[-4:] for text in project["classifiers"] if re.search(r"Python :: 3\.\d", text)]
    assert project["requires-python"] == f">={pythons[0]}"
    script = (ROOT / ".ci" / "versions").read_text(encoding="utf-8")
    assert re.findall(r"^ *python=python(3\.\d+)$", script, re.M) == [pythons[-1], pythons[0]]
    for label, message, path in badges:  # as shields.io reads it: _ is a space, and -- is one hyphen
        assert re.split("(?<!-)-(?!-)", unquote(path).replace("_", " ")) == [label, message.replace("-", "--")]


def test_the_badge_of_the_tests_follows_the_address_of_the_repository(listed: Path) -> None:
    run("--write")
    assert (listed / "README.md").read_text(encoding="utf-8") == README
    assert "badge.svg" not in README
    pyproject = (listed / "pyproject.toml").read_text(encoding="utf-8")
    (placeholder,) = re.findall(r"^#   (Repository = .*)$", pyproject, re.M)
    with_address = pyproject.replace("[project.urls]\n", f"[project.urls]\n{placeholder}\n")
    (listed / "pyproject.toml").write_text(with_address, encoding="utf-8")
    run("--write")
    address = tomllib.loads(with_address)["project"]["urls"]["Repository"]
    badge = f"<!-- badges -->\n![tests]({address}/actions/workflows/tests.yml/badge.svg) ![python: "
    assert badge in (listed / "README.md").read_text(encoding="utf-8")
    assert (ROOT / ".github" / "workflows" / "tests.yml").is_file()


def test_the_checks_hold_torch_alone_at_the_high_end_and_the_oldest_transformers_at_the_low_end() -> None:
    assert set(constraints("constraints.txt")) == {"torch"}
    lowest = constraints("constraints-lowest.txt")
    assert lowest == constraints("constraints.txt") | {"transformers": versions.tested()["transformers"][0]}
    assert lowest["torch"] in versions.tested()["torch"]


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a copy of list and README in the place of both, and return the folder."""
    for source in (FILE, ROOT / "README.md", ROOT / "pyproject.toml"):
        (tmp_path / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(versions, "FILE", tmp_path / FILE.name)
    monkeypatch.setattr(tested_versions, "FILE", tmp_path / FILE.name)
    monkeypatch.setattr(tested_versions, "ROOT", tmp_path)
    return tmp_path


def run(*arguments: str) -> str:
    import typer

    app = typer.Typer()
    app.command()(tested_versions.main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_what_is_installed_goes_into_the_list_and_the_readme_when_it_is_asked_for(
    listed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"transformers": f"{NEWEST.major}.{NEWEST.minor}.7", "torch": "2.13.0", "peft": "0.99.0rc1"}
    monkeypatch.setattr(tested_versions, "installed", lambda: here)
    before = (listed / FILE.name).read_text(encoding="utf-8")
    new = here["transformers"]
    assert run() == f"not in tested_versions.json yet: transformers {new}\n"
    assert (listed / FILE.name).read_text(encoding="utf-8") == before
    assert run("--write") == f"added to tested_versions.json: transformers {new}. Commit it, and README.md.\n"
    assert json.loads((listed / FILE.name).read_text()) == versions.tested() | {
        "transformers": [*json.loads(before)["transformers"], new]
    }
    assert f"transformers 5.14.0 to {new}, torch" in (listed / "README.md").read_text(encoding="utf-8")
    assert run("--write") == "all installed versions are in tested_versions.json\n"


def test_versions_are_written_as_numbers_are_ordered(listed: Path) -> None:
    (listed / FILE.name).write_text('{"transformers": ["5.18.0", "5.9.0"], "torch": ["2.6.0"]}')
    assert add({"transformers": "5.24.0", "peft": "0.18.0"}) == (
        '{\n  "transformers": ["5.9.0", "5.18.0", "5.24.0"],\n  "torch": ["2.6.0"],\n  "peft": ["0.18.0"]\n}\n'
    )


def test_what_is_installed_is_named_without_its_build() -> None:
    import torch
    import transformers

    assert installed()["torch"] == torch.__version__.partition("+")[0]
    assert installed()["transformers"] == transformers.__version__
    assert untested({"transformers": "4.0.0", "torch": "2.13.0", "accelerate": "9.0.0.dev0"}) == {
        "transformers": "4.0.0"
    }


def test_what_lies_beyond_the_caps_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    following = f"{NEWEST.major}.{NEWEST.minor + 1}.0"
    assert beyond({"transformers": str(NEWEST), "torch": "2.99.0", "peft": "0.99.0"}) == {}
    assert beyond({"transformers": following, "torch": "2.14.0rc1"}) == {
        "transformers": following,
        "torch": "2.14.0rc1",
    }
    monkeypatch.setattr(tested_versions, "installed", lambda: {"transformers": following})
    assert run("--next").startswith(f"beyond pyproject.toml: transformers {following}, which takes transformers<")
    monkeypatch.setattr(tested_versions, "installed", lambda: {"transformers": str(NEWEST)})
    assert run("--next") == "nothing is beyond pyproject.toml\n"


def uncapped() -> str:
    """Return pyproject.toml as `.ci/versions next` rewrites it."""
    (line,) = re.findall(
        r"^    sed -E (.+) pyproject\.toml", (ROOT / ".ci" / "versions").read_text(encoding="utf-8"), re.M
    )
    command = ["sed", "-E", *shlex.split(line), "pyproject.toml"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_next_versions_are_installed_without_caps_and_with_pre_releases(listed: Path) -> None:
    (listed / "pyproject.toml").write_text(uncapped(), encoding="utf-8")
    following = f"{NEWEST.major}.{NEWEST.minor + 1}.0rc1"
    for package, version in {"transformers": following, "torch": "3.0.0.dev1", "peft": "0.99.0rc1"}.items():
        assert accepted()[package].contains(version)  # without being asked for pre-releases, as pip has it
    assert not accepted()["transformers"].contains("5.13.0")


def workflows() -> dict[str, dict[str, Any]]:
    folder = ROOT / ".github" / "workflows"
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.yml"))}


def scripts(workflow: dict[str, Any]) -> str:
    return "\n".join(step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step)


def test_workflows_run_the_checks_that_anyone_runs() -> None:
    found = workflows()
    assert scripts(found["tests"]) == "bash .ci/run"
    assert "bash .ci/versions next" in scripts(found["nightly"])
    assert found["nightly"][True]["schedule"]  # YAML reads the key `on` as true
    for workflow in found.values():
        for name in re.findall(r"\.ci/\w+", scripts(workflow)):
            assert (ROOT / name).is_file()
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] >= 90


@pytest.mark.parametrize(
    ("printed", "code", "verdict"),
    [
        ("no index", 1, "FAILED: the environment could not be made"),
        ("FAILED: posswap selfcheck. beyond", 1, "FAILED: posswap selfcheck. beyond"),
        ("selfcheck and the fast tests pass. beyond", 3, "selfcheck and the fast tests pass. beyond"),
        ("selfcheck and the fast tests pass. nothing is", 0, "selfcheck and the fast tests pass. nothing is"),
    ],
)
def test_the_nightly_run_tells_what_the_script_said(tmp_path: Path, printed: str, code: int, verdict: str) -> None:
    (step,) = (step["run"] for step in workflows()["nightly"]["jobs"]["next"]["steps"] if step.get("id") == "next")
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "versions").write_text(f'echo begins; echo "{printed}"; exit {code}\n')  # the half of an hour
    files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step]  # as a workflow's `shell: bash` is
    subprocess.run(shell, cwd=tmp_path, env=os.environ | files, check=True, capture_output=True)
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == f"verdict={verdict}\ncode={code}\n"


def test_the_verdicts_are_lines_that_the_script_prints() -> None:
    printed = re.findall(r'^\s*echo "(.+)"$', (ROOT / ".ci" / "versions").read_text(encoding="utf-8"), re.MULTILINE)
    (pattern,) = re.findall(r"grep -E '(.+?)' next\.log", scripts(workflows()["nightly"]))
    verdicts = [line.partition(":")[0] for line in printed if re.search(pattern, line)]
    assert verdicts == ["FAILED", "FAILED", "selfcheck and the fast tests pass. $beyond"]


def test_the_checklist_names_what_is_there() -> None:
    page = (ROOT / ".github" / "RELEASING.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:hf_posswap|tests|recipes|\.ci|\.github)/[\w./]+)", page))
    paths |= set(re.findall(r"python (recipes/\w+\.py)", page))
    assert len(paths) > 5
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
