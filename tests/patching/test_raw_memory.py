"""What a checkpoint does not hold begins as it should: raw memory is never used, nor saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from hf_posswap import Blend, Learned, patch_model, verify_swap
from hf_posswap.patching.edits.removed_table import NoPositions
from tests.contract.pairs import Pair, words

LEARNED = (
    Pair("gpt2", "t5"),
    Pair("llama", "kerple"),
    Pair("gpt2", "fire"),
    Pair("bloom", "t5"),
    Pair("t5", "kerple", stack="decoder"),
)


@pytest.fixture(autouse=True)
def memory_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what would be raw memory with numbers that show."""
    empty_like = torch.empty_like

    def used(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty_like(*args, **kwargs)
        return made.fill_(1e6) if made.is_floating_point() and not made.is_meta else made

    monkeypatch.setattr(torch, "empty_like", used)


def learned(model: Any, pair: Pair) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if name in pair.plan.added}


@pytest.mark.parametrize("pair", LEARNED, ids=str)
def test_learned_positions_that_a_checkpoint_lacks_begin_as_in_a_new_swap(pair: Pair, tmp_path: Path) -> None:
    fresh = pair.swapped()
    fresh.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    lost = {name: tensor for name, tensor in load_file(file).items() if ".posswap." not in f".{name}"}
    assert len(lost) < len(load_file(file))
    save_file(lost, file, metadata={"format": "pt"})
    loaded = type(fresh).from_pretrained(tmp_path)
    expected = learned(fresh, pair)
    assert expected
    assert all(torch.equal(tensor, expected[name]) for name, tensor in learned(loaded, pair).items())
    assert torch.equal(pair.logits(loaded, words(1, 8)), pair.logits(fresh, words(1, 8)))


@pytest.mark.parametrize("pair", LEARNED, ids=str)
def test_one_learned_parameter_that_is_there_stays(pair: Pair, tmp_path: Path) -> None:
    model = pair.swapped()
    names = sorted(learned(model, pair))
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).add_(1.0)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != names[0]}, file, metadata={"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path)
    begin = learned(pair.swapped(), pair)
    assert torch.equal(loaded.get_parameter(names[0]), begin[names[0]])
    assert all(torch.equal(loaded.get_parameter(name), model.get_parameter(name)) for name in names[1:])


@pytest.mark.parametrize("pair", [*LEARNED, Pair("gpt2", "rope"), Pair("bert", "alibi")], ids=str)
def test_a_model_from_meta_begins_as_it_should_when_its_weights_are_initialised(pair: Pair) -> None:
    fresh = pair.swapped()
    with torch.device("meta"):
        model = type(fresh)(fresh.config)
    model.to_empty(device="cpu")
    model.apply(model._init_weights)
    expected = learned(fresh, pair)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in learned(model, pair).items())
    for module in model.modules():
        if isinstance(module, NoPositions):
            assert module.is_empty


def test_a_lost_stand_in_for_a_table_is_zero_again(tmp_path: Path) -> None:
    model = Pair("gpt2", "rope").swapped()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    del held["transformer.wpe.weight"]
    save_file(held, file, metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.transformer.wpe.is_empty
    verify_swap(loaded)


@pytest.mark.parametrize("new", ["rope", "learned"])
def test_a_lost_table_of_a_blend_begins_as_its_class_begins_one(new: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Pair("gpt2", "rope").native()
    patch_model(model, Blend(new=Learned() if new == "learned" else new, weight=0.5))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = {name: tensor for name, tensor in load_file(file).items() if "wpe" not in name}
    save_file(held, file, metadata={"format": "pt"})
    table = type(model).from_pretrained(tmp_path).transformer.wpe
    assert 0.15 < float(table.old.detach().std()) < 0.25  # initializer_range
    assert not table.weight.any()
    if new == "learned":
        assert float(table.new.detach().abs().max()) < 2


def test_native_nope_from_meta_saves_no_raw_memory_as_its_table(tmp_path: Path) -> None:
    config = Pair("gpt2", "nope").tiny.config()
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        patch_model(model, "nope")
    model.to_empty(device="cpu")
    assert model.transformer.wpe.is_empty
    swapped = Pair("gpt2", "nope").native()
    patch_model(swapped, "nope")
    model.load_state_dict({name: t for name, t in swapped.state_dict().items() if "wpe" not in name}, strict=False)
    model.save_pretrained(tmp_path)
    assert not load_file(tmp_path / "model.safetensors")["transformer.wpe.weight"].any()


def test_what_was_loaded_into_a_table_that_is_gone_is_not_saved_as_one(tmp_path: Path) -> None:
    model = Pair("gpt2", "nope").native()
    patch_model(model, "nope")
    with torch.no_grad():
        model.transformer.wpe.weight.fill_(float("nan"))
    assert not model.state_dict()["transformer.wpe.weight"].any()
    model.save_pretrained(tmp_path)
    assert not load_file(tmp_path / "model.safetensors")["transformer.wpe.weight"].any()
