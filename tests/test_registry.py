"""The registry: duplicates, misses, and other packages' entry points, proved with real packages on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_posswap.errors import DuplicateNameError, PluginWarning, PosswapError, UnknownNameError
from hf_posswap.registry import Registry

ROOT = Path(__file__).resolve().parents[1]


def install(folder: Path, package: str, group: str, target: str, source: str) -> None:
    """Lay out what pip would: a module and the metadata that announces an entry point."""
    (folder / f"{package}.py").write_text(source)
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{package} = {target}\n")


def numbers() -> Registry[int]:
    registry: Registry[int] = Registry("number", "posswap_tests.none")
    registry.add("two", 2)
    registry.add("one", 1)
    return registry


def test_it_holds_what_it_was_given_in_order_of_name() -> None:
    registry = numbers()
    assert (list(registry), len(registry), registry.items()) == (["one", "two"], 2, [("one", 1), ("two", 2)])
    assert "one" in registry
    assert "three" not in registry
    registry.remove("one")
    assert list(registry) == ["two"]


def test_the_decorator_returns_what_it_registers() -> None:
    registry: Registry[type] = Registry("class", "posswap_tests.none")

    @registry.register("here")
    class Here:
        pass

    assert registry.get("here") is Here


def test_a_taken_name_raises_and_keeps_the_first() -> None:
    registry = numbers()
    with pytest.raises(DuplicateNameError, match=r"number 'one' is already registered as 1; choose another name"):
        registry.add("one", 11)
    assert registry.get("one") == 1
    assert registry.add("one", 1) == 1  # the same item again is no clash


def test_none_can_be_held_and_is_not_replaced() -> None:
    registry: Registry[int | None] = Registry("number", "posswap_tests.none")
    registry.add("nothing", None)
    with pytest.raises(DuplicateNameError):
        registry.add("nothing", 1)


@pytest.mark.parametrize("name", ["oen", "", None, 3, ["one"]])
def test_a_miss_names_what_was_asked_and_what_there_is(name: object) -> None:
    with pytest.raises(UnknownNameError) as caught:
        numbers().get(name)  # type: ignore[arg-type]
    assert repr(name) in str(caught.value)
    assert "Known: one, two." in str(caught.value)
    assert isinstance(caught.value, PosswapError)
    assert caught.value.__cause__ is None


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'one'"):
        numbers().get("onee")


def test_an_installed_package_is_loaded_at_first_use_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import sys\nsys.modules['__main__'].posswap_toy.add('seven', 7)\n"
    install(tmp_path, "posswap_toy_numbers", "posswap_tests.numbers", "posswap_toy_numbers", source)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[int] = Registry("number", "posswap_tests.numbers")
    monkeypatch.setattr(sys.modules["__main__"], "posswap_toy", registry, raising=False)
    assert "posswap_toy_numbers" not in sys.modules
    assert registry.get("seven") == 7
    assert list(registry) == ["seven"]
    del sys.modules["posswap_toy_numbers"]
    registry.items()  # would import it anew if it looked again
    assert "posswap_toy_numbers" not in sys.modules


def test_a_broken_package_warns_and_leaves_the_rest_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "posswap_broken", "posswap_tests.broken", "posswap_broken:missing", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[int] = Registry("number", "posswap_tests.broken")
    registry.add("one", 1)
    with pytest.warns(
        PluginWarning, match=r"'posswap_broken' = 'posswap_broken:missing'.*could not be loaded.*missing"
    ):
        assert registry.get("one") == 1
    sys.modules.pop("posswap_broken", None)


_MAKE = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from hf_posswap import patch_model, verify_swap
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16)).eval()
patch_model(model, "window-toll", window=3)
verify_swap(model)
model.save_pretrained(sys.argv[1])
print(model(torch.arange(40)[None]).logits.double().sum().item())
"""
_LOAD = """
import sys
import torch
import hf_posswap
model = hf_posswap.load(sys.argv[1])
assert model.config.posswap["scheme"] == {"name": "window-toll", "window": 3, "toll": 2.0}
print(model(torch.arange(40)[None]).logits.double().sum().item())
"""


@pytest.mark.slow
def test_a_scheme_of_an_installed_package_does_all_that_others_do(tmp_path: Path) -> None:
    """The toy of the pages, in a package of its own: listed, patched in, saved, loaded, and missed where it is not."""
    source = (ROOT / "tests" / "toys" / "window_toll.py").read_text(encoding="utf-8")
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "posswap_window_toll", "hf_posswap.schemes", "posswap_window_toll", source)
    checkpoint = str(tmp_path / "checkpoint")

    def run(*arguments: str, installed: bool = True) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([*([str(tmp_path / "site")] if installed else []), str(ROOT)])
        env = os.environ | {"PYTHONPATH": path}
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)

    shown = run("-m", "hf_posswap", "schemes", "window-toll")
    assert "a learned toll, one a head, on keys outside a window" in shown.stdout, shown.stderr
    made = run("-c", _MAKE, checkpoint)
    assert made.returncode == 0, made.stderr
    assert run("-c", _LOAD, checkpoint).stdout == made.stdout
    missed = run("-c", _LOAD, checkpoint, installed=False)
    assert missed.returncode != 0
    assert "unknown scheme 'window-toll'" in missed.stderr
