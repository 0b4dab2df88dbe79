"""`posswap recipes`: what it lists, prints and writes; and the package as it is installed from a wheel."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_posswap.cli import app
from hf_posswap.training.config.shipped import INSTALLED, shipped_recipes
from tests.cli.conftest import says
from tests.training.engine_runs import write_model, write_texts

ROOT = Path(__file__).resolve().parents[2]
NO_INDEX = ("No matching distribution", "Could not find a version", "ConnectionError", "Temporary failure")


def said(*arguments: str, code: int = 0, columns: int = 80) -> str:
    """Return what `posswap recipes` prints; where it fails, what it says of that."""
    done = CliRunner().invoke(app, ["recipes", *arguments], env={"COLUMNS": str(columns)})
    assert done.exit_code == code, done.output
    return done.stderr if code else done.stdout


def test_the_list_is_a_table_of_the_swap_its_tokens_and_who_loads_the_result() -> None:
    shown = said(columns=200)
    for name, recipe in shipped_recipes().items():
        assert says(shown, name + ("".join(recipe.swap) if recipe.trains else recipe.header["Purpose"]))
    assert re.search(r"^yarn +RoPE +YaRN +210 M +stock *$", said(columns=80), re.MULTILINE)
    narrow = said(columns=47)
    assert max(map(len, narrow.splitlines())) <= 47
    assert says(narrow, "stock transformers loads the result")


def test_the_list_as_json_has_all_parts() -> None:
    held = {recipe["name"]: recipe for recipe in json.loads(said("--json"))}
    assert held.keys() == shipped_recipes().keys()
    assert {"purpose", "source", "launch", "cost", "expected", "text"} <= held["yarn"].keys()
    assert json.loads(said("yarn", "--json")) == held["yarn"]


def test_one_is_printed_as_it_is() -> None:
    assert said("yarn", columns=40) == (ROOT / "recipes" / "yarn.yaml").read_text()


def test_a_copy_says_where_it_is_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert says(said("control", "--copy"), "Run it with: posswap train control.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.yaml", "control.yaml", "learned-to-rope.yaml"]
    done = CliRunner().invoke(app, ["train", "control.yaml", "model.name=any", "--show"])
    assert json.loads(done.stdout)["model"]["name"] == "any"
    assert json.loads(said("accelerate/ddp", "--copy", "there", "--json")) == {"written": ["there/ddp.yaml"]}
    (tmp_path / "control.yaml").write_text("model: {name: mine}")
    assert "control.yaml exists and is not overwritten" in said("control", "--copy", code=2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("yran",), "unknown recipe 'yran'. Did you mean 'yarn'?"),
        (("yran", "--copy"), "unknown recipe 'yran'. Did you mean 'yarn'?"),
        (("--copy",), "--copy: name the recipe to copy"),
        (("yarn", "here.yaml"), "here.yaml is a destination for --copy: give --copy too."),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in said(*arguments, code=2)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel, built from the checkout by pip as a user would."""
    folder = tmp_path_factory.mktemp("built")
    here = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", *here, "-w", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True)
    if not here and run.returncode and any(word in run.stderr for word in NO_INDEX):
        pytest.skip("hatchling is not installed, and no package index is in reach: the wheel cannot be built")
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the wheel is installed to, alone."""
    folder = tmp_path_factory.mktemp("installed") / "site"
    (wheel,) = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    return folder


def test_the_wheel_holds_the_recipes_and_nothing_that_is_not_the_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    within = f"hf_posswap/{INSTALLED.name}/"
    held = {name.removeprefix(within) for name in names if name.startswith(within)}
    assert held == {f"{name}.yaml" for name in shipped_recipes()}
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {"hf_posswap"}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_posswap").rglob("*.py*")}
    assert {name for name in package if not name.endswith(".pyc")} <= set(names)
    shipped = (ROOT / "hf_posswap" / "quickstart" / "model").iterdir()
    assert {path.relative_to(ROOT).as_posix() for path in shipped} <= set(names)
    data = [path for kind in ("json", "css", "js") for path in (ROOT / "hf_posswap").rglob(f"*.{kind}")]
    assert {path.relative_to(ROOT).as_posix() for path in data} <= set(names)


def test_the_readme_of_the_wheel_has_no_links_into_the_repository(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text, readme = str(metadata.get_payload()), (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert "](.docs/" in readme
    assert "and more. It patches" in text or "/blob/main/.docs/pages/schemes.md). It patches" in text


def test_the_source_archive_holds_what_its_wheel_is_built_from(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: the source archive cannot be built")
    code = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"recipes/{name}.yaml" for name in shipped_recipes()} | {"pyproject.toml", "README.md"} <= held


@pytest.mark.slow
def test_an_installed_package_trains_from_an_empty_folder(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "gpt2")
    write_texts(tmp_path / "texts")
    (tmp_path / "empty").mkdir()

    def run(*command: str) -> str:
        env = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, "-P", *command], cwd=tmp_path / "empty", env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import hf_posswap; print(hf_posswap.__file__)").startswith(str(installed))
    assert "learned-to-rope" in run("-m", "hf_posswap", "recipes")
    settings = [
        f"model.name={tmp_path / 'gpt2'}",
        f"data.sources=[{{path: {tmp_path / 'texts'}}}]",
        "data.held_out=0.3",
        "data.length=32",
        f"data.cache={tmp_path / 'cache'}",
        "training.max_steps=2",
        "training.warmup_steps=1",
        "training.report_to=none",
    ]
    trained = run("-m", "hf_posswap", "train", "learned-to-rope", *settings, "out=run")
    assert says(trained, f"Saved to {tmp_path / 'empty' / 'run' / 'model'}")
    report: dict[str, Any] = json.loads((tmp_path / "empty" / "run" / "report.json").read_text())
    assert report["recipe"]["name"] == "learned-to-rope"
    assert report["phases"][0]["steps"] == 2
    run("-m", "hf_posswap", "recipes", "accelerate/cpu", "--copy")
    launch = ["-m", "accelerate.commands.launch", "--config_file", "cpu.yaml", "-m", "hf_posswap"]
    run(*launch, "train", "learned-to-rope", *settings, "out=launched")
    assert (tmp_path / "empty" / "launched" / "model" / "config.json").is_file()
