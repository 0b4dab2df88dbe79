"""Models behind accelerate's hooks, whose weights lie elsewhere between forwards: patched before or after, alike."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from transformers import AutoModelForCausalLM, DynamicCache

import hf_posswap
from hf_posswap import patch_model, plan_swap, unpatch_model, verify_swap
from hf_posswap.errors import CheckpointError
from hf_posswap.testing.contract.points.running import piecewise
from tests.contract.models import build
from tests.contract.pairs import CHANGE, NOISE, gap, logits, words

IDS = words(2, 24)
SCHEMES = {"gpt2": ("rope", "alibi", "nope", "sinusoidal", "learned", "t5"), "llama": ("yarn", "alibi", "nope", "fire")}
CASES = [(name, scheme) for name, schemes in SCHEMES.items() for scheme in schemes]
PLACES = {
    "gpt2": {
        "transformer.wte": "cpu",
        "transformer.wpe": "disk",
        "transformer.h.0": "cpu",
        "transformer.h.1": "disk",
        "transformer.ln_f": "cpu",
        "lm_head": "cpu",
    },
    "llama": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "disk",
        "model.layers.1": "cpu",
        "model.norm": "disk",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
}


def placed(model: Any, name: str) -> dict[str, str]:
    """Return a device map of blocks on the CPU and on the disk; what a scheme added is on the disk."""
    added = f"{model.base_model_prefix}.posswap"
    return PLACES[name] | ({added: "disk"} if added in dict(model.named_modules()) else {})


def dispatched(model: Any, name: str, folder: Path) -> Any:
    return dispatch_model(model, placed(model, name), main_device="cpu", offload_dir=folder, force_hooks=True)


def on_cpu(model: Any, name: str, folder: Path) -> Any:
    cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def on_disk(model: Any, name: str, folder: Path) -> Any:
    disk_offload(model, folder, execution_device=torch.device("cpu"), offload_buffers=True)
    return model


WAYS: dict[str, Callable[..., Any]] = {"dispatch_model": dispatched, "cpu_offload": on_cpu, "disk_offload": on_disk}


def options(scheme: str) -> dict[str, Any]:
    return {"max_length": 64} | ({"init_std": 1.0} if scheme == "t5" else {})


def swapped(name: str, scheme: str, model: Any = None) -> Any:
    torch.manual_seed(3)  # a scheme may begin with random numbers
    model = build(name) if model is None else model
    patch_model(model, scheme, **options(scheme))
    return model


def stepped(model: Any) -> torch.Tensor:
    return piecewise(model, IDS, [10, 1, 1, 12], DynamicCache(config=model.config))


def on_meta(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.is_meta}


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_a_model_offloaded_then_patched_equals_one_in_memory(name: str, scheme: str, way: str, tmp_path: Path) -> None:
    expected, native = logits(swapped(name, scheme), IDS), logits(build(name), IDS)
    model = WAYS[way](build(name), name, tmp_path)
    away = on_meta(model)
    assert away
    swapped(name, scheme, model)
    assert gap(logits(model, IDS), expected) == 0
    assert gap(stepped(model), expected) < NOISE
    verify_swap(model)
    gone = {"transformer.wpe.weight"} if name == "gpt2" else set()
    assert on_meta(model) == away - gone, "only the position table is brought into memory"
    unpatch_model(model)
    assert on_meta(model) == away
    assert gap(logits(model, IDS), native) == 0
    assert on_meta(model) == away


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_a_model_patched_then_offloaded_equals_one_in_memory(name: str, scheme: str, way: str, tmp_path: Path) -> None:
    expected, native = logits(swapped(name, scheme), IDS), logits(build(name), IDS)
    model = WAYS[way](swapped(name, scheme), name, tmp_path)
    assert on_meta(model)
    assert gap(logits(model, IDS), expected) == 0
    assert gap(stepped(model), expected) < NOISE
    verify_swap(model)
    assert gap(logits(model, IDS), expected) == 0, "verify_swap changed the model"
    unpatch_model(model)
    assert gap(logits(model, IDS), native) == 0


def test_the_plan_says_what_stays_in_memory(tmp_path: Path) -> None:
    model = on_cpu(build("gpt2"), "gpt2", tmp_path)
    notes = plan_swap(model, "alibi").notes
    assert "transformer.wpe is offloaded by accelerate: it stays in memory until the swap is undone." in notes
    assert not any("offloaded" in note for note in plan_swap(build("gpt2"), "alibi").notes)
    assert not any("offloaded" in note for note in plan_swap(on_cpu(build("llama"), "", tmp_path), "alibi").notes)


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_what_was_dispatched_is_saved_and_loads(name: str, scheme: str, tmp_path: Path) -> None:
    model = swapped(name, scheme, dispatched(build(name), name, tmp_path / "away"))
    expected = logits(model, IDS)
    hf_posswap.save(model, tmp_path / "saved")
    assert gap(logits(hf_posswap.load(tmp_path / "saved"), IDS), expected) == 0
    where = {"": "disk"} if scheme == "alibi" else placed(swapped(name, scheme), name)
    again = hf_posswap.load(tmp_path / "saved", device_map=where, offload_folder=str(tmp_path / "again"))
    assert on_meta(again)
    assert gap(logits(again, IDS), expected) == 0
    verify_swap(again)


def test_what_no_device_map_describes_is_not_saved(tmp_path: Path) -> None:
    model = swapped("llama", "alibi", on_cpu(build("llama"), "llama", tmp_path))
    with pytest.raises(CheckpointError, match="offloaded by accelerate's hooks.*remove_hook_from_submodules"):
        hf_posswap.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(("name", "scheme"), [("gpt2", "learned"), ("gpt2", "alibi"), ("llama", "fire")])
def test_a_model_that_from_pretrained_offloads(name: str, scheme: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "native")
    expected = logits(swapped(name, scheme), IDS)
    where = placed(build(name), name)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "native", device_map=where, offload_folder=str(tmp_path / "away")
    ).eval()
    assert on_meta(model)
    native = logits(model, IDS)
    swapped(name, scheme, model)
    assert gap(logits(model, IDS), expected) == 0
    verify_swap(model)
    unpatch_model(model)
    assert gap(logits(model, IDS), native) == 0


def test_verifying_copies_no_weights_that_are_elsewhere(tmp_path: Path) -> None:
    model = swapped("llama", "alibi", on_cpu(build("llama"), "llama", tmp_path))
    gc.collect()

    def large() -> list[torch.Tensor]:
        return [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.numel() >= 64 * 96]

    before = set(map(id, large()))

    class Seen(Exception):
        pass

    def count(*_: Any) -> None:
        raise Seen([tuple(t.shape) for t in large() if id(t) not in before and not t.is_meta])

    model.model.register_forward_pre_hook(count)
    with pytest.raises(Seen) as found:
        verify_swap(model)
    assert found.value.args[0] == []


def test_training_behind_hooks_gives_the_same_gradients(tmp_path: Path) -> None:
    """With no weights offloaded, hooks only move inputs: what a scheme learns gets its gradients."""
    plain = swapped("llama", "fire")
    hooked = dispatch_model(build("llama"), {"": "cpu"}, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    swapped("llama", "fire", hooked)
    for model in (plain, hooked):
        model(input_ids=IDS, labels=IDS).loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert set(expected) == {name for name, _ in hooked.named_parameters()}
    for name, parameter in hooked.named_parameters():
        assert parameter.grad is not None, name
        assert gap(parameter.grad, expected[name]) == 0, name
    assert gap(logits(hooked, IDS), logits(build("llama"), IDS)) > CHANGE
