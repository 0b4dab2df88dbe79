"""Code that goes with a checkpoint: the package's own, complete, and enough where the package is missing."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

import hf_posswap
from hf_posswap.errors import PluginWarning
from hf_posswap.patching.record.remote_code import ENTRY, LEAST_TRANSFORMERS, code_files
from hf_posswap.schemes import SCHEMES
from tests.checkpoints import fresh
from tests.contract.models import LENGTH
from tests.contract.pairs import Pair, words
from tests.toys.registration import TOY_MODEL, TOY_SCHEME, registered

IDS = words(2, LENGTH + 8)
PACKAGE = Path(hf_posswap.__file__).parent


def tiny(scheme: Any = "rope", **options: Any) -> Any:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    hf_posswap.patch_model(model, scheme, max_length=32, **options)
    return model


@pytest.mark.slow
def test_bundled_code_loads_saves_and_loads_again_where_the_package_is_missing(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    with registered():
        for name in ("gpt2-kerple", "bert-rope", f"llama-{TOY_SCHEME}"):
            model, _, scheme = name.partition("-")
            fresh.store(Pair(model, scheme).swapped(), root / name, IDS)
    found = fresh.load_all(root, "remote")
    assert found.pop("side by side") == {"first": 0, "last": 0}
    assert found == {name: {"auto": 0, "again": 0} for name in found}
    assert len(found) == 3


BUNDLED = """
import copy, inspect, pickle, sys, torch
from concurrent.futures import ThreadPoolExecutor
from transformers import AutoConfig, AutoModelForCausalLM

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_posswap":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
*folders, io = sys.argv[1:]
ids, expected = torch.load(io)

# the code in threads, the weights one by one: transformers 5.24 leaves heads untied where threads load weights at once
def build(folder):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return type(AutoModelForCausalLM.from_config(config, trust_remote_code=True))

with ThreadPoolExecutor(4) as pool:
    classes = list(pool.map(build, folders))
models = [AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval() for folder in folders]
assert list(map(type, models)) == classes
first = models[0]
models += [torch.compile(first, backend="eager", fullgraph=True), copy.deepcopy(first)]
models += [pickle.loads(pickle.dumps(first))]
for model in models:
    assert torch.equal(model(ids).logits, expected)
assert inspect.getsource(type(first.transformer.posswap)).startswith("class ")
"""


@pytest.mark.slow
def test_bundled_code_loads_in_threads_compiles_copies_and_pickles(tmp_path: Path, stock_compiles: None) -> None:
    model, ids = tiny("alibi").eval(), torch.arange(9)[None]
    folders = [str(tmp_path / name) for name in "abcd"]
    for folder in folders:
        model.save_pretrained(folder)
    torch.save((ids, model(ids).logits.detach()), tmp_path / "io.pt")
    done = subprocess.run(
        [sys.executable, "-c", BUNDLED, *folders, str(tmp_path / "io.pt")],
        env={**os.environ, "HF_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


OTHER_MODELS_GONE = """
import sys, torch
from transformers import AutoModelForCausalLM

class Missing:
    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        moved = parts[:2] == ["transformers", "models"] and parts[-1].startswith("modeling_")
        if parts[0] == "hf_posswap" or (moved and parts[2] not in ("auto", "gpt2")):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
folder, io = sys.argv[1:]
ids, expected = torch.load(io)
assert torch.equal(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()(ids).logits, expected)
"""


def test_bundled_code_needs_the_code_of_its_own_model_alone(tmp_path: Path) -> None:
    """A release of transformers that moves another model's code breaks no checkpoint."""
    model, ids = tiny("alibi").eval(), torch.arange(9)[None]
    model.save_pretrained(tmp_path / "saved")
    torch.save((ids, model(ids).logits.detach()), tmp_path / "io.pt")
    done = subprocess.run(
        [sys.executable, "-c", OTHER_MODELS_GONE, str(tmp_path / "saved"), str(tmp_path / "io.pt")],
        env={**os.environ, "HF_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_plain_transformers_refuses_and_says_why(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    for name in ("gpt2-rope", "llama-alibi"):
        model, _, scheme = name.partition("-")
        fresh.store(Pair(model, scheme).swapped(), root / name, IDS)
    without_code = root / "without-code"
    shutil.copytree(root / "llama-alibi", without_code)
    config = json.loads((without_code / "config.json").read_text())
    del config["auto_map"]
    (without_code / "config.json").write_text(json.dumps(config))
    found = fresh.load_all(root, "plain")
    for name in ("gpt2-rope", "llama-alibi"):
        assert "contains custom code" in str(found[name]["auto"])
        assert "trust_remote_code=True" in str(found[name]["auto"])
    assert "has model type `posswap`" in str(found["without-code"]["auto"])
    for name in ("gpt2-rope", "llama-alibi"):
        assert "pip install hf-posswap, then hf_posswap.load" in str(found[name]["forced"])


def test_the_plugin_wins_over_the_bundled_code_with_and_without_the_flag(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    for flag in (None, True, False):
        config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=flag)
        assert type(config).__module__ == "hf_posswap.patching.record.config_class"
        assert not hasattr(config, "auto_map")


def bundled(model: Any) -> dict[str, str]:
    """Return the sources in the one file of code of a swapped model, by the modules' names."""
    (code,) = code_files(model.config).values()
    (found,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(code).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SOURCES"
    ]
    return dict(found)


def test_the_code_is_one_file_in_which_transformers_finds_all_imports(tmp_path: Path) -> None:
    tiny("yarn", factor=2.0).save_pretrained(tmp_path)
    entry = tmp_path / f"{ENTRY}.py"
    assert list(tmp_path.glob("*.py")) == [entry]
    assert not get_relative_import_files(entry)  # those that transformers would fetch beside it
    assert "hf_posswap" not in get_imports(entry)
    for name in get_imports(entry):
        importlib.import_module(name)


def test_the_code_is_the_packages_own_but_for_its_imports() -> None:
    sources = bundled(tiny("self_extend"))
    for name, source in sources.items():
        own = (PACKAGE / f"{name.replace('.', '/')}.py").read_text()
        assert _without_imports(source) == _without_imports(own)
        comments = [line for line in own.splitlines() if line.lstrip().startswith("#")]
        assert [line for line in source.splitlines() if line.lstrip().startswith("#")] == comments


def test_each_module_in_the_code_is_readable_after_those_that_it_imports_first() -> None:
    (code,) = code_files(tiny("alibi").config).values()
    names = [line.split('"')[1] for line in code.splitlines() if re.match(r'    "[\w.]+": r\'\'\'', line)]
    sources = bundled(tiny("alibi"))
    assert names == list(sources)  # none is written as one line of escapes
    for number, name in enumerate(names):
        for node in ast.parse(sources[name]).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "hf_posswap":
                module = str(node.module).partition(".")[2]
                needed = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
                assert module in names[:number] or set(needed) <= set(names[:number])


def _without_imports(source: str) -> str:
    class Blank(ast.NodeTransformer):
        def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
            ours = node.level or str(node.module).startswith("hf_posswap")
            return ast.Pass() if ours else node

        def generic_visit(self, node: ast.AST) -> ast.AST:
            super().generic_visit(node)
            if hasattr(node, "body") and isinstance(node.body, list):
                node.body = [child for child in node.body if not isinstance(child, ast.Pass)]
            return node

    return ast.dump(Blank().visit(ast.parse(source)))


def test_only_what_the_scheme_needs_goes_along_and_the_version_is_recorded() -> None:
    names = bundled(tiny("alibi"))
    assert "schemes.alibi" in names
    assert not [name for name in names if "kerple" in name or "self_extend" in name]
    entry = ast.parse(code_files(tiny("alibi").config)[f"{ENTRY}.py"])
    values = [
        n.value for n in entry.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]).endswith("VERSION")
    ]
    assert [ast.literal_eval(value) for value in values] == [hf_posswap.__version__]


def test_an_older_transformers_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    least = ".".join(map(str, LEAST_TRANSFORMERS))
    assert [one for one in wanted if one.startswith(f"transformers>={least},<")]
    monkeypatch.setattr("transformers.__version__", "5.13.2")
    with pytest.raises(ImportError, match=rf"needs transformers {least} or newer, not 5.13.2"):
        exec(code_files(tiny().config)[f"{ENTRY}.py"], {"__name__": "older"})


def test_a_pushed_config_takes_its_code_along(tmp_path: Path) -> None:
    tiny().config.save_pretrained(tmp_path)
    assert (tmp_path / f"{ENTRY}.py").exists()


FOREIGN = """
from dataclasses import dataclass
from typing import ClassVar
{extra}
from hf_posswap import Alibi
from hf_posswap.schemes import SCHEMES

@SCHEMES.register("theirs")
@dataclass(frozen=True)
class Theirs(Alibi):
    name: ClassVar[str] = "theirs"
"""


@pytest.mark.parametrize(
    ("extra", "has_file", "why"),
    [
        ("", True, None),
        ("import pytest", True, "imports pytest, which cannot be saved"),
        ("", False, "is defined in no module file"),
    ],
)
def test_another_packages_scheme_goes_along_or_the_save_says_that_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, has_file: bool, why: str | None
) -> None:
    name = "someones_schemes"
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    source = FOREIGN.format(extra=extra)
    if has_file:
        (tmp_path / "theirs.py").write_text(source)
        module.__file__ = str(tmp_path / "theirs.py")
    exec(compile(source, name, "exec"), module.__dict__)
    try:
        model, folder, ids = tiny("theirs").eval(), tmp_path / "saved", torch.zeros(1, 32, dtype=torch.long)
        if why is None:
            model.save_pretrained(folder)
        else:
            with pytest.warns(PluginWarning, match=why):
                model.save_pretrained(folder)
        if why is None:
            assert f'"extra_{name}": ' in (folder / f"{ENTRY}.py").read_text()
        assert (folder / f"{ENTRY}.py").exists() is (why is None)
        assert ("auto_map" in json.loads((folder / "config.json").read_text())) is (why is None)
        assert torch.equal(hf_posswap.load(folder)(ids).logits, model(ids).logits)
    finally:
        SCHEMES.remove("theirs")


def test_another_packages_family_does_not_go_along_and_the_save_says_so(tmp_path: Path) -> None:
    with registered():
        model = Pair(TOY_MODEL, "alibi").swapped()
        with pytest.warns(PluginWarning, match="family 'house' comes from another package"):
            model.save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_showing_a_config_warns_of_nothing() -> None:
    with registered(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "posswap" in repr(Pair(TOY_MODEL, "alibi").swapped().config)
