"""The project as a whole: the CI runs the README's commands, public names are documented, no file leaks a machine."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib
import typing
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import yaml

import hf_posswap
from hf_posswap import errors, families, schemes

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Folders of one machine, and the data beside the project, which only conftest.py may look for.
MACHINE = re.compile(r"(?<![\w.~-])/(?:work|root|home|tmp|opt|Users|mnt)/|\.\./shared")
CALLED = (FunctionType, classmethod, staticmethod, property)


def tracked_files() -> list[Path]:
    """Return every file that the repository holds or would hold with the next commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def machine_paths(files: Iterable[Path]) -> list[str]:
    """Return every line of `files` that names a path of one machine."""
    found = []
    for path in files:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [
            f"{path.name}:{number}: {line.strip()[:80]}" for number, line in enumerate(lines, 1) if MACHINE.search(line)
        ]
    return found


def test_no_file_names_a_path_of_a_machine() -> None:
    allowed = {"CITATION.cff", "LICENSE", "README.md", "hf_posswap", "pyproject.toml", "recipes", "tests"}
    names = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    assert {name for name in names if not name.startswith(".")} == allowed


def test_hooks_run_what_the_development_tools_hold() -> None:
    installed = {re.split(r"[^\w-]", line)[0] for line in PROJECT["optional-dependencies"]["dev"]}
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {hook["entry"].split()[0] for hook in hooks} <= installed
    assert {hook["language"] for hook in hooks} == {"system"}, "a hook that downloads its tool may differ from the CI"


def test_the_support_table_is_there() -> None:
    page = (ROOT / ".docs" / "pages" / "support.md").read_text(encoding="utf-8")
    table = page.partition("<!-- support table -->")[2].partition("<!-- /support table -->")[0]
    assert "| scheme | kind | guarantees |" in table, "run the light contract, then python recipes/support_table.py"


def test_the_readme_counts_as_the_support_table_does() -> None:
    page = (ROOT / ".docs" / "pages" / "support.md").read_text(encoding="utf-8")
    counts = [
        re.findall(r"\*\*(\d+) of (\d+)\b.* transformers ([\d.]+) can be patched, (\d+) pairs", text)
        for text in (README, page)
    ]
    assert len(counts[0]) == 1
    assert counts[0] == counts[1]


@pytest.mark.parametrize("package", [hf_posswap, schemes, families], ids=lambda package: package.__name__)
def test_public_names_are_sorted_importable_and_documented(package: ModuleType) -> None:
    names = package.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert len(names) == len(set(names))
    values = {name: getattr(package, name) for name in names}
    aliases = {name for name, value in values.items() if typing.get_origin(value)}  # a Literal cannot hold words
    assert [name for name in sorted(set(names) - aliases) if not documented(name, values[name])] == []


@pytest.mark.parametrize("package", [schemes, families], ids=lambda package: package.__name__)
def test_what_its_authors_need_is_public(package: ModuleType) -> None:
    needed = {
        schemes: {"SCHEMES", "Geometry", "Kind", "Mechanism", "Scheme", "TableScheme", "Traits", "make_scheme"},
        families: {"FAMILIES", "Family", "StackSpec", "TableSpec", "family_of", "locate", "register"},
    }
    assert needed[package] <= set(package.__all__)
    assert f"from {package.__name__} import" in str(package.__doc__), "its docstring shows how one is written"


def documented(name: str, public: object) -> bool:
    """Return whether `public` has words of its own: a dataclass without them is given its signature."""
    words = vars(public).get("__doc__") if isinstance(public, type) else public.__doc__
    return bool(words and words.strip()) and not words.startswith(f"{name}(")


@pytest.mark.parametrize("package", [hf_posswap, schemes, families], ids=lambda package: package.__name__)
def test_public_methods_have_words_of_their_own_or_of_what_they_override(package: ModuleType) -> None:
    classes = [value for value in (getattr(package, name) for name in package.__all__) if isinstance(value, type)]
    assert [f"{one.__name__}.{name}" for one in classes for name in silent_methods(one)] == []


def silent_methods(owner: type) -> list[str]:
    """Return the public methods and properties that `owner` defines without words, its bases having none either."""
    own = [name for name, value in vars(owner).items() if isinstance(value, CALLED) and not name.startswith("_")]
    return [name for name in own if not any(vars(base)[name].__doc__ for base in owner.__mro__ if name in vars(base))]


def test_a_silent_method_is_found() -> None:
    class Spoken:
        def told(self) -> None:
            """Say it."""

    class Silent(Spoken):
        def told(self) -> None: ...
        def untold(self) -> None: ...

    assert silent_methods(Silent) == ["untold"]


def test_an_undocumented_name_is_found() -> None:
    silent = dataclasses.make_dataclass("Silent", ["x"], bases=(errors.SchemeError,))
    assert not documented("Silent", silent)
    assert not documented("nothing", lambda: None)
    assert documented("SchemeError", errors.SchemeError)


@pytest.mark.parametrize(
    "name",
    [
        "describe_positions", "errors", "explain", "list_families", "list_schemes", "load", "patch_model", "patched",
        "plan_swap", "supports", "unpatch_model", "verify_swap",
    ],
)  # fmt: skip
def test_the_agreed_names_are_public(name: str) -> None:
    assert name in hf_posswap.__all__
    assert name in dir(hf_posswap)


def test_no_path_is_expanded_but_by_the_function_that_says_whose_home_is_missing() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_posswap").rglob("*.py")}
    expanding = {name for name in files if re.search(r"\.expanduser\b", (ROOT / name).read_text(encoding="utf-8"))}
    assert expanding == {"hf_posswap/utils/user_paths.py"}
