"""What compat knows of PEFT's wrappers, seen on a real PEFT model."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from hf_posswap.checkpoints.adapters import without_peft_warning
from hf_posswap.compat import peft_wrappers
from tests import forked
from tests.training.tiny_models import tiny


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.table, self.rest = nn.Linear(2, 2), nn.Embedding(3, 2), nn.Linear(2, 2)


@pytest.fixture
def wrapped() -> Any:
    return get_peft_model(Net(), LoraConfig(target_modules=["project"], modules_to_save=["table"]))  # type: ignore[arg-type]


@pytest.fixture
def net(wrapped: Any) -> Any:
    return wrapped.get_base_model()


def test_is_adapted(net: Any) -> None:
    assert [peft_wrappers.is_adapted(one) for one in (net.project, net.table, net.rest)] == [True, True, False]


def test_adapters_at_work(wrapped: Any, net: Any) -> None:
    assert peft_wrappers.adapters_at_work(nn.Linear(2, 2)) == {}
    assert peft_wrappers.adapters_at_work(net) == {
        "project": [["default"], False, [], {"default": 1.0}], "table": [["default"], False, [], None]
    }  # fmt: skip
    with wrapped.disable_adapter():
        assert [at_work[1] for at_work in peft_wrappers.adapters_at_work(net).values()] == [True, True]


def test_original_of(net: Any) -> None:
    assert type(peft_wrappers.original_of(net.table)) is nn.Embedding
    assert peft_wrappers.original_of(net.rest) is net.rest


def test_base_layer_of(net: Any) -> None:
    assert type(peft_wrappers.base_layer_of(net.project)) is nn.Linear
    assert peft_wrappers.base_layer_of(net.rest) is net.rest


def test_trained_copies_of(net: Any) -> None:
    (copy,) = peft_wrappers.trained_copies_of(net.table)
    assert type(copy) is nn.Embedding
    assert copy.weight.requires_grad
    assert peft_wrappers.trained_copies_of(net.rest) == []
    assert copy is not peft_wrappers.original_of(net.table)
    assert peft_wrappers.trained_copies_of(net.rest) == []


def test_copy_for(wrapped: Any, net: Any) -> None:
    (copy,) = peft_wrappers.trained_copies_of(net.table)
    assert peft_wrappers.copy_for(net.table, None) is copy
    assert peft_wrappers.copy_for(net.table, "default") is copy
    assert peft_wrappers.copy_for(net.table, "__base__") is peft_wrappers.original_of(net.table)
    assert peft_wrappers.copy_for(net.rest, "default") is net.rest
    with wrapped.disable_adapter():
        assert peft_wrappers.copy_for(net.table, None) is peft_wrappers.original_of(net.table)


def test_is_copy(net: Any) -> None:
    copies = [path for path, _ in net.named_parameters() if peft_wrappers.is_copy(path)]
    assert copies == ["table.original_module.weight", "table.modules_to_save.default.weight"]


def test_name_without_adapter(wrapped: Any) -> None:
    names = {peft_wrappers.name_without_adapter(name) for name, _ in wrapped.named_parameters()}
    assert {name for name in names if "lora" not in name} == {name for name, _ in Net().named_parameters()}


def test_read_adapter_weights(wrapped: Any, tmp_path: Path) -> None:
    wrapped.save_pretrained(tmp_path)
    config, weights = peft_wrappers.read_adapter_weights(tmp_path)
    assert config.target_modules == {"project"}
    assert sorted(weights) == sorted(load_file(tmp_path / "adapter_model.safetensors"))


def said(program: str, folder: Path, *arguments: str) -> list[str]:
    """Return the words that a program prints, in a fork of this process: what it puts around functions stays there."""

    def work() -> None:
        sys.argv = ["program", str(folder), *arguments]
        warnings.resetwarnings()  # PEFT asks models what is deprecated
        with (folder / "said").open("w") as out, contextlib.redirect_stdout(out):
            exec(program, {"__name__": "__main__"})

    process = forked.start(work)
    process.join()
    assert process.exitcode == 0
    return (folder / "said").read_text().split()


def seen(folder: Path, hook: str) -> list[str]:
    """Return what a hook sees of PEFT."""
    return said(HOOKED, folder, hook)


def test_change_saved_weights(tmp_path: Path) -> None:
    assert seen(tmp_path, "change_saved_weights(peft.peft_model, went(1), went(2))") == ["1", "2"]


def test_watch_adapters(tmp_path: Path) -> None:
    found = seen(tmp_path, "watch_adapters(peft.peft_model, went(1), went(2), went(3))")
    assert found == ["1", "2", "3", "3"]  # from_pretrained loads by load_adapter


def test_watch_hotswaps(tmp_path: Path) -> None:
    assert seen(tmp_path, "import peft.utils.hotswap as h; watch_hotswaps(h, went(1), went(2)); hot = h") == ["1", "2"]


def test_watch_adapter_names(tmp_path: Path) -> None:
    assert seen(tmp_path, "watch_adapter_names(peft.peft_model, went(1)); rows = ['default', '__base__']") == ["1"]


def test_unload_whole(tmp_path: Path) -> None:
    """A module without weight and bias, as a scheme's is, is put back untouched."""
    assert seen(tmp_path, "unload_whole(peft.tuners.tuners_utils.BaseTuner, Scale); whole = True") == ["whole"]


def test_watch_own_adapters(tmp_path: Path) -> None:
    assert said(OWN, tmp_path) == ["folder", "below", "weights"]


OWN = """
import sys
from pathlib import Path
import peft, transformers
from safetensors.torch import load_file
from transformers.integrations import peft as integration
from hf_posswap.compat.peft_wrappers import watch_own_adapters

def model():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11))

class Stop(Exception):
    pass

def stop(given):
    def refuse(model, source):
        assert not hasattr(model, "peft_config")
        print(given[source] if isinstance(source, Path) else "weights")
        raise Stop
    return refuse

folder = Path(sys.argv[1])
config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
adapted = peft.get_peft_model(model(), config)
adapted.save_pretrained(folder)
adapted.save_pretrained(folder / "deep")
given = stop({folder: "folder", folder / "deep": "below"})
watch_own_adapters(integration, given, given)
weights = load_file(folder / "adapter_model.safetensors")
for asked in (
    {"peft_model_id": str(folder)},
    {"peft_model_id": str(folder), "adapter_kwargs": {"subfolder": "deep"}},
    {"adapter_state_dict": weights, "peft_config": config},
):
    try:
        model().load_adapter(**asked)
    except Stop:
        pass
"""


HOOKED = """
import sys
import peft
import torch
from torch import nn
from hf_posswap.compat.peft_wrappers import *

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.size

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.scale = nn.Linear(2, 2), Scale()

    def forward(self, x):
        return self.scale(self.project(x))

seen = []
def went(number):
    return lambda *given: (seen.append(number), given[-1])[1]

hot = rows = whole = None
exec(sys.argv[2])
model = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["project"]))
model.save_pretrained(sys.argv[1])
loaded = peft.PeftModel.from_pretrained(Net(), sys.argv[1])
if hot is not None:
    hot.hotswap_adapter(loaded, sys.argv[1], adapter_name="default", torch_device="cpu")
if rows is not None:
    loaded.eval()(torch.ones(2, 2), adapter_names=rows)
if whole:
    config = peft.LoHaConfig(r=2, target_modules=["project"], modules_to_save=["scale"])
    merged = peft.get_peft_model(Net(), config).merge_and_unload()
    seen += ["whole"] * (type(merged.scale) is Scale and {"weight", "bias"}.isdisjoint(vars(merged.scale)))
print(*seen)
"""


@pytest.mark.parametrize("saved", [None, ["lm_head"]])
def test_weights_without_adapters(saved: list[str] | None) -> None:
    model = tiny("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with without_peft_warning():
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=saved))
    found = peft_wrappers.weights_without_adapters(model)
    assert list(found) == list(before)
    assert all(torch.equal(found[name], before[name]) for name in before)
