"""`peft:` is a PEFT config of any type that is proved here: adapters train with what the swap added, and load again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.errors import ConfigError
from hf_posswap.training.config.theirs import PROVED
from hf_posswap.training.trainable import (
    TrainableSettings,
    base_name,
    parameter_groups,
    position_names,
    prepare_trainable,
)
from tests.training.engine_runs import trained
from tests.training.tiny_models import VOCABULARY, WINDOW, tiny

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
IDS = torch.randint(0, VOCABULARY, (2, WINDOW), generator=torch.Generator().manual_seed(0))
SMALL: dict[str, dict[str, Any]] = {"FOURIERFT": {"n_frequency": 16}, "MISS": {"r": 4}}
"""What a model of 32 numbers a token needs beyond PEFT's defaults."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROVED)
def test_every_type_trains_adapters_and_positions_alone_and_loads_as_it_was(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    base = patch_model(tiny("llama"), "kerple", max_length=2 * WINDOW)
    base.save_pretrained(tmp_path / "base")
    positions = {base_name(name) for name in position_names(base)}
    frozen = {base_name(name): p.detach().clone() for name, p in base.named_parameters()}
    model = prepare_trainable(base, TrainableSettings(), {"peft_type": kind, **SMALL.get(kind, {})})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = parameter_groups(model, TrainableSettings(), learning_rate=1e-2, weight_decay=0.0)
    optimizer = torch.optim.AdamW(groups)
    for _ in range(3):
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {base_name(name) for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert positions <= moved
    assert moved - positions
    assert (moved - positions).isdisjoint(frozen)
    model.eval().save_pretrained(tmp_path / "adapter")
    again = hf_posswap.load_adapter(hf_posswap.load(tmp_path / "base"), tmp_path / "adapter").eval()
    with torch.no_grad():
        found, plain = model(input_ids=IDS).logits, hf_posswap.load(tmp_path / "base").eval()(input_ids=IDS).logits
        torch.testing.assert_close(again(input_ids=IDS).logits, found)
    assert float((found - plain).abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "base"),
    [
        ({"r": 3, "lora_alpha": 6, "lora_dropout": 0.25, "use_rslora": True, "bias": "all"}, "llama"),
        ({"r": 2, "target_modules": "all-linear", "exclude_modules": ["lm_head"]}, "gpt2"),
        (
            {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
            "llama",
        ),
        ({"peft_type": "loha", "r": 2, "alpha": 4, "rank_dropout": 0.5}, "llama"),
    ],
)
def test_the_keys_of_a_recipe_arrive_in_the_config_of_the_adapter(
    tmp_path: Path, fields: dict[str, Any], base: str
) -> None:
    done = trained(tmp_path, kind=base, peft=fields, swap={"scheme": {"name": "kerple"}})
    held = json.loads((done.model / "adapter_config.json").read_text())
    for name, value in fields.items():
        if value == "all-linear":  # PEFT writes the modules that it found
            assert {part.rpartition(".")[2] for part in held[name]} == {"c_attn", "c_proj", "c_fc"}
            continue
        same = sorted(held[name]) == sorted(value) if isinstance(value, list) else held[name] == value
        assert same or (name == "peft_type" and held[name] == value.upper()), name
    assert held["modules_to_save"] == ["posswap"]
    assert done.report["training"]["what"] == fields.get("peft_type", "LORA").lower()
    assert hf_posswap.load(done.model).get_base_model().config.posswap["scheme"]["name"] == "kerple"


def test_what_peft_itself_refuses_is_said_without_a_traceback() -> None:
    with pytest.raises(ConfigError, match=r"peft: LOHA on GPT2LMHeadModel: Target module .*Conv1D.* not supported"):
        prepare_trainable(tiny("gpt2"), TrainableSettings(), {"peft_type": "LOHA"})
    with pytest.raises(ConfigError, match=r"peft: LORA on LlamaForCausalLM: Target modules .*nowhere.* not found"):
        prepare_trainable(tiny("llama"), TrainableSettings(), {"peft_type": "LORA", "target_modules": ["nowhere"]})
    with pytest.raises(ConfigError, match=r"peft: .*r.* should be a positive integer"):
        prepare_trainable(tiny("llama"), TrainableSettings(), {"peft_type": "LORA", "r": 0})
