"""Public names: one list of them, in a stub; each there, and each loading no more than its own home."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_posswap
from hf_posswap.utils.public_names import after_import, read_homes

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = {"peft", "datasets", "accelerate", "matplotlib", "lm_eval", "liger_kernel", "sentence_transformers"}
CORE = {"compat", "errors", "geometry", "registry", "rope_math", "utils"}
SCHEMES = CORE | {"kernels", "schemes"}
PATCHING = SCHEMES | {"families", "patching", "testing", "versions"}
CHECKPOINTS = PATCHING | {"checkpoints"}
MAY_LOAD = {
    "errors": {"errors", "utils"},
    "rope_math": CORE,
    "schemes": SCHEMES,
    "families": CORE | {"families"},
    "patching": PATCHING,
    "checkpoints": CHECKPOINTS,
    "comparison": CHECKPOINTS | {"comparison", "evaluation", "plotting", "text"},
    "training.adapting": {"training", "utils"},
    "training.search": PATCHING | {"training", "evaluation", "text"},
    "training": CHECKPOINTS | {"training"},
    "inspection.checking": CHECKPOINTS | {"inspection"},
    "inspection.advice": CHECKPOINTS | {"inspection", "evaluation", "training"},
}
"""Parts of the package that a name may load, by the part that is its home: the first that the home lies in."""
BRINGS = {"PosswapCallback": {"accelerate", "peft"}}
"""Optional packages that transformers itself loads with the class that a name is derived from."""


def stub_of(package: str) -> Path:
    return ROOT / package.replace(".", "/") / "__init__.pyi"


def homes_of(package: str) -> dict[str, str]:
    return read_homes(package, stub_of(package).read_text(encoding="utf-8"))


PACKAGES = [
    ".".join(path.relative_to(ROOT).parent.parts) for path in sorted((ROOT / "hf_posswap").rglob("__init__.pyi"))
]
HOMES = homes_of("hf_posswap")


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Return the modules that each public name loads in a fresh process; "": those of `import hf_posswap` itself.

    Of names that one module defines the first is asked for: the others are looked up in the same module, and that they
    are there `test_a_packages_names_are_those_of_its_stub` says. A home with a stub loads each name by itself.
    """
    first = {home: name for name, home in reversed(HOMES.items()) if not stub_of(home).exists()}
    asked = {name: first.get(home, name) for name, home in HOMES.items()}
    command = [sys.executable, str(ROOT / "tests" / "utils" / "loaded_child.py"), *dict.fromkeys(asked.values())]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    found = {name: set(modules) for name, modules in json.loads(run.stdout).items()}
    return {"": found[""]} | {name: found[one] for name, one in asked.items()}


def parts_in(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("hf_posswap.")}


def test_importing_the_package_loads_only_its_hooks(loaded: dict[str, set[str]]) -> None:
    assert parts_in(loaded[""]) == {"utils"}


@pytest.mark.parametrize("name", HOMES)
def test_a_public_name_loads_no_part_above_its_home(loaded: dict[str, set[str]], name: str) -> None:
    allowed = next(parts for home, parts in MAY_LOAD.items() if f"{HOMES[name]}.".startswith(f"hf_posswap.{home}."))
    assert parts_in(loaded[name]) - allowed == set()
    assert HOMES[name] in loaded[name]
    assert {module.partition(".")[0] for module in loaded[name]} & OPTIONAL - BRINGS.get(name, set()) == set()


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("plan_swap", ("patching.apply", "patching.verify", "patching.tools", "patching.inspect")),
        ("patch_model", ("patching.inspect", "patching.tools")),
        ("load", ("checkpoints.native", "checkpoints.exports", "checkpoints.doctor", "checkpoints.push")),
        ("save", ("checkpoints.load", "checkpoints.push", "checkpoints.native")),
        ("Candidate", ("comparison.run", "evaluation.retrieval")),
        ("EvalSettings", ("comparison.run", "comparison.candidates")),
        ("search_longrope", ("evaluation.retrieval", "evaluation.passkey", "training.search.pairs")),
        ("load_recipe", ("training.engine",)),
    ],
)
def test_a_public_name_leaves_its_neighbours_alone(
    loaded: dict[str, set[str]], name: str, absent: tuple[str, ...]
) -> None:
    assert {module for module in loaded[name] if module.removeprefix("hf_posswap.").startswith(absent)} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_packages_names_are_those_of_its_stub(package: str) -> None:
    module, homes = importlib.import_module(package), homes_of(package)
    assert module.__all__ == list(homes)
    assert set(homes) <= set(dir(module))
    for name, home in homes.items():
        value = getattr(module, name)
        assert value is getattr(importlib.import_module(home), name, value)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_stub_gives_each_name_once_to_type_checkers_too_and_hides_no_module(package: str) -> None:
    imports = [node for node in ast.parse(stub_of(package).read_text()).body if isinstance(node, ast.ImportFrom)]
    given = [(node.module, alias) for node in imports for alias in node.names]
    assert all(alias.name == alias.asname for _, alias in given), "a type checker exports `name as name` alone"
    assert len(given) == len({alias.name for _, alias in given})
    # importing a module binds its name in its package: a function of that name would be lost
    modules = {path.stem for path in stub_of(package).parent.iterdir()}
    assert [alias.name for module, alias in given if module != package and alias.name in modules] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hf_posswap' has no attribute 'patch_modle'"):
        _ = hf_posswap.patch_modle
    with pytest.raises(ImportError, match="cannot import name 'perplexiti'"):
        exec("from hf_posswap.evaluation import perplexiti")


def test_the_registries_are_full_when_they_are_asked() -> None:
    code = (
        "from hf_posswap.schemes.base import SCHEMES\n"
        "from hf_posswap.families.base import FAMILIES\n"
        "print(len(SCHEMES), len(FAMILIES))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    schemes = {path.stem for path in (ROOT / "hf_posswap" / "schemes").glob("[a-z]*.py")} - {"base"}
    registered, families = map(int, run.stdout.split())
    assert registered >= len(schemes)
    assert families >= 20


@pytest.mark.parametrize("before", ["probe", "interrupted"])
def test_what_waits_for_an_import_is_done_by_the_import_that_succeeds(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that was only looked for, or whose import Ctrl-C ended, is still watched; two actions run once each."""
    name = f"watched_{before}"
    (tmp_path / f"{name}.py").write_text(
        "import sys\nif not hasattr(sys, '_watched'):\n"
        "    sys._watched = True\n    raise KeyboardInterrupt\nREADY = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "_watched", True, raising=False)
    acted: list[int] = []
    for number in (1, 2):
        after_import(name, "READY", lambda module, number=number: acted.append(number * module.READY))
    if before == "probe":
        assert importlib.util.find_spec(name) is not None
    else:
        del sys._watched  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module(name)
    assert acted == []
    importlib.reload(importlib.import_module(name))
    assert acted == [1, 2]
    after_import(name, "READY", lambda module: acted.append(3))
    assert acted == [1, 2, 3]


def test_a_probe_for_transformers_leaves_the_auto_classes_to_be_registered() -> None:
    code = (
        "import importlib.util, hf_posswap\n"
        "assert importlib.util.find_spec('transformers.models.auto.configuration_auto')\n"
        "from transformers import AutoConfig\n"
        "import sys\n"
        "print('hf_posswap.checkpoints.auto' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "True\n"
