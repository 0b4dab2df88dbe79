"""Adapters carry the swap of their base, and go on no other."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
import trl
from packaging.version import Version
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_posswap
from hf_posswap import Blend, patch_model, unpatch_model, verify_swap
from hf_posswap.checkpoints.adapters import add_adapter, position_modules
from hf_posswap.checkpoints.load import load_adapter
from hf_posswap.errors import CheckpointError, NotPatchedError, OptionError, RecordError, UnsupportedSwapError
from hf_posswap.patching.record.adapter_marks import ADAPTER_WEIGHTS, RECORD, SIDECAR
from hf_posswap.schemes import Kerple, NoPE, Scheme
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.engine.checkpoints import load_weights
from tests.contract.models import LENGTH, TINY, build
from tests.contract.pairs import CHANGE, gap, logits, words

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks

IDS = words(2, LENGTH)


def lora(name: str, **more: Any) -> Any:
    targets = list(TINY[name].projections)
    return peft.LoraConfig(
        r=2,
        target_modules=targets,
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",
        task_type="CAUSAL_LM",
        **more,
    )


def stored_base(name: str, folder: Path) -> Path:
    build(name).save_pretrained(folder)
    return folder


def adapted(name: str, scheme: str, folder: Path, **options: Any) -> Any:
    """Return an adapter on a base that was loaded from `folder` and swapped in memory."""
    model = hf_posswap.load(stored_base(name, folder))
    patch_model(model, scheme, max_length=None if scheme == "blend" else 2 * LENGTH, **options)
    torch.manual_seed(3)
    return add_adapter(model, lora(name)).eval()


SWAPS = [
    ("gpt2", "rope", {}),
    ("gpt2", "kerple", {}),
    ("gpt2", "sinusoidal", {}),
    ("gpt2", "learned", {}),
    ("opt", "alibi", {}),
    ("gpt2", "alibi", {"learned": True}),
    ("llama", "yarn", {}),
    ("llama", "fire", {}),
    ("llama", "rope", {"site": "attention"}),
    ("llama", "per_layer", {"layers": {0: "nope"}, "default": "kerple"}),
    ("gpt2", "blend", {"new": "rope", "weight": 0.5}),
    ("gpt2", "blend", {"new": "learned:extend=reinit", "weight": 0.5}),
    ("gpt2", "learned + rope", {}),
    ("gpt2", "sinusoidal + kerple", {}),
]


@pytest.mark.parametrize(("name", "scheme", "options"), SWAPS)
def test_one_call_puts_base_swap_and_adapter_together(
    name: str, scheme: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = adapted(name, scheme, tmp_path / "base", **options)
    with torch.no_grad():  # as if trained
        for key, parameter in model.named_parameters():
            if parameter.requires_grad and "lora" not in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
    expected = logits(model, IDS)
    with model.disable_adapter():
        assert gap(logits(model, IDS), expected) > CHANGE
    hf_posswap.save(model, tmp_path / "adapter")
    loaded = hf_posswap.load(tmp_path / "adapter").eval()
    assert isinstance(loaded, peft.PeftModel)
    assert gap(logits(loaded, IDS), expected) == 0
    assert loaded.get_base_model().config.posswap == model.get_base_model().config.posswap
    verify_swap(loaded)
    again = tmp_path / "again"
    loaded.save_pretrained(again)  # PEFT's own
    assert json.loads((again / SIDECAR).read_text()) == json.loads((tmp_path / "adapter" / SIDECAR).read_text())
    merged = loaded.merge_and_unload()
    assert gap(logits(merged, IDS), expected) < 1e-4
    hf_posswap.save(merged, tmp_path / "merged")
    whole = hf_posswap.load(tmp_path / "merged")
    assert gap(logits(whole, IDS), logits(merged, IDS)) == 0
    assert whole.config.posswap["scheme"] == model.get_base_model().config.posswap["scheme"]


@pytest.mark.parametrize("scheme", ["rope", "kerple", "learned", "blend"])
def test_an_adapter_on_a_swapped_checkpoint(scheme: str, tmp_path: Path) -> None:
    base = build("gpt2")
    patch_model(base, scheme, **({"new": "alibi"} if scheme == "blend" else {"max_length": 2 * LENGTH}))
    with torch.no_grad():  # trained positions of the base lie in its checkpoint
        for path in position_modules(base):
            for key, parameter in base.named_parameters():
                if f".{path}." in key:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    hf_posswap.save(base, tmp_path / "base")
    model = peft.get_peft_model(hf_posswap.load(tmp_path / "base"), lora("gpt2")).eval()
    hf_posswap.save(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    loaded = hf_posswap.load(tmp_path / "adapter")
    assert gap(logits(loaded.eval(), IDS), logits(model, IDS)) == 0
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert gap(logits(auto.eval(), IDS), logits(model, IDS)) == 0


@pytest.mark.parametrize("scheme", ["alibi", "yarn"])
def test_an_adapter_without_a_task_type_is_opened_by_pefts_auto_classes(scheme: str, tmp_path: Path) -> None:
    """PEFT then loads the class that the adapter's config names, and a stock one refuses a swapped checkpoint."""
    options = {"factor": 2.0} if scheme == "yarn" else {}
    hf_posswap.save(patch_model(build("llama"), scheme, **options), tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = add_adapter(hf_posswap.load(tmp_path / "base"), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(logits(auto, IDS), logits(model, IDS))


def test_without_the_plugin_no_unswapped_base_is_taken(tmp_path: Path) -> None:
    model = adapted("gpt2", "rope", tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    for auto in (peft.AutoPeftModelForCausalLM, transformers.AutoModelForCausalLM):
        with pytest.raises((OSError, ValueError), match="positions swapped to rope; load this adapter with hf_posswap"):
            auto.from_pretrained(tmp_path / "adapter")


def test_another_mechanism_is_refused_by_name(tmp_path: Path) -> None:
    hf_posswap.save(adapted("gpt2", "rope", tmp_path / "base"), tmp_path / "adapter")
    plain = hf_posswap.load(tmp_path / "base")
    with pytest.raises(
        RecordError, match=r"trained on a gpt2 swapped to rope\(.*and this GPT2LMHeadModel is not swapped"
    ):
        load_adapter(plain, tmp_path / "adapter")
    assert not hasattr(plain, "peft_config")
    patch_model(plain, "alibi")
    with pytest.raises(
        RecordError, match=r"swapped to rope\(.*carries alibi for 32 tokens. Load it by hf_posswap.load"
    ):
        load_adapter(plain, tmp_path / "adapter")
    other = hf_posswap.load(tmp_path / "base")
    patch_model(other, "rope", base=500.0)
    with pytest.raises(RecordError, match=r"carries rope\(base=500\.0"):
        load_adapter(other, tmp_path / "adapter")
    right = hf_posswap.load(tmp_path / "base")
    patch_model(right, "rope")  # for another length: the same mechanism
    assert isinstance(load_adapter(right, tmp_path / "adapter", is_trainable=True), peft.PeftModel)


def test_the_length_is_part_of_a_table(tmp_path: Path) -> None:
    hf_posswap.save(adapted("gpt2", "sinusoidal", tmp_path / "base"), tmp_path / "adapter")
    model = hf_posswap.load(tmp_path / "base")
    patch_model(model, "sinusoidal", max_length=40)
    with pytest.raises(RecordError, match="for 64 tokens, and this GPT2LMHeadModel carries sinusoidal.* for 40 tokens"):
        load_adapter(model, tmp_path / "adapter")


def test_the_base_may_have_changed_since(tmp_path: Path) -> None:
    base = build("gpt2")
    patch_model(base, "rope")
    hf_posswap.save(base, tmp_path / "base")
    model = peft.get_peft_model(hf_posswap.load(tmp_path / "base"), lora("gpt2"))
    hf_posswap.save(model, tmp_path / "adapter")
    other = build("gpt2")
    patch_model(other, "alibi")
    hf_posswap.save(other, tmp_path / "base", overwrite=True)
    with pytest.raises(RecordError, match=r"swapped to rope\(.*carries alibi"):
        hf_posswap.load(tmp_path / "adapter")
    hf_posswap.save(build("gpt2"), tmp_path / "base", overwrite=True)
    with pytest.raises(RecordError, match=r"swapped to rope\(.*is not swapped"):
        hf_posswap.load(tmp_path / "adapter")


def test_an_adapter_without_a_sidecar(tmp_path: Path) -> None:
    stored_base("gpt2", tmp_path / "base")
    plain = peft.get_peft_model(hf_posswap.load(tmp_path / "base"), lora("gpt2")).eval()
    hf_posswap.save(plain, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / SIDECAR).exists()
    assert gap(logits(hf_posswap.load(tmp_path / "adapter").eval(), IDS), logits(plain, IDS)) == 0
    model = hf_posswap.load(tmp_path / "base")
    patch_model(model, "rope")
    with pytest.raises(RecordError, match="has no posswap.json.*pass trust_unrecorded=True"):
        load_adapter(model, tmp_path / "adapter")
    assert isinstance(load_adapter(model, tmp_path / "adapter", trust_unrecorded=True), peft.PeftModel)


def test_trained_positions_are_never_lost(tmp_path: Path) -> None:
    blend = Blend(new="learned:extend=reinit", weight=0.5)  # type: ignore[arg-type]
    for scheme, module in (("kerple", "posswap"), ("learned", "wpe"), ("learned + rope", "wpe"), (blend, "wpe")):
        model = hf_posswap.load(stored_base("gpt2", tmp_path / "base"))
        patch_model(model, scheme, max_length=None if scheme is blend else 2 * LENGTH)
        assert position_modules(model) == [module]
        wrapped = peft.get_peft_model(model, lora("gpt2"))
        hf_posswap.save(wrapped, tmp_path / str(scheme) / "frozen")  # as the swap made them: nothing to lose
        *_, parameter = (p for n, p in wrapped.named_parameters() if f".{module}." in n)
        parameter.requires_grad_(True)
        for save in (hf_posswap.save, lambda m, folder: m.save_pretrained(folder)):
            with pytest.raises(CheckpointError, match=rf"transformer\.{module}: .*modules_to_save=\['{module}'\]"):
                save(wrapped, tmp_path / str(scheme) / "lost")
            assert not (tmp_path / str(scheme) / "lost").exists()
        parameter.requires_grad_(False)
        with torch.no_grad():
            parameter.flatten()[0] += 1e-3
        with pytest.raises(CheckpointError, match="trained position parameters that are not part of the adapter"):
            hf_posswap.save(wrapped, tmp_path / str(scheme) / "lost")


@pytest.mark.parametrize(("scheme", "module"), [("kerple", "posswap"), ("learned", "wpe")])
def test_positions_trained_before_the_adapter_are_not_lost(scheme: str, module: str, tmp_path: Path) -> None:
    """Trained alone in a first stage, and frozen when PEFT wraps the model: the base on the disk does not have them."""
    hf_posswap.save(patch_model(build("gpt2"), scheme, max_length=2 * LENGTH), tmp_path / "base")
    wrapped = peft.get_peft_model(hf_posswap.load(tmp_path / "base"), lora("gpt2"))
    half = peft.get_peft_model(hf_posswap.load(tmp_path / "base").bfloat16().float(), lora("gpt2"))
    for name, model in (("same", wrapped), ("half", half)):  # rounded, but not trained
        model.save_pretrained(tmp_path / name)
    with torch.no_grad():
        next(p for name, p in wrapped.named_parameters() if f".{module}." in name).flatten()[0] += 1e-3
    with pytest.raises(CheckpointError, match=rf"transformer\.{module}: trained position parameters"):
        wrapped.save_pretrained(tmp_path / "lost")
    assert not (tmp_path / "lost").exists()


@pytest.mark.parametrize("scheme", ["learned:extend=reinit + kerple", "learned + rope", "sinusoidal + rope"])
def test_a_table_beside_another_mechanism_is_trained_proved_and_taken_back(scheme: str) -> None:
    model = patch_model(build("gpt2"), scheme)
    wrapped = peft.get_peft_model(model, lora("gpt2", modules_to_save=["wpe"])).eval()
    if not scheme.startswith("sinusoidal"):  # which is not to be trained
        assert verify_swap(wrapped)
    unpatch_model(wrapped)
    assert not [key for key in wrapped.state_dict() if key.endswith(".old")]
    with wrapped.disable_adapter():
        assert gap(logits(wrapped, IDS), logits(build("gpt2"), IDS)) == 0


@pytest.mark.parametrize("scheme", [Blend(new=Kerple(), weight=0.25), NoPE(logit_scale=0.1)], ids=str)
def test_what_moved_after_the_base_was_saved_is_set_again(scheme: Scheme, tmp_path: Path) -> None:
    hf_posswap.save(patch_model(build("llama"), scheme), tmp_path / "base")
    wrapped = add_adapter(hf_posswap.load(tmp_path / "base"), lora("llama")).eval()
    moved = hf_posswap.set_blend if isinstance(scheme, Blend) else hf_posswap.set_logit_scale
    moved(wrapped, 0.75)
    expected = logits(wrapped, IDS)
    hf_posswap.save(wrapped, tmp_path / "adapter")
    loaded = hf_posswap.load(tmp_path / "adapter").eval()
    assert gap(logits(loaded, IDS), expected) < 1e-5
    assert hf_posswap.swap_plan(loaded).scheme == hf_posswap.swap_plan(wrapped).scheme
    verify_swap(loaded)
    other = patch_model(build("llama"), Blend(new=Kerple(variant="power"), weight=0.75))
    hf_posswap.save(other, tmp_path / "base", overwrite=True)
    with pytest.raises(RecordError, match="was trained on a llama swapped to"):
        hf_posswap.load(tmp_path / "adapter")


def test_a_blend_that_moved_on_is_told_where_to_go(tmp_path: Path) -> None:
    """A Trainer that resumes puts the adapter of a checkpoint on a base at another weight."""
    model = adapted("gpt2", "blend", tmp_path / "base", new="rope", weight=0.5)
    model.save_pretrained(tmp_path / "adapter")
    base = patch_model(hf_posswap.load(tmp_path / "base"), Blend(new="rope"))
    with pytest.raises(RecordError, match=r"or move the blend there.*: hf_posswap.set_blend\(model, 0.5\)\."):
        load_adapter(base, tmp_path / "adapter")
    hf_posswap.set_blend(base, 0.5)
    assert gap(logits(load_adapter(base, tmp_path / "adapter").eval(), IDS), logits(model, IDS)) == 0
    other = patch_model(hf_posswap.load(tmp_path / "base"), Blend(new="alibi"))
    with pytest.raises(RecordError, match="or swap the base in the same way"):
        load_adapter(other, tmp_path / "adapter")


def test_position_modules_where_nothing_is_learned() -> None:
    for scheme in ("rope", "sinusoidal", "nope"):
        model = build("gpt2")
        patch_model(model, scheme)
        assert position_modules(model) == []
    with pytest.raises(NotPatchedError, match="carries no swap: there are no positions to train"):
        position_modules(build("gpt2"))
    with pytest.raises(NotPatchedError):
        add_adapter(build("gpt2"), lora("gpt2"))


def test_add_adapter_says_what_config_it_takes() -> None:
    model: Any = patch_model(build("gpt2"), "kerple")
    prompts = peft.AdaptionPromptConfig(task_type="CAUSAL_LM")  # trains no positions
    for config, shown in (("LORA", "'LORA'"), (None, "None"), (prompts, "AdaptionPromptConfig")):
        with pytest.raises(OptionError, match=rf"give a PEFT config with modules_to_save, .*LoraConfig.*, not {shown}"):
            add_adapter(model, config)


def test_the_config_given_to_add_adapter_is_left_alone(tmp_path: Path) -> None:
    model = build("gpt2")
    patch_model(model, "kerple")
    config = lora("gpt2", modules_to_save=["ln_f"])
    wrapped = add_adapter(model, config)
    assert config.modules_to_save == ["ln_f"]
    assert set(wrapped.peft_config["default"].modules_to_save) == {"ln_f", "posswap"}
    trained = {n for n, p in wrapped.named_parameters() if p.requires_grad and "lora" not in n}
    assert any("posswap" in name for name in trained)
    assert any("ln_f" in name for name in trained)


def test_what_peft_saves_by_itself_carries_the_swap_after_copy_and_pickle(tmp_path: Path) -> None:
    model = adapted("gpt2", "rope", tmp_path / "base")
    for number, each in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        each.save_pretrained(str(tmp_path / str(number)))
        held = json.loads((tmp_path / str(number) / SIDECAR).read_text())
        assert held["record"]["scheme"]["name"] == "rope"
    plain = peft.get_peft_model(build("gpt2"), lora("gpt2"))
    plain.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / SIDECAR).exists()
    assert not any(name.endswith(RECORD) for name in load_file(tmp_path / "plain" / ADAPTER_WEIGHTS))


def test_several_adapters_each_have_a_sidecar(tmp_path: Path) -> None:
    model = adapted("gpt2", "rope", tmp_path / "base")
    model.add_adapter("second", lora("gpt2"))
    hf_posswap.save(model, tmp_path / "adapter")
    assert (tmp_path / "adapter" / SIDECAR).is_file()
    assert (tmp_path / "adapter" / "second" / SIDECAR).is_file()
    model.set_adapter("second")
    second = hf_posswap.load(tmp_path / "adapter" / "second").eval()
    assert gap(logits(second, IDS), logits(model, IDS)) == 0


def test_adapters_that_are_not_saved_again_keep_their_sidecar(tmp_path: Path) -> None:
    model = patch_model(build("gpt2"), Blend(new="alibi", weight=0.25))  # type: ignore[arg-type]
    model = peft.get_peft_model(model, lora("gpt2"))
    model.add_adapter("second", lora("gpt2"))
    model.save_pretrained(tmp_path)
    hf_posswap.set_blend(model, 0.5)
    sidecars = {name: tmp_path / name / SIDECAR for name in ("", "second")}
    for chosen, weights in ((["second"], (0.25, 0.5)), (["default"], (0.5, 0.5))):
        model.save_pretrained(tmp_path, selected_adapters=chosen)
        found = [json.loads(path.read_text())["record"]["scheme"]["weight"] for path in sidecars.values()]
        assert tuple(found) == weights


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT passes prefixes so
@pytest.mark.parametrize("scheme", ["rope", "t5"])
@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig"])
def test_prompts_are_loaded_with_their_base(kind: str, scheme: str, tmp_path: Path) -> None:
    hf_posswap.save(patch_model(build("gpt2"), scheme, max_length=2 * LENGTH), tmp_path / "base")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(hf_posswap.load(tmp_path / "base"), config).eval()
    model.save_pretrained(tmp_path / "prompts")
    expected = logits(model, IDS)
    assert gap(logits(hf_posswap.load(tmp_path / "prompts").eval(), IDS), expected) < 1e-5
    base = hf_posswap.load(tmp_path / "base")
    assert gap(logits(load_adapter(base, tmp_path / "prompts").eval(), IDS), expected) < 1e-5


def test_an_adapter_of_another_model_in_a_folder_below_is_left_alone(tmp_path: Path) -> None:
    below = tmp_path / "adapter" / "older"
    peft.get_peft_model(build("gpt2"), lora("gpt2")).save_pretrained(below)
    before = {path.name: path.read_bytes() for path in below.iterdir()}
    adapted("gpt2", "rope", tmp_path / "base").save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / SIDECAR).is_file()
    assert {path.name: path.read_bytes() for path in below.iterdir()} == before


@pytest.mark.parametrize("content", ["{", "[" * 9999, "3", "\udcff"])
def test_a_base_whose_config_was_damaged_since_is_one_clear_error(content: str, tmp_path: Path) -> None:
    model = adapted("gpt2", "rope", tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(content, errors="surrogateescape")
    for save in (hf_posswap.save, lambda model, folder: model.save_pretrained(folder)):
        with pytest.raises(CheckpointError, match="cannot read .*base.config.json, from whose folder the base of this"):
            save(model, tmp_path / "adapter")
        assert not (tmp_path / "adapter").exists()


def test_the_adapters_of_transformers_itself_carry_it_too(tmp_path: Path) -> None:
    model = hf_posswap.load(stored_base("gpt2", tmp_path / "base"))
    patch_model(model, "rope", max_length=2 * LENGTH)
    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):  # 5.24 asks for a PEFT that nobody has published
        with pytest.raises(ValueError, match=f"version of PEFT you are using is not compatible.*{MIN_PEFT_VERSION}"):
            model.add_adapter(lora("gpt2"))
        assert not hasattr(model, "peft_config")
        return
    model.add_adapter(lora("gpt2"))
    hf_posswap.save(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    assert gap(logits(hf_posswap.load(tmp_path / "adapter").eval(), IDS), logits(model.eval(), IDS)) == 0


def test_the_card_names_no_local_folder(tmp_path: Path) -> None:
    hf_posswap.save(adapted("gpt2", "rope", tmp_path / "base"), tmp_path / "adapter")
    card = (tmp_path / "adapter" / "README.md").read_text()
    head = card.split("---")[1]
    assert "hf_posswap" in head
    assert str(tmp_path) not in head


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda held: held | {"version": 2}, RecordError, "of version 1: update"),
        (lambda held: held | {"more": 1}, RecordError, "must hold version, base, base_is_swapped, record"),
        (lambda held: held | {"base": 3}, RecordError, "must hold version"),
        (lambda held: held | {"record": held["record"] | {"max_length": 2**40}}, RecordError, "max_length must be"),
        (lambda held: [held], CheckpointError, "posswap.json of .* must hold an object, got list"),
        (lambda held: held | {"base": None}, CheckpointError, "does not say where its base is"),
        (
            lambda held: held | {"base": "no/such-base"},
            CheckpointError,
            "the base of the adapter .* 'no/such-base', cannot",
        ),
    ],
)
def test_a_damaged_sidecar_is_refused_and_says_why(
    change: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    hf_posswap.save(adapted("gpt2", "rope", tmp_path / "base"), tmp_path / "adapter")
    path = tmp_path / "adapter" / SIDECAR
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(error, match=said):
        hf_posswap.load(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("task", "auto"),
    [
        ("SEQ_CLS", "AutoModelForSequenceClassification"),
        ("TOKEN_CLS", "AutoModelForTokenClassification"),
        ("FEATURE_EXTRACTION", "AutoModel"),
        (None, "AutoModelForSequenceClassification"),
    ],
)
def test_the_adapter_of_another_class_is_refused_instead_of_read_in_part(
    task: str | None, auto: str, tmp_path: Path
) -> None:
    """TRL's RewardTrainer puts one on a class with a new head, and its base is the folder of a causal model."""
    patch_model(build("llama"), "kerple").save_pretrained(tmp_path / "base")
    labels = {} if auto == "AutoModel" else {"num_labels": 1}
    of_class = getattr(transformers, auto)
    config = lora("llama", modules_to_save=["score", "posswap"] if labels else None)
    config.task_type = task
    trained = peft.get_peft_model(of_class.from_pretrained(tmp_path / "base", **labels), config).eval()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "posswap" in name and parameter.requires_grad:
                parameter.mul_(-3)
    trained.save_pretrained(tmp_path / "adapter")
    expected = trained(IDS)[0].detach()
    causal = hf_posswap.load(tmp_path / "base").eval()
    before = logits(causal, IDS)
    message = r"holds weights that LlamaForCausalLM has no place for: base_model\.model.*another class.*model_class of"
    with pytest.raises(CheckpointError, match=message):
        hf_posswap.load(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=message):
        load_adapter(causal, tmp_path / "adapter")
    assert gap(logits(causal, IDS), before) == 0
    loaded = hf_posswap.load(tmp_path / "adapter", model_class=of_class, **labels).eval()
    assert gap(loaded(IDS)[0].detach(), expected) < 1e-4


def test_broken_and_missing_files(tmp_path: Path) -> None:
    hf_posswap.save(adapted("gpt2", "rope", tmp_path / "base"), tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="the adapter .* cannot be loaded"):
        hf_posswap.load(tmp_path / "adapter")
    (tmp_path / "adapter" / SIDECAR).write_text("{")
    with pytest.raises(CheckpointError, match="cannot read posswap.json"):
        hf_posswap.load(tmp_path / "adapter")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no adapter \(adapter_config.json\)"):
        load_adapter(build("gpt2"), tmp_path / "empty")
    with pytest.raises(CheckpointError, match="holds no readable model config"):
        hf_posswap.load(tmp_path / "empty")


FRESH = """
import sys, torch, hf_posswap
from safetensors.torch import load_file
stored = load_file(sys.argv[1] + "/expected.safetensors")
model = hf_posswap.load(sys.argv[1]).eval()
with torch.no_grad():
    print(float((model(stored["ids"]).logits - stored["logits"]).abs().max()))
"""


@pytest.mark.parametrize("sidecar", [True, False])
def test_adapters_that_name_one_another_as_base_are_refused(sidecar: bool, tmp_path: Path) -> None:
    model = adapted("gpt2", "rope", tmp_path / "base")
    for name in ("one", "two"):
        hf_posswap.save(model, tmp_path / name)
        if not sidecar:
            (tmp_path / name / SIDECAR).unlink()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    for bases in ({"one": "one"}, {"one": "two", "two": "one"}, {"one": "link"}):
        for name, base in bases.items():
            for file, key in (("adapter_config.json", "base_model_name_or_path"), (SIDECAR, "base")):
                path = tmp_path / name / file
                if path.exists():
                    path.write_text(json.dumps(json.loads(path.read_text()) | {key: str(tmp_path / base)}))
        with pytest.raises(CheckpointError, match="adapters name one another without an end"):
            hf_posswap.load(tmp_path / "one")


@pytest.mark.slow
def test_it_loads_in_a_fresh_process(tmp_path: Path) -> None:
    model = adapted("gpt2", "kerple", tmp_path / "base")
    hf_posswap.save(model, tmp_path / "adapter")
    save_file({"ids": IDS, "logits": logits(model, IDS)}, tmp_path / "adapter" / "expected.safetensors")
    command = [sys.executable, "-c", FRESH, str(tmp_path / "adapter")]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout) == 0


def test_a_push_takes_the_sidecar_along(tmp_path: Path) -> None:
    model = adapted("gpt2", "rope", tmp_path / "base")
    hf_posswap.save(model, tmp_path / "adapter")
    for source in (model, tmp_path / "adapter"):
        files = hf_posswap.push(source, "someone/adapter", dry_run=True).files
        assert {SIDECAR, "adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(files)


def test_a_table_that_is_trained_in_full_is_taken_back_too(tmp_path: Path) -> None:
    model = adapted("gpt2", "learned", tmp_path / "base")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "wpe.modules_to_save" in key:
                parameter.add_(torch.randn_like(parameter))
    hf_posswap.unpatch_model(model)
    held = model.get_base_model().transformer.wpe
    for each in (held.original_module, held.modules_to_save["default"]):
        assert torch.equal(each.weight, build("gpt2").transformer.wpe.weight)
    with model.disable_adapter():
        assert gap(logits(model, IDS), logits(build("gpt2"), IDS)) == 0


@pytest.mark.parametrize("by_peft", [False, True])
def test_an_adapter_on_a_centred_base_is_refused_until_that_base_is_saved(tmp_path: Path, by_peft: bool) -> None:
    """The checkpoint that the adapter would name holds other token embeddings: it loaded with other logits."""
    model = build("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight += 0.5 * torch.randn(model.config.n_embd)
    model.save_pretrained(tmp_path / "base")
    model = hf_posswap.load(tmp_path / "base")
    hf_posswap.centre_table(model)
    patch_model(model, "alibi")
    for one in (model, copy.deepcopy(model)):
        adapted = add_adapter(one, lora("gpt2"))
        with pytest.raises(UnsupportedSwapError, match="centre_table has changed the token embeddings of GPT2LMHeadMo"):
            adapted.save_pretrained(tmp_path / "adapter") if by_peft else hf_posswap.save(adapted, tmp_path / "adapter")
        assert not (tmp_path / "adapter").exists()
    hf_posswap.save(adapted.merge_and_unload(), tmp_path / "centred")
    again = add_adapter(hf_posswap.load(tmp_path / "centred"), lora("gpt2")).eval()
    hf_posswap.save(again, tmp_path / "adapter")
    assert torch.equal(logits(hf_posswap.load(tmp_path / "adapter").eval(), IDS), logits(again, IDS))


TARGETS = ["q_proj", "v_proj"]
KINDS: dict[str, Any] = {
    "lora": peft.LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "dora": peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "adalora": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=TARGETS),
    "ia3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=[]),
    "loha": peft.LoHaConfig(r=2, target_modules=TARGETS),
    "lokr": peft.LoKrConfig(r=2, target_modules=TARGETS),
    "oft": peft.OFTConfig(oft_block_size=4, r=0, target_modules=TARGETS),
    "boft": peft.BOFTConfig(boft_block_size=4, target_modules=TARGETS),
    "vera": peft.VeraConfig(r=2, target_modules=TARGETS),
    "fourier": peft.FourierFTConfig(n_frequency=8, target_modules=TARGETS),
    "hra": peft.HRAConfig(r=2, target_modules=TARGETS),
    "vblora": peft.VBLoRAConfig(r=1, num_vectors=8, vector_length=2, topk=2, target_modules=TARGETS),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "tokens": peft.TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"]),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prompt encoder": peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM"),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def trained(model: Any, config: Any) -> Any:
    """Return PEFT's own model around `model`, its adapter as if it had been trained."""
    adapted = peft.get_peft_model(model, copy.deepcopy(config))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return adapted.eval()


def on_base(folder: Path, scheme: str | None) -> Any:
    model = hf_posswap.load(folder)
    return model if scheme is None else patch_model(model, scheme, max_length=2 * LENGTH if scheme == "yarn" else None)


@pytest.mark.parametrize("scheme", ["alibi", "fire"])
@pytest.mark.parametrize("kind", ["lora", "ia3", "loha", "lokr", "oft", "vera", "norms"])
def test_merging_keeps_the_trained_positions(kind: str, scheme: str, tmp_path: Path) -> None:
    """Most tuners hand what they unload the `weight` of what stood there, and a scheme has none; norms unload none."""
    options = {"learned": True} if scheme == "alibi" else {}
    model = patch_model(build("llama"), scheme, max_length=2 * LENGTH, **options)
    config = copy.deepcopy(KINDS[kind])
    config.modules_to_save = [*position_modules(model), *(config.modules_to_save or ())]
    adapted = trained(model, config)
    before, trained_values = logits(adapted, IDS), dict(adapted.get_base_model().model.posswap.named_parameters())
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, IDS), before, atol=1e-4, rtol=1e-4)
    again = hf_posswap.load(hf_posswap.save(merged, tmp_path / "merged")).eval()
    held = dict(merged.model.posswap.named_parameters())
    assert all(torch.equal(value, trained_values["modules_to_save.default." + name]) for name, value in held.items())
    assert torch.equal(logits(again, IDS), logits(merged, IDS))


@pytest.mark.parametrize("scheme", ["alibi", "fire", "rope"])
def test_rows_of_several_adapters_get_no_other_ones_positions(scheme: str) -> None:
    """PEFT's `adapter_names`: what a scheme learned is one set for a batch, so only the active adapter's rows go."""
    options = {"learned": True} if scheme == "alibi" else {}
    model = add_adapter(patch_model(build("llama"), scheme, **options), lora("llama")).eval()
    model.add_adapter("other", lora("llama", modules_to_save=position_modules(model)))
    model.add_adapter("third", lora("llama"))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.rand_like(parameter))
    alone = {}
    for name in ("default", "other", "third"):
        model.set_adapter(name)
        alone[name] = logits(model, IDS)
    with model.disable_adapter():
        alone["__base__"] = logits(model, IDS)
    batches = [(one, another) for one in alone for another in alone]
    for active in ("default", "other", "third"):
        model.set_adapter(active)
        goes = {"default": {"default"}, "other": {"other"}, "third": {"third", "__base__"}}[active]
        for names in batches:
            for run in (model, model.generate):
                given = {"input_ids": IDS, "adapter_names": list(names)}
                with torch.no_grad():
                    if scheme != "rope" and not goes.issuperset(names):
                        with pytest.raises(UnsupportedSwapError, match=r"adapter_names gives rows of one batch.*What"):
                            run(**given, **({"max_new_tokens": 1} if run is not model else {}))
                    elif run is model:
                        found = run(**given).logits
                        expected = torch.stack([alone[name][row] for row, name in enumerate(names)])
                        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(logits(model, IDS), alone[active])  # a refusal leaves none of PEFT's hooks


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT's own call, for prefixes
@pytest.mark.parametrize("scheme", ["alibi", "kerple"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_saves_goes_on_its_own_mechanism_and_on_no_other(kind: str, scheme: str, tmp_path: Path) -> None:
    base, adapter = stored_base("llama", tmp_path / "base"), tmp_path / "adapter"
    model = trained(on_base(base, scheme), KINDS[kind])
    model.save_pretrained(adapter)
    held = load_file(adapter / ADAPTER_WEIGHTS)
    prefix = next(name for name in held if name.endswith(RECORD)).removesuffix(RECORD)
    marked = [tensor for name, tensor in held.items() if name.startswith(prefix) and not name.endswith(RECORD)]
    assert marked
    assert all(tensor.shape[0] == 1 for tensor in marked)
    for sidecar in (True, False):  # someone copies the weights and their config alone
        if not sidecar:
            (adapter / SIDECAR).unlink()
        taken = peft.PeftModel.from_pretrained(on_base(base, scheme), adapter).eval()
        assert torch.equal(logits(taken, IDS), logits(model, IDS))
        for other in (None, "nope"):
            for load in (peft.PeftModel.from_pretrained, load_adapter):
                wrong = on_base(base, other)
                said = "is not swapped" if other is None else "carries nope"
                with pytest.raises(RecordError, match=f"trained on a llama swapped to {scheme}.*{said}"):
                    load(wrong, adapter)
                assert not hasattr(wrong, "peft_config")


@pytest.mark.parametrize("kind", [kind for kind, config in KINDS.items() if not config.is_prompt_learning])
def test_a_loop_that_loads_the_weights_itself_has_the_same(kind: str, tmp_path: Path) -> None:
    """By `peft.set_peft_model_state_dict`, as resuming code does."""
    base = stored_base("llama", tmp_path / "base")
    model = trained(on_base(base, "kerple"), KINDS[kind])
    model.save_pretrained(tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    again = peft.get_peft_model(on_base(base, "kerple"), copy.deepcopy(KINDS[kind])).eval()
    assert peft.set_peft_model_state_dict(again, weights).unexpected_keys == []
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    staged = peft.get_peft_model(on_base(base, "kerple"), copy.deepcopy(KINDS[kind])).eval()
    load_weights(staged, tmp_path / "adapter")  # as a recipe's stages do
    assert torch.equal(logits(staged, IDS), logits(model, IDS))
    first = min(weights)
    lacking = {name: weight for name, weight in weights.items() if name != first}
    save_file(lacking, tmp_path / "adapter" / ADAPTER_WEIGHTS)
    missing = re.escape(first.rpartition(".")[0])
    with pytest.raises(CheckpointError, match=rf"adapter does not fit: missing \['{missing}.*'\], unknown \[\]"):
        load_weights(staged, tmp_path / "adapter")
    whole = on_base(base, "kerple").eval()
    before = logits(whole, IDS)
    with pytest.raises(CheckpointError, match="lacks weights that its config asks for|cannot be loaded: KeyError"):
        load_adapter(whole, tmp_path / "adapter")
    assert torch.equal(logits(whole, IDS), before)
    for scheme, error in (
        ("alibi", RecordError),
        ("nope", RuntimeError),
        (None, RuntimeError),
    ):  # two are stock classes
        other = peft.get_peft_model(on_base(base, scheme), copy.deepcopy(KINDS[kind]))
        with pytest.raises(
            error, match="swapped to kerple.*carries alibi" if error is RecordError else "size mismatch"
        ):
            peft.set_peft_model_state_dict(other, weights)


def test_weights_in_memory_are_refused_too(tmp_path: Path) -> None:
    """As from the Hub, whose files are read after the adapter has been put in."""
    base = stored_base("llama", tmp_path / "base")
    trained(on_base(base, "alibi"), KINDS["lora"]).save_pretrained(tmp_path / "adapter")
    config = peft.PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    stock = peft.get_peft_model(hf_posswap.load(base), config)  # type: ignore[arg-type]
    marked = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    with pytest.raises(RecordError, match="this adapter was trained on a llama swapped to alibi"):
        peft.peft_model.set_peft_model_state_dict(stock, marked)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.set_peft_model_state_dict(stock, marked)
    marked[f"base_model.model.{RECORD}"] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    with pytest.raises(RecordError, match="hold a posswap_record that is not a record"):
        peft.peft_model.set_peft_model_state_dict(stock, marked)


WITHOUT = """
import sys
sys.modules["hf_posswap"] = None
import peft, transformers
transformers.logging.set_verbosity_error()
for folder in sys.argv[2:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
    try:
        peft.PeftModel.from_pretrained(model, folder)
        print("taken")
    except RuntimeError as error:
        print("size mismatch" in str(error))
"""


@pytest.mark.slow
def test_nothing_takes_it_where_hf_posswap_is_not_installed(tmp_path: Path) -> None:
    base = stored_base("llama", tmp_path / "base")
    kinds = ["lora", "dora", "ia3", "vera", "norms", "tokens", "prompt", "prefix"]
    for kind in kinds:
        trained(on_base(base, "alibi"), KINDS[kind]).save_pretrained(tmp_path / kind)
    trained(hf_posswap.load(base), KINDS["lora"]).save_pretrained(tmp_path / "stock")
    folders = [str(tmp_path / kind) for kind in [*kinds, "stock"]]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(base), *folders],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == [*("True" for _ in kinds), "taken"]


@pytest.mark.slow
def test_the_code_in_a_checkpoint_marks_its_adapters_too(tmp_path: Path) -> None:
    base = stored_base("llama", tmp_path / "base")
    on_base(base, "alibi").save_pretrained(tmp_path / "swapped")
    run = subprocess.run(
        [sys.executable, "-c", BUNDLED, *(str(tmp_path / name) for name in ("swapped", "adapter", "base"))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["0.0", "refused"]
    assert isinstance(hf_posswap.load(tmp_path / "adapter"), peft.PeftModel)


BUNDLED = """
import sys
sys.modules["hf_posswap"] = None
import torch, peft, transformers
swapped, adapter, base = sys.argv[1:]
def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
model = peft.get_peft_model(load(swapped), config).eval()
model.save_pretrained(adapter)
ids = torch.arange(9)[None]
with torch.no_grad():
    again = peft.PeftModel.from_pretrained(load(swapped), adapter).eval()
    print(float((again(ids).logits - model(ids).logits).abs().max()))
try:
    peft.PeftModel.from_pretrained(load(base), adapter)
except Exception as error:
    print("refused" if "swapped to alibi" in str(error) else error)
"""


def test_a_subfolder_is_looked_at_and_not_what_lies_above_it(tmp_path: Path) -> None:
    base, folder = stored_base("llama", tmp_path / "base"), tmp_path / "adapters"
    trained(on_base(base, "kerple"), KINDS["lora"]).save_pretrained(folder)
    trained(on_base(base, "alibi"), KINDS["lora"]).save_pretrained(folder / "second")
    taken = peft.PeftModel.from_pretrained(on_base(base, "alibi"), folder, subfolder="second")
    assert isinstance(taken, peft.PeftModel)
    with pytest.raises(RecordError, match="swapped to alibi.*carries kerple"):
        peft.PeftModel.from_pretrained(on_base(base, "kerple"), folder, subfolder="second")


def test_converting_an_initialization_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = trained(on_base(stored_base("llama", tmp_path / "base"), "alibi"), KINDS["lora"])
    with pytest.raises(UnsupportedSwapError, match="path_initial_model_for_weight_conversion is not supported"):
        model.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_of_a_native_swap_is_plain_peft(tmp_path: Path) -> None:
    """Stock transformers runs its base, so its weights are not marked; the sidecar still names the swap."""
    base = stored_base("llama", tmp_path / "base")
    model = trained(patch_model(hf_posswap.load(base), "yarn", max_length=2 * LENGTH), KINDS["lora"])
    model.save_pretrained(tmp_path / "adapter")
    assert not any(name.endswith(RECORD) for name in load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS))
    with pytest.raises(RecordError, match="swapped to yarn.*is not swapped"):
        peft.PeftModel.from_pretrained(hf_posswap.load(base), tmp_path / "adapter")


def test_an_older_adapter_is_known_by_the_swapped_folder_that_it_names(tmp_path: Path) -> None:
    """Formerly PEFT, and TRL by it, saved no sidecar and no marks."""
    stored_base("llama", tmp_path / "plain")
    hf_posswap.save(on_base(tmp_path / "plain", "alibi"), tmp_path / "base")
    model = trained(hf_posswap.load(tmp_path / "base"), KINDS["lora"])
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / SIDECAR).unlink()
    held = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    former = {name: tensor[0].contiguous() for name, tensor in held.items() if not name.endswith(RECORD)}
    save_file(former, tmp_path / "adapter" / ADAPTER_WEIGHTS)
    with pytest.raises(RecordError, match="swapped to alibi.*is not swapped"):
        load_adapter(hf_posswap.load(tmp_path / "plain"), tmp_path / "adapter")
    for taken in (
        hf_posswap.load(tmp_path / "adapter"),
        load_adapter(hf_posswap.load(tmp_path / "base"), tmp_path / "adapter"),
    ):
        assert torch.equal(logits(taken.eval(), IDS), logits(model, IDS))


def lora_of_own_loading(folder: Path) -> Any:
    """Return the adapter's config that transformers' own loading takes on an unswapped model, by trying it.

    That of 5.14 leaves out, with a report, the modules to save of an adapter that PEFT 0.21.2 wrote.
    """
    stored_base("llama", folder / "unswapped")
    model = trained(hf_posswap.load(folder / "unswapped"), KINDS["lora"])
    model.save_pretrained(folder / "of-unswapped")
    own = hf_posswap.load(folder / "unswapped").eval()
    own.load_adapter(str(folder / "of-unswapped"))
    if torch.equal(logits(own, IDS), logits(model, IDS)):
        return KINDS["lora"]
    return peft.LoraConfig(r=2, target_modules=TARGETS)


def test_transformers_own_loading_of_adapters(tmp_path: Path) -> None:
    lora = lora_of_own_loading(tmp_path)
    stored_base("llama", tmp_path / "plain")
    hf_posswap.save(on_base(tmp_path / "plain", "alibi"), tmp_path / "base")
    model = trained(hf_posswap.load(tmp_path / "base"), lora)
    model.save_pretrained(tmp_path / "adapter")
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(logits(auto, IDS), logits(model, IDS))
    swapped = hf_posswap.load(tmp_path / "base").eval()
    swapped.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(logits(swapped, IDS), logits(model, IDS))
    other = on_base(tmp_path / "plain", "kerple")
    before = sorted(other.state_dict())
    with pytest.raises(RecordError, match="swapped to alibi.*carries kerple"):
        other.load_adapter(str(tmp_path / "adapter"))
    assert sorted(other.state_dict()) == before
    assert not getattr(other, "_hf_peft_config_loaded", False)
    weights = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    in_memory = {"adapter_state_dict": weights, "peft_config": peft.PeftConfig.from_pretrained(tmp_path / "adapter")}
    for scheme, said in ((None, "is not swapped"), ("nope", "carries nope")):  # stock transformers runs both
        for asked in ({"peft_model_id": str(tmp_path / "adapter")}, in_memory):
            stock = on_base(tmp_path / "plain", scheme)
            before = sorted(stock.state_dict())
            with pytest.raises(RecordError, match=f"swapped to alibi.*{said}"):
                stock.load_adapter(**asked)
            assert sorted(stock.state_dict()) == before
            assert not getattr(stock, "_hf_peft_config_loaded", False)
    stock = on_base(tmp_path / "plain", None)
    trained(hf_posswap.load(tmp_path / "plain"), lora).save_pretrained(tmp_path / "stock")
    stock.load_adapter(str(tmp_path / "stock"))  # its own


def test_an_adapter_is_exchanged_in_place_for_one_of_the_same_mechanism(tmp_path: Path) -> None:
    """By PEFT's hotswap."""
    base = stored_base("llama", tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=TARGETS)
    for scheme in (None, "alibi", "kerple", "yarn"):
        for number in range(2):
            torch.manual_seed(number)
            model = peft.get_peft_model(on_base(base, scheme), copy.deepcopy(config))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.add_(torch.randn_like(parameter) * (0.1 if "lora" in name else 0.0))
            model.save_pretrained(tmp_path / f"{scheme}-{number}")
    for scheme, other in ((None, "alibi"), ("alibi", "kerple"), ("alibi", "yarn"), ("yarn", "alibi")):
        first, second = (
            peft.PeftModel.from_pretrained(on_base(base, scheme), tmp_path / f"{scheme}-{n}").eval() for n in (0, 1)
        )
        before, after = logits(first, IDS), logits(second, IDS)
        assert gap(before, after) > CHANGE
        for folder, sidecar in ((f"{other}-1", True), (f"{other}-1", False)):
            if not sidecar and other == "yarn":
                continue  # then nothing says whose it is
            (tmp_path / folder / SIDECAR).rename(tmp_path / folder / "set aside") if not sidecar else None
            with pytest.raises(RecordError, match=f"swapped to {other}.*{scheme or 'not swapped'}"):
                hotswap_adapter(first, str(tmp_path / folder), adapter_name="default", torch_device="cpu")
            (tmp_path / folder / "set aside").rename(tmp_path / folder / SIDECAR) if not sidecar else None
        assert torch.equal(logits(first, IDS), before)
        hotswap_adapter(first, str(tmp_path / f"{scheme}-1"), adapter_name="default", torch_device="cpu")
        assert torch.equal(logits(first, IDS), after)


def test_a_sidecar_is_looked_at_by_transformers_own_loading(tmp_path: Path) -> None:
    """The weights of an adapter whose base stock transformers runs are not marked."""
    base = stored_base("llama", tmp_path / "base")
    yarn = patch_model(hf_posswap.load(base), "yarn", max_length=2 * LENGTH)
    yarn.save_pretrained(tmp_path / "yarn")
    model = trained(hf_posswap.load(tmp_path / "yarn"), lora_of_own_loading(tmp_path))
    model.save_pretrained(tmp_path / "adapter")
    for scheme, said in ((None, "is not swapped"), ("alibi", "carries alibi")):
        other = on_base(base, scheme)
        before = sorted(other.state_dict())
        with pytest.raises(RecordError, match=f"swapped to yarn.*{said}"):
            other.load_adapter(str(tmp_path / "adapter"))
        assert sorted(other.state_dict()) == before
    own = hf_posswap.load(tmp_path / "yarn").eval()
    own.load_adapter(str(tmp_path / "adapter"))
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(logits(own, IDS), logits(model, IDS))
    assert torch.equal(logits(auto, IDS), logits(model, IDS))
    (tmp_path / "adapter" / SIDECAR).write_text("[" * 9999)
    for load in (
        lambda: own.load_adapter(str(tmp_path / "adapter"), adapter_name="second"),
        lambda: load_adapter(own, tmp_path / "adapter"),
    ):
        with pytest.raises(CheckpointError, match="cannot read posswap.json"):
            load()


@pytest.mark.parametrize(
    ("kind", "scheme", "dtype"),
    [
        ("lora", "alibi", torch.int8),
        ("vera", "alibi", torch.bool),
        ("prompt", "alibi", torch.int64),
        ("ia3", "yarn", torch.uint8),
        ("norms", "yarn", torch.int8),
        ("lora", None, torch.int8),
    ],
)
def test_integers_are_no_weights(kind: str, scheme: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    base, folder = stored_base("llama", tmp_path / "base"), tmp_path / "adapter"
    trained(on_base(base, scheme), KINDS[kind]).save_pretrained(folder)
    held = load_file(folder / ADAPTER_WEIGHTS)
    name = next(name for name in held if not name.endswith(RECORD))
    held[name] = held[name].to(dtype)
    save_file(held, folder / ADAPTER_WEIGHTS)
    said = rf"(the adapter .*|this adapter) hold integers.* where LlamaForCausalLM .*: {name} \(\w+\)"
    peft_config = peft.PeftConfig.from_pretrained(folder)
    loads = [lambda model: load_adapter(model, folder)]
    if scheme is not None:  # what else is put on a stock model is no business of this package
        loads.append(lambda model: peft.PeftModel.from_pretrained(model, folder))
        loads.append(
            lambda model: peft.peft_model.set_peft_model_state_dict(peft.get_peft_model(model, peft_config), held)
        )
        if not peft_config.is_prompt_learning:
            loads.append(lambda model: model.load_adapter(str(folder)))
            loads.append(lambda model: model.load_adapter(adapter_state_dict=held, peft_config=peft_config))
    for number, load in enumerate(loads):
        model = on_base(base, scheme)
        before = sorted(model.state_dict())
        with pytest.raises(CheckpointError, match=said):
            load(model)
        assert number == 2 or sorted(model.state_dict()) == before
    with pytest.raises(CheckpointError, match=said):
        hf_posswap.load(folder)


def test_integers_that_an_adapter_has_as_such_are_taken(tmp_path: Path) -> None:
    base = stored_base("llama", tmp_path / "base")
    model = on_base(base, "alibi")
    model.lm_head.register_buffer("seen", torch.tensor([3]))
    trained(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])).save_pretrained(
        tmp_path / "a"
    )
    held = load_file(tmp_path / "a" / ADAPTER_WEIGHTS)
    assert [name for name, tensor in held.items() if tensor.dtype == torch.int64] == ["base_model.model.lm_head.seen"]
    again = on_base(base, "alibi")
    again.lm_head.register_buffer("seen", torch.tensor([0]))
    taken = load_adapter(again, tmp_path / "a")
    assert taken.get_base_model().lm_head.modules_to_save["default"].seen.item() == 3


def test_a_model_that_peft_wraps_is_freed_when_it_is_dropped(tmp_path: Path) -> None:
    model = trained(on_base(stored_base("llama", tmp_path / "base"), "alibi"), KINDS["lora"])
    cycles = trained(build("llama"), KINDS["lora"])
    model.save_pretrained(tmp_path / "adapter")
    gc.collect()
    gc.disable()
    try:
        watched, stock = weakref.ref(model.get_base_model()), weakref.ref(cycles.get_base_model())
        del model, cycles
        assert (watched() is None) == (stock() is None)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")  # TRL's own
def test_what_trl_saves_and_resumes(tmp_path: Path) -> None:
    hf_posswap.save(on_base(stored_base("llama", tmp_path / "plain"), "kerple"), tmp_path / "base")
    rows = [{"input_ids": row.tolist()} for row in words(8, 16)]

    def trainer(steps: int) -> Any:
        settings = trl.SFTConfig(
            output_dir=str(tmp_path / "out"),
            max_steps=steps,
            save_steps=1,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            report_to="none",
            seed=0,
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        return trl.SFTTrainer(
            hf_posswap.load(tmp_path / "base"),
            args=settings,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=byte_tokenizer(),
            peft_config=lora("llama"),
        )

    trainer(1).train()
    last = trainer(2)
    last.train(resume_from_checkpoint=True)  # the adapter of the first, by PEFT's own load_adapter
    last.save_model(str(tmp_path / "adapter"))
    expected = logits(last.model.eval(), IDS)
    for folder in (tmp_path / "adapter", tmp_path / "out" / "checkpoint-2"):
        assert torch.equal(logits(hf_posswap.load(folder).eval(), IDS), expected)
        with pytest.raises(RecordError, match="swapped to kerple.*is not swapped"):
            peft.PeftModel.from_pretrained(hf_posswap.load(tmp_path / "plain"), folder)
