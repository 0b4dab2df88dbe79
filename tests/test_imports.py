"""Imports go one way, stay light, and are declared: read from the source of every module, and seen in a process."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FACADE = "__init__"
LAYERS = (
    {"errors", "utils", "versions"},
    {"compat"},
    {"geometry", "registry", "rope_math", "text"},
    {"kernels"},
    {"schemes", "families"},
    {"testing"},
    {"patching"},
    {"checkpoints", "plotting"},
    {"evaluation"},
    {"training", "comparison"},
    {"inspection", "integrations", "harness"},
    {FACADE},  # the public names
    {"quickstart", "testing.selfcheck", "testing.contract"},
    {"cli"},
    {"command"},
    {"__main__"},
)
# Folders that are a part of their own, above the part that they lie in.
APART = {"testing.contract", "testing.selfcheck"}
PLUGIN = "hf_posswap/testing/contract/plugin.py"
# The folders of patching: each imports those above it; those in one line never import each other.
PATCHING = (
    {"record"},
    {"edits"},
    {"sites.embedding", "sites.rotary", "sites.attention"},
    {"plan"},
    {"apply"},
    {"verify"},
    {"tools"},
    {"inspect"},
)
# What may be imported by its neighbours in the same layer, too.
SHARED = LAYERS[0] | LAYERS[2]
# What design and size keep out of each part, beyond the order of the layers.
FORBIDDEN = {"schemes": {"transformers"}}
OPTIONAL = {
    "peft", "datasets", "accelerate", "matplotlib", "lm_eval", "liger_kernel", "sentence_transformers", "gguf", "vllm",
    "onnx", "onnxscript", "onnxruntime", "pytest",
}  # fmt: skip
HEAVY = OPTIONAL | {"typer", "rich"}


@dataclass(frozen=True)
class Import:
    """One import: of `target`, a dotted name, at `where`, in `part` of the package; `eager`: when the file loads."""

    where: str
    part: str
    target: str
    eager: bool


def imports_of(package: Path) -> list[Import]:
    """Return every import in the tree of `package`."""
    found = []
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")]):
        module = (package.name, *path.relative_to(package).with_suffix("").parts)
        part = ".".join(module[1:3]) if ".".join(module[1:3]) in APART else module[1]
        for node, eager in _statements(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(package.parent)}:{node.lineno}"
            found += [Import(where, part, target, eager) for target in _targets(node, module)]
    return found


def _statements(tree: ast.AST, eager: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, eager
        is_late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        yield from _statements(node, eager and not is_late and not is_typing)


def _targets(node: ast.Import | ast.ImportFrom, module: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    above = module[: -node.level] if node.level else ()
    start = [*above, *([node.module] if node.module else [])]
    return [".".join([*start, alias.name]) for alias in node.names]


def _part(target: str, package: str) -> str | None:
    """Return the part of `package` that `target` is in; None: outside."""
    head, _, rest = target.partition(".")
    if head != package:
        return None
    inner = ".".join(rest.split(".")[:2])
    name = inner if inner in APART else rest.partition(".")[0]
    return name if any(name in layer for layer in LAYERS) else FACADE


def violations(package: Path) -> list[str]:
    """Return every import in `package` that goes the wrong way, one line each."""
    level = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    wrong = []
    for found in imports_of(package):
        if found.part not in level:
            wrong.append(f"{found.where}: {found.part} is in no layer")
            continue
        target = _part(found.target, package.name)
        if target is None:
            if found.target.partition(".")[0] in FORBIDDEN.get(found.part, ()):
                wrong.append(f"{found.where}: {found.part} imports {found.target}")
        elif target != found.part and level[target] + (target not in SHARED) > level[found.part]:
            wrong.append(f"{found.where}: {found.part} imports {target}")
    return wrong


def folder_of(module: str) -> str | None:
    """Return the folder of patching that a dotted `module` is in; None: it is in none."""
    below = module.removeprefix("hf_posswap.patching.")
    folders = (folder for row in PATCHING for folder in row)
    return None if below == module else next((one for one in folders if f"{below}.".startswith(f"{one}.")), None)


def patching_violations(package: Path) -> list[str]:
    """Return every import between folders of patching that goes the wrong way, one line each."""
    level = {folder: number for number, row in enumerate(PATCHING) for folder in row}
    wrong = []
    for found in imports_of(package):
        here = folder_of(".".join(Path(found.where.partition(":")[0]).with_suffix("").parts))
        there = folder_of(found.target)
        if here and there and here != there and level[there] >= level[here]:
            wrong.append(f"{found.where}: {here} imports {there}")
    return wrong


def circles(package: Path) -> list[set[str]]:
    """Return the sets of modules that import one another, deferred and TYPE_CHECKING imports counted.

    The package itself is left out: its public names are loaded when they are asked for.
    """
    files = {".".join((package.name, *p.relative_to(package).with_suffix("").parts)): p for p in package.rglob("*.py")}
    names = {name.removesuffix(".__init__") for name in files} - {package.name}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for found in imports_of(package):
        here = ".".join(Path(found.where.partition(":")[0]).with_suffix("").parts).removesuffix(".__init__")
        target = found.target if found.target in names else found.target.rpartition(".")[0]
        if here in names and target in names and target != here:
            graph[here].add(target)
    far = {name: _reached(graph, name) for name in graph}
    return [{name, *(one for one in far[name] if name in far[one])} for name in sorted(graph) if name in far[name]]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_no_modules_import_one_another() -> None:
    assert circles(ROOT / "hf_posswap") == []


def test_a_circle_is_found_through_deferred_and_typing_imports(tmp_path: Path) -> None:
    package = tmp_path / "hf_posswap"
    (package / "schemes").mkdir(parents=True)
    (package / "errors.py").write_text("def f():\n    from hf_posswap.schemes import rope")
    (package / "schemes" / "rope.py").write_text("if TYPE_CHECKING:\n    from hf_posswap.errors import PosswapError")
    (package / "registry.py").write_text("from hf_posswap import errors")
    assert circles(package)[0] == {"hf_posswap.errors", "hf_posswap.schemes.rope"}


def test_folders_of_patching_import_those_above_them_alone() -> None:
    assert patching_violations(ROOT / "hf_posswap") == []


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("edits/edit.py", "from hf_posswap.patching.plan.swap_plan import SwapPlan", "edits imports plan"),
        (
            "sites/rotary/plan.py",
            "from hf_posswap.patching.sites.attention import edits",
            "sites.rotary imports sites.att",
        ),
        ("plan/text.py", "def f():\n    from hf_posswap.patching.apply import applied", "plan imports apply"),
    ],
)
def test_a_folder_that_imports_a_later_one_is_caught(tmp_path: Path, path: str, line: str, message: str) -> None:
    planted = tmp_path / "hf_posswap" / "patching" / path
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(line)
    assert [found for found in patching_violations(tmp_path / "hf_posswap") if message in found]


def test_imports_go_one_way() -> None:
    assert violations(ROOT / "hf_posswap") == []


def test_the_page_lists_the_rooms_in_the_order_of_their_imports() -> None:
    page = (ROOT / "hf_posswap" / "README.md").read_text(encoding="utf-8")
    table = page.partition("| in `hf_posswap/` | contents |")[2].partition("\n\n")[0]
    rows = [set(re.findall(r"`([\w.]+)`", line.split("|")[1])) for line in table.splitlines() if line.startswith("| `")]
    order = [layer for layer in LAYERS if layer not in ({FACADE}, {"command"}, {"__main__"})]
    assert rows == [*order, {"command", "__main__"}]


def test_each_room_has_a_readme_whose_files_are_there() -> None:
    package = ROOT / "hf_posswap"
    absent = {}
    for room in (path for path in package.iterdir() if (path / "__init__.py").exists()):
        text = (room / "README.md").read_text(encoding="utf-8")
        names = re.findall(r"`([\w./]+(?:\.py|\.json|/))`", text)
        assert names, room
        absent[room.name] = [
            name
            for name in names
            if not any(room.rglob(name)) and not (package / name).exists() and not (ROOT / name).exists()
        ]
    assert {room: names for room, names in absent.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("compat/torch_modules.py", "from hf_posswap.geometry import Layout", "compat imports geometry"),
        ("utils/progress.py", "from hf_posswap.compat import torch_modules", "utils imports compat"),
        ("rope_math.py", "from hf_posswap.schemes import Rope", "rope_math imports schemes"),
        ("kernels/merge.py", "from hf_posswap.schemes import piece", "kernels imports schemes"),
        ("schemes/rope.py", "import transformers.models", "schemes imports transformers.models"),
        ("schemes/rope.py", "def f():\n    from transformers import PreTrainedModel", "schemes imports transformers"),
        ("schemes/rope.py", "from hf_posswap.families import locate", "schemes imports families"),
        ("families/bert.py", "from ..schemes.rope import Rope", "families imports schemes"),
        ("families/bert.py", "from hf_posswap import schemes", "families imports schemes"),
        ("families/bert.py", "if TYPE_CHECKING:\n    from hf_posswap import patching", "families imports patching"),
        ("patching/plan/swap_plan.py", "from hf_posswap import load", "patching imports __init__"),
        ("training/loop.py", "from hf_posswap.comparison import compare", "training imports comparison"),
        ("evaluation/loop.py", "import hf_posswap.training.loop", "evaluation imports training"),
        ("quickstart/run.py", "from hf_posswap.cli import main", "quickstart imports cli"),
        ("testing/tiny.py", "from hf_posswap.patching import plan_swap", "testing imports patching"),
        (
            "patching/verify/run.py",
            "from hf_posswap.testing.contract.pairs import Pair",
            "patching imports testing.c",
        ),
        ("testing/contract/points/run.py", "from hf_posswap.cli import main", "testing.contract imports cli"),
        ("helpers.py", "import os", "helpers is in no layer"),
    ],
)
def test_a_wrong_import_is_caught(tmp_path: Path, path: str, line: str, message: str) -> None:
    planted = tmp_path / "hf_posswap" / path
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(line)
    assert [found for found in violations(tmp_path / "hf_posswap") if message in found]


def test_allowed_imports_pass(tmp_path: Path) -> None:
    package = tmp_path / "hf_posswap"
    (package / "schemes").mkdir(parents=True)
    (package / "schemes" / "rope.py").write_text(
        "from .common import checks\nfrom ..rope_math import rotate\nimport torch"
    )
    (package / "registry.py").write_text("from hf_posswap import errors, geometry")
    (package / "geometry.py").write_text("from hf_posswap.compat import torch_modules")
    (package / "__init__.py").write_text("from hf_posswap.patching import plan_swap")
    (package / "cli.py").write_text(
        "from hf_posswap import plan_swap\nfrom hf_posswap.quickstart import run_quickstart"
    )
    assert violations(package) == []


def test_optional_packages_are_imported_where_they_are_used() -> None:
    eager = [found for found in imports_of(ROOT / "hf_posswap") if found.eager]
    optional = [found for found in eager if found.target.partition(".")[0] in OPTIONAL]
    assert {(found.where.partition(":")[0], found.target) for found in optional} == {(PLUGIN, "pytest")}


def test_an_eager_import_is_told_from_a_late_one(tmp_path: Path) -> None:
    (tmp_path / "plot.py").write_text("import matplotlib\ndef f():\n    import matplotlib.pyplot\n")
    assert [(found.target, found.eager) for found in imports_of(tmp_path)] == [
        ("matplotlib", True),
        ("matplotlib.pyplot", False),
    ]


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = "train plot lm-eval sentences fused gguf onnx vllm axolotl testing".split()
    lines = [*project["dependencies"], *(line for extra in names for line in extras[extra])]
    declared = {re.split(r"[^\w-]", line)[0] for line in lines}
    homes = packages_distributions()
    used = {found.target.partition(".")[0] for found in imports_of(ROOT / "hf_posswap")}
    # triton comes with torch's builds for GPUs; without it the rotation is PyTorch's operators
    outside = used - set(sys.stdlib_module_names) - {"hf_posswap", "triton"}
    # what runs on a GPU alone is not installed here: it goes by its name
    undeclared = [name for name in outside if not declared & {*homes.get(name, ()), name.replace("_", "-")}]
    assert undeclared == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    # transformers 5.14 loads rich by itself: only what the package adds counts
    code = (
        "import sys, torch, transformers; before = set(sys.modules); import hf_posswap; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "hf_posswap" in loaded
    assert loaded & HEAVY == set()
