"""Other packages' private names are touched in hf_posswap/compat alone, and each touch there has a test of its name."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import types
from pathlib import Path

import pytest

import hf_posswap
from tests.compat.private_touches import all_touches

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hf_posswap"


def test_private_names_are_touched_in_compat_alone() -> None:
    assert all_touches(PACKAGE) == {}


@pytest.mark.parametrize(
    ("path", "line", "name"),
    [
        ("patching/a.py", "model._tp_size", "_tp_size"),
        ("patching/a.py", "model._tp_size = 1", "_tp_size"),
        ("patching/a.py", "getattr(model, '_tp_size', None)", "_tp_size"),
        ("patching/a.py", "name.replace('_orig_mod.', '')", "_orig_mod."),
        ("patching/a.py", "class Rows(Module):\n    _hidden = 1", "_hidden"),
        ("patching/a.py", "class Rows(Module):\n    def _hidden(self): ...", "_hidden"),
        ("patching/a.py", "class Rows(Module):\n    def forward(self): return self._buffers", "_buffers"),
        ("patching/a.py", "torch._C.active()", "_C"),
        ("patching/a.py", "cached_file(name, _raise_exceptions_for_gated_repo=False)", "_raise_exceptions_for_gated_r"),
        ("patching/a.py", "config.__class__ = Other", "__class__"),
        ("patching/a.py", "import gc\ngc.get_referrers(model)", "get_referrers"),
        ("patching/a.py", "from torch._dynamo import eval_frame", "torch._dynamo"),
        ("patching/a.py", "from transformers.utils import _hidden", "transformers.utils._hidden"),
        ("patching/a.py", "def f():\n    from transformers import masking_utils", ""),
        ("patching/a.py", "from transformers.masking_utils import mask", "transformers.masking_utils"),
        ("patching/a.py", "hasattr(code, 'create_causal_mask')", "create_causal_mask"),
        ("patching/a.py", "cache.get_query_offset(0)", "get_query_offset"),
        ("patching/a.py", "hasattr(layer, 'base_layer')", "base_layer"),
        ("families/interfaces/a.py", "module._reshape(x)", "_reshape"),
        ("families/interfaces/a.py", "def forward(self, x, past_key_values=None): ...", "past_key_values"),
        ("patching/a.py", "model(x, past_key_values=cache)", "past_key_values"),
        ("patching/a.py", "cache = given.get('layer_past')", "layer_past"),
        ("patching/a.py", "cache = output.past_key_values", "past_key_values"),
    ],
)
def test_a_planted_touch_is_found(tmp_path: Path, path: str, line: str, name: str) -> None:
    (tmp_path / "compat").mkdir()
    (tmp_path / "compat" / "touching.py").write_text("def f(module):\n    return module._hidden\n")
    planted = tmp_path / path
    planted.parent.mkdir(parents=True)
    planted.write_text(line)
    found = all_touches(tmp_path).get(path, [])
    assert any(name in entry for entry in found) if name else found == []


def test_names_of_the_package_itself_are_no_touches(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        '"""Says `model._tp_size`."""\n'
        "import sys\n"
        "MARKED, FRAMES = '_posswap_marked', sys._current_frames\n"
        "from hf_posswap.other import _helper\n"
        "class Own:\n"
        "    def __init__(self): self._kept = _helper(1)\n"
        "    def _method(self): return self._kept, self._inherited\n"
        "def _function(own): return own._kept, getattr(own, '_kept'), own._method(), fields._replace(a=1)\n"
        "def f(model): return model._posswap, type(model).__name__, f'{model}_kept', name.endswith('_stderr')\n"
    )
    (tmp_path / "base.py").write_text("class Base:\n    def _inherited(self): ...\n")
    assert all_touches(tmp_path) == {}


def test_no_class_outside_compat_overrides_a_private_method_of_another_package() -> None:
    found = []
    for info in pkgutil.walk_packages(hf_posswap.__path__, "hf_posswap."):
        if info.name.startswith("hf_posswap.compat.") or info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # an extra that is not installed here
            continue
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == info.name:
                found += [f"{info.name}.{cls.__name__}.{name}" for name in _overridden(cls)]
    assert found == []


def _overridden(cls: type) -> list[str]:
    methods = (value for value in vars(cls).values() if isinstance(value, types.FunctionType))
    own = [one.__name__ for one in methods if one.__module__ == cls.__module__ and re.match(r"_[a-z]", one.__name__)]
    foreign = [base for base in cls.__mro__[1:] if not base.__module__.startswith("hf_posswap")]
    return [name for name in own if any(name in vars(base) for base in foreign)]


def test_an_override_is_found() -> None:
    from transformers import Trainer

    class Ours(Trainer):
        def _save_checkpoint(self, model, trial):  # type: ignore[no-untyped-def]
            """Override it."""

        def _helper(self) -> None:
            """Be none."""

    assert _overridden(Ours) == ["_save_checkpoint"]


def test_every_function_of_compat_has_a_test_of_its_name() -> None:
    missing, undocumented = [], []
    for path in sorted((PACKAGE / "compat").glob("[a-z]*.py")):
        beside = ROOT / "tests" / "compat" / f"test_{path.name}"
        tested = set(re.findall(r"^def test_(\w+)", beside.read_text(encoding="utf-8"), re.MULTILINE))
        for function in _public_functions(path):
            text = ast.get_docstring(function) or ""
            if "Touches" not in text:
                undocumented.append(f"{path.name}: {function.name}")
            if not any(name == function.name or name.startswith(f"{function.name}_") for name in tested):
                missing.append(f"test_{path.name}: test_{function.name}")
    assert (missing, undocumented) == ([], [])


def _public_functions(path: Path) -> list[ast.FunctionDef]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
