"""A part of a model may be swapped and saved by itself; the whole, whose config has no record of it, is not saved."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import hf_posswap
from hf_posswap import patch_model, plan_swap, unpatch_model
from hf_posswap.errors import AlreadyPatchedError, UnsupportedSwapError
from hf_posswap.testing.contract.models import WAYS, copied
from hf_posswap.testing.tiny import tiny_model
from tests.checkpoints.loopback import TOKEN, running
from tests.families.vision_models import build
from tests.patching.apply.test_wrapped import PEFT_ASKS, sentences

PARTS = [
    ("CLIPModel", "vision_model", "learned_2d"),
    ("CLIPModel", "vision_model", "rope_2d"),
    ("GPT2LMHeadModel", "transformer", "rope"),
    ("BertForSequenceClassification", "bert", "rope"),
    ("LlamaForCausalLM", "model", "alibi"),
    ("LlamaForCausalLM", "model", "yarn"),
    ("BartForConditionalGeneration", "model", "rope"),
]
WORDS = torch.arange(1, 9)[None]
ROOT = Path(__file__).resolve().parents[2]


def whole_of(name: str) -> Any:
    import transformers

    return build(name) if name == "CLIPModel" else tiny_model(getattr(transformers, name), meta=False)


def swapped_part(name: str, path: str, scheme: str) -> tuple[Any, Any]:
    """Return a whole model and its part at `path`, which carries a swap to `scheme`."""
    whole = whole_of(name)
    part = whole.get_submodule(path)
    patch_model(part, scheme, **({"factor": 2.0} if scheme == "yarn" else {}))
    return whole, part


@pytest.fixture
def llama() -> tuple[Any, Any]:
    return swapped_part("LlamaForCausalLM", "model", "alibi")


def refused(whole: Any, path: str) -> Any:
    """Expect the error that names `whole`, the part at `path`, and what works."""
    inner, outer = type(whole.get_submodule(path)).__name__, type(whole).__name__
    return pytest.raises(
        UnsupportedSwapError,
        match=rf"'{path}' of this {outer} carries a separate swap, and {outer} would be saved without a record of it"
        rf".* What works: saving the {inner} separately, .*; or, if {outer} can be patched as a whole, unpatch",
    )


@pytest.mark.parametrize(("name", "path", "scheme"), PARTS)
def test_a_whole_is_not_saved_while_a_part_of_it_is_swapped(name: str, path: str, scheme: str, tmp_path: Path) -> None:
    whole, part = swapped_part(name, path, scheme)
    assert getattr(whole.config, "posswap", None) is None
    with refused(whole, path):
        whole.save_pretrained(tmp_path / "whole")
    with refused(whole, path):
        hf_posswap.save(whole, tmp_path / "saved")
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not (tmp_path / "saved").exists()
    unpatch_model(part)
    whole.save_pretrained(tmp_path / "whole")
    loaded = type(whole).from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in whole.state_dict().items())


@pytest.mark.parametrize(("name", "path", "scheme"), PARTS)
def test_a_swapped_part_is_saved_by_itself(name: str, path: str, scheme: str, tmp_path: Path) -> None:
    _, part = swapped_part(name, path, scheme)
    hf_posswap.save(part, tmp_path / "part")
    loaded = hf_posswap.load(tmp_path / "part")
    inputs = {"input_ids": WORDS}
    if name == "CLIPModel":
        inputs = {"pixel_values": torch.randn(1, 3, part.config.image_size, part.config.image_size)}
    with torch.no_grad():
        assert torch.equal(part.eval()(**inputs)[0], loaded.eval()(**inputs)[0])
    assert loaded.config.posswap == part.config.posswap


def test_a_whole_runs_with_the_swapped_part(llama: tuple[Any, Any]) -> None:
    whole, part = llama
    native = tiny_model("llama", meta=False)
    patch_model(native, "alibi")
    with torch.no_grad():
        assert torch.equal(whole(WORDS).logits, native(WORDS).logits)


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_a_whole_refuse_as_it_does(llama: tuple[Any, Any], way: str, tmp_path: Path) -> None:
    whole, _ = llama
    twin = copied(whole, way)
    with refused(twin, "model"):
        twin.save_pretrained(tmp_path)
    unpatch_model(twin.model)
    twin.save_pretrained(tmp_path)
    with refused(whole, "model"):
        whole.save_pretrained(tmp_path)


def test_a_state_dict_that_is_not_saved_is_given(llama: tuple[Any, Any], tmp_path: Path) -> None:
    whole, part = llama
    held = whole.state_dict()
    assert {key.removeprefix("model.") for key in held if key.startswith("model.")} == set(part.state_dict())
    torch.save(held, tmp_path / "weights.pt")
    whole.load_state_dict(torch.load(tmp_path / "weights.pt"))


PUSHED = """
from hf_posswap import patch_model
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.testing.tiny import tiny_model

whole = tiny_model("llama", meta=False)
patch_model(whole.model, "alibi")
try:
    whole.push_to_hub("me/whole")
except UnsupportedSwapError as error:
    print(str(error))
"""


@pytest.mark.slow
def test_a_whole_is_not_pushed_to_the_hub(tmp_path: Path) -> None:
    with running() as hub:
        drop = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        environment = {key: value for key, value in os.environ.items() if key not in drop}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PUSHED]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert "'model' of this LlamaForCausalLM carries a separate swap" in run.stdout
        assert "CREATE" in {kind.upper() for kind in hub.kinds()}  # it came as far as that
        assert hub.files("me/whole") == {}


def test_a_trainer_does_not_save_a_whole(llama: tuple[Any, Any], tmp_path: Path) -> None:
    whole, _ = llama
    trainer = Trainer(whole, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with refused(whole, "model"):
        trainer.save_model()


def test_a_trainer_does_not_gather_the_weights_of_a_whole_to_save_them(
    llama: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = llama
    trainer = Trainer(whole, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    trainer.is_fsdp_enabled = True  # then the weights are gathered first, and given to save_pretrained
    monkeypatch.setattr(trainer.accelerator.state, "fsdp_plugin", _Plugin(), raising=False)
    with refused(whole, "model"):
        trainer.save_model()
    trainer.model = torch.compile(whole, backend="eager")
    with refused(whole, "model"):
        trainer.save_model()


class _Plugin:
    state_dict_type = "StateDictType.FULL_STATE_DICT"


def test_a_compiled_whole_is_not_saved(llama: tuple[Any, Any], tmp_path: Path) -> None:
    whole, _ = llama
    with refused(whole, "model"):
        torch.compile(whole, backend="eager").save_pretrained(tmp_path)


def test_a_whole_that_was_given_a_loaded_swap_is_not_saved(tmp_path: Path) -> None:
    for scheme in ("alibi", "yarn"):  # for the plugin alone, and for stock transformers too
        whole, part = swapped_part("LlamaForCausalLM", "model", scheme)
        hf_posswap.save(part, tmp_path / scheme)
        unpatch_model(part)
        whole.model = hf_posswap.load(tmp_path / scheme)
        with refused(whole, "model"):
            whole.save_pretrained(tmp_path / "whole")


def test_a_whole_whose_config_has_the_record_is_saved(llama: tuple[Any, Any], tmp_path: Path) -> None:
    whole, part = llama
    whole.config = part.config
    whole.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(hf_posswap.load(tmp_path)(WORDS).logits, whole(WORDS).logits)


class Tower(nn.Module):
    """Holds a model, and is none of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "tower.pt")

    save_model = save_pretrained


def test_a_part_is_found_through_modules_that_are_no_models(tmp_path: Path) -> None:
    whole = tiny_model("llama", meta=False)
    whole.extra = Tower(tiny_model("bert", meta=False).bert)
    patch_model(whole.extra.model, "rope")
    with refused(whole, "extra.model"):
        whole.save_pretrained(tmp_path)


def test_the_outermost_whole_is_named(tmp_path: Path) -> None:
    whole, inner = tiny_model("llama", meta=False), whole_of("GPT2LMHeadModel")
    whole.extra = inner
    patch_model(inner.transformer, "rope")
    with refused(whole, "extra.transformer"):
        whole.save_pretrained(tmp_path)
    with refused(inner, "transformer"):
        inner.save_pretrained(tmp_path)


def test_wrappers_that_are_no_models_of_transformers_save_as_ever(tmp_path: Path) -> None:
    whole, part = swapped_part("LlamaForCausalLM", "model", "alibi")
    Tower(part).save_pretrained(tmp_path)
    Tower(whole).save_model(tmp_path)
    nn.Sequential(nn.ModuleDict({"words": part})).state_dict()
    torch.compile(part, backend="eager").save_pretrained(tmp_path / "compiled")
    assert hf_posswap.load(tmp_path / "compiled").config.posswap["scheme"]["name"] == "alibi"


@PEFT_ASKS
def test_a_peft_model_saves_the_adapter_of_a_swapped_model(tmp_path: Path) -> None:
    import peft

    model = tiny_model("llama", meta=False)
    patch_model(model, "alibi")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_a_sentence_transformer_saves_the_swapped_model_that_it_holds(tmp_path: Path) -> None:
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence_transformers is not installed: it is one of the development dependencies")
    model = sentences()
    held = next(one for one in model.modules() if type(one).__name__ == "BertModel")
    patch_model(held, "rope")
    model.save_pretrained(str(tmp_path))
    found = [hf_posswap.load(path.parent) for path in tmp_path.rglob("model.safetensors")]
    assert [one.config.posswap["scheme"]["name"] for one in found] == ["rope"]


@pytest.mark.parametrize(("name", "path", "scheme"), PARTS)
def test_a_whole_is_not_swapped_around_a_swapped_part(name: str, path: str, scheme: str) -> None:
    whole, part = swapped_part(name, path, scheme)
    given = {"factor": 2.0} if scheme == "yarn" else {}
    for ask in (plan_swap, patch_model):
        with pytest.raises(AlreadyPatchedError, match=rf"'{path}' of this {name} already carries .*: call unpatch_mod"):
            ask(whole, scheme, **given)
    unpatch_model(part)
    patch_model(whole, scheme, **given)
    unpatch_model(whole)


def test_a_part_of_a_swapped_whole_is_not_swapped() -> None:
    whole = whole_of("LlamaForCausalLM")
    patch_model(whole, "alibi")
    with pytest.raises(
        AlreadyPatchedError, match=r"this LlamaModel is a part of a model that carries a swap, to alibi"
    ):
        patch_model(whole.model, "rope")
    unpatch_model(whole)
    patch_model(whole.model, "alibi")


def test_a_swap_is_not_taken_back_from_around_another_one() -> None:
    whole = whole_of("LlamaForCausalLM")
    patch_model(whole, "yarn", factor=2.0)  # its parts share its config, and nothing else tells that they are swapped
    patch_model(whole.model, "alibi")
    with pytest.raises(AlreadyPatchedError, match=r"'model' of this LlamaForCausalLM already carries alibi"):
        unpatch_model(whole)
    unpatch_model(whole.model)
    unpatch_model(whole)


def test_a_second_swap_inside_a_swapped_whole_is_not_saved_with_the_record_of_the_first(tmp_path: Path) -> None:
    whole = whole_of("LlamaForCausalLM")
    patch_model(whole, "yarn", factor=2.0)
    patch_model(whole.model, "alibi")
    with refused(whole, "model"):
        whole.save_pretrained(tmp_path)


@pytest.mark.parametrize("scheme", ["alibi", "kerple", "native + ssmax", "yarn:factor=2"])
def test_another_model_around_the_same_body_is_not_saved_as_if_it_had_no_swap(scheme: str, tmp_path: Path) -> None:
    ids = torch.arange(5, 25)[None]
    model, other = (tiny_model("LlamaForCausalLM", meta=False) for _ in range(2))
    expected, folder = other(ids).logits, tmp_path / "other"
    other.model = model.model
    patch_model(model, scheme)
    for save in (hf_posswap.save, lambda saved, folder: saved.save_pretrained(folder)):
        with pytest.raises(UnsupportedSwapError, match="'model' of this LlamaForCausalLM belongs to another model too"):
            save(other, folder)
        assert not list(folder.glob("*.safetensors"))
    hf_posswap.save(model, tmp_path / "swapped")
    assert torch.equal(hf_posswap.load(tmp_path / "swapped")(ids).logits, model(ids).logits)
    unpatch_model(model)
    other.save_pretrained(folder)
    assert torch.equal(type(other).from_pretrained(folder)(ids).logits, expected)
