"""Every scheme in every family, loaded in fresh processes: natively, with the plugin, by bundled code, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import fresh
from tests.contract.models import LENGTH
from tests.contract.pairs import Pair, own_pairs, refusal, words

pytestmark = pytest.mark.slow

IDS = words(2, LENGTH + 8)
TOLERANCE = 1e-6
REFUSALS = {
    "auto": "contains custom code",
    "forced": "pip install hf-posswap, then hf_posswap.load",
}
# How a checkpoint may lie on disk, and how it may be asked for.
FORMS: dict[str, dict[str, Any]] = {
    "sharded": {"max_shard_size": "60KB"},
    "bfloat16": {"cast": torch.bfloat16, "how": {"dtype": "bfloat16"}},
    "tied": {"changes": {"tie_word_embeddings": True}},
    "untied": {"changes": {"tie_word_embeddings": False}},
    "device_map": {"how": {"device_map": "auto"}, "max_shard_size": "60KB"},
    "low_memory": {"how": {"low_cpu_mem_usage": True}},
    "eager": {"how": {"attn_implementation": "eager"}},
}


@pytest.fixture(scope="module")
def every_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Pair]]:
    """Save every supported pair with its logits; return the folder and the pairs by name."""
    root = tmp_path_factory.mktemp("matrix") / "saved"
    pairs = {f"{number:03d}": pair for number, pair in enumerate(p for p in own_pairs() if refusal(p) is None)}
    for name, pair in pairs.items():
        fresh.store(pair.swapped(), root / name, IDS[:, : pair.plan.max_length])
    return root, pairs


Found = dict[str, float | str]


def split(found: dict[str, Found], pairs: dict[str, Pair], what: str) -> tuple[Found, Found]:
    """Return what was found of the native pairs, and of the plugin pairs, by the pairs' names."""
    asked = {name: pair for name, pair in pairs.items() if what in found[name]}
    native = {str(pair): found[name][what] for name, pair in asked.items() if pair.plan.route == "native"}
    plugin = {str(pair): found[name][what] for name, pair in asked.items() if pair.plan.route == "plugin"}
    return native, plugin


def wrong(found: Found) -> Found:
    return {name: gap for name, gap in found.items() if isinstance(gap, str) or gap > TOLERANCE}


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes on a busy machine
@pytest.mark.parametrize("mode", ["plugin", "remote"])
def test_every_pair_loads_with_equal_logits(every_pair: tuple[Path, dict[str, Pair]], mode: fresh.Mode) -> None:
    root, pairs = every_pair
    found = fresh.load_all(root, mode, timeout=900)
    native, plugin = split(found, pairs, "auto")
    assert (wrong(native), wrong(plugin)) == ({}, {})
    assert len(native) > 50
    assert len(plugin) > 50
    if mode == "plugin":
        native, plugin = split(found, pairs, "load")
        assert (wrong(native), wrong(plugin)) == ({}, {})
    if mode == "remote":  # and saved again, once a scheme
        native, plugin = split(found, pairs, "again")
        assert (wrong(native), wrong(plugin)) == ({}, {})
        assert len(native) + len(plugin) == len({pair.scheme for pair in pairs.values()})


@pytest.mark.slow
def test_plain_transformers_loads_native_pairs_and_refuses_every_other(
    every_pair: tuple[Path, dict[str, Pair]],
) -> None:
    root, pairs = every_pair
    found = fresh.load_all(root, "plain")
    for what in ("auto", "forced"):
        native, plugin = split(found, pairs, what)
        assert wrong(native) == {}
        assert {name: text for name, text in plugin.items() if REFUSALS[what] not in str(text)} == {}


def store_forms(root: Path, pairs: tuple[Pair, ...], forms: dict[str, dict[str, Any]]) -> None:
    for pair in pairs:
        for name, form in forms.items():
            model = pair.swapped(**form.get("changes", {})).to(form.get("cast", torch.float32))
            options = {key: form[key] for key in ("max_shard_size",) if key in form}
            model.set_attn_implementation(form.get("how", {}).get("attn_implementation", "sdpa"))
            fresh.store(model, root / f"{pair}-{name}", IDS, how=form.get("how"), **options)


def test_a_handful_in_several_forms(tmp_path: Path) -> None:
    forms = {name: FORMS[name] for name in ("sharded", "bfloat16", "device_map")}
    store_forms(tmp_path / "saved", (Pair("gpt2", "kerple"),), forms)
    store_forms(tmp_path / "saved", (Pair("llama", "yarn"),), {"tied": FORMS["tied"]})
    found = fresh.load_all(tmp_path / "saved", "plugin")
    assert {name: wrong(what) for name, what in found.items()} == {name: {} for name in found}
    assert len(list((tmp_path / "saved" / "gpt2-kerple-sharded").glob("*.safetensors"))) > 2
    assert len(found) == 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plugin", "remote", "plain"])
def test_every_form_loads_with_equal_logits(tmp_path: Path, mode: fresh.Mode) -> None:
    plugin = (Pair("gpt2", "kerple"), Pair("llama", "alibi"), Pair("bert", "rope"), Pair("opt", "self_extend"))
    native = (Pair("llama", "yarn"), Pair("gpt2", "sinusoidal"), Pair("gpt_neox", "linear"))
    store_forms(tmp_path / "saved", native if mode == "plain" else plugin + native, FORMS)
    found = fresh.load_all(tmp_path / "saved", mode)
    found.pop("side by side", None)
    assert {name: wrong(what) for name, what in found.items()} == {name: {} for name in found}


@pytest.mark.parametrize("scheme", ["rope", "kerple", "learned"])
def test_a_config_alone_makes_the_model_on_meta(scheme: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = Pair("gpt2", scheme).swapped()
    model.config.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
