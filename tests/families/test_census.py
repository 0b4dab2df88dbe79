"""The census: every language model class of transformers is supported or refused with its reason; and tiny models."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers.models.auto import modeling_auto

from hf_posswap.errors import UnknownNameError
from hf_posswap.families import FAMILIES
from hf_posswap.families.locating import REFUSED
from hf_posswap.patching.inspect.census import ASKED, ClassEntry, census
from hf_posswap.testing.tiny import TINY_LENGTH, TINY_VOCABULARY, language_models, tiny_config, tiny_model
from tests.docs.pages import text_of
from tests.stock import UNBUILT

MAPS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")


def test_the_classes_are_those_of_the_auto_maps() -> None:
    maps = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in MAPS]
    assert set(language_models()) == {name for found in maps for name in found.values()}
    for name, types in language_models().items():
        assert all(any(found.get(kind) == name for found in maps) for kind in types)


def test_an_entry_says_what_planning_says() -> None:
    entries = {entry.name: entry for entry in census(["Gemma3ForCausalLM", "MambaForCausalLM", "BertForMaskedLM"])}
    gemma, mamba, bert = (entries[name] for name in ("Gemma3ForCausalLM", "MambaForCausalLM", "BertForMaskedLM"))
    assert gemma.routes == {"rope": "native", "yarn": "native", "alibi": "plugin", "nope": "native"}
    assert gemma.native is not None
    assert "in layers of type full_attention" in gemma.native
    assert gemma.reason is None
    assert (mamba.family, mamba.routes, mamba.supported) == (None, {}, False)
    assert mamba.reason is not None
    assert "recurrent" in mamba.reason
    assert (bert.family, bert.routes["rope"], bert.routes["nope"]) == ("bert", "plugin", "no")
    assert bert.reason == "nope: nope needs a causal model; BertForMaskedLM sees both sides."
    assert bert.to_dict() == {
        "name": "BertForMaskedLM",
        "model_types": ["bert"],
        "family": "bert",
        "native": bert.native,
        "routes": bert.routes,
        "reason": bert.reason,
        "supported": True,
    }


def test_a_scheme_that_does_not_fit_the_rotation_of_a_class_is_refused_in_its_entry() -> None:
    (entry,) = census(["GptOssForCausalLM"], every_scheme=True)  # by YaRN, which scales cos and sin
    assert (entry.routes["rnope"], entry.routes["rope"]) == ("no", "native")
    assert "rnope: rnope: the model's own rotation is not a plain one" in (entry.reason or "")


@pytest.fixture(scope="module")
def everything() -> list[ClassEntry]:
    """Return the whole census."""
    return census()


@pytest.mark.slow
def test_at_least_150_classes_are_supported_and_every_other_has_its_reason(everything: list[ClassEntry]) -> None:
    assert [entry.name for entry in everything] == sorted(language_models())
    assert sum(entry.supported for entry in everything) >= 150
    for entry in everything:
        assert entry.reason or "no" not in entry.routes.values()
        assert entry.routes.keys() in (set(), set(ASKED))
        assert entry.family is None or entry.family in FAMILIES
        # by a family, by its name, or by nothing that anybody has looked at
        assert entry.family is not None or REFUSED.keys() & set(entry.model_types) or entry.name in UNBUILT, entry.name
        assert "\n" not in (entry.reason or "")
        assert "ATTENTION_PROVED" not in (entry.reason or ""), f"{entry.name}: {entry.reason}"


def test_every_text_class_is_in_the_support_table_or_refused_by_its_name() -> None:
    page = text_of(".docs/pages/support.md")
    table, _, left_out = page.partition("Classes that cannot be patched, and why")
    rows = [line for line in table.splitlines() if line.startswith("| ") and line.count("|") > 10]
    supported = set(re.findall(r"`([^`]+)`", " ".join(rows)))
    unknown = {}
    for name, types in language_models().items():
        missing = [kind for kind in types if kind not in supported and not REFUSED.get(kind)]
        if missing and f"`{name}`" not in left_out:
            unknown[name] = missing
    assert not unknown, f"{unknown}: see the page Extending, 'A new model type'"


@pytest.mark.slow
def test_rotary_classes_are_native_or_known_exceptions(everything: list[ClassEntry]) -> None:
    rotary = [entry for entry in everything if entry.native is not None and entry.native.startswith("rope, theta")]
    exceptions = {entry.name for entry in rotary if entry.routes["rope"] != "native"}
    assert len(rotary) >= 115
    assert exceptions <= {
        "DbrxForCausalLM",  # whose config transformers 5.14 cannot read back
        # interleaved by tables of their own, which no rotary module holds
        "CodeGenForCausalLM",
        "GPTJForCausalLM",
        "RoFormerForCausalLM",
        "RoFormerForMaskedLM",
        "EsmForMaskedLM",
    }


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(4))
def test_every_class_has_a_tiny_model(shard: int) -> None:
    for name in sorted(set(language_models()) - UNBUILT.keys())[shard::4]:
        model = tiny_model(name)
        assert type(model).__name__ == name
        assert all(parameter.is_meta for parameter in model.parameters()), name
        assert not model.training
        assert sum(parameter.numel() for parameter in model.parameters()) < 10_000_000, name


@pytest.mark.parametrize("kind", ["llama", "BertForMaskedLM", "bart", "gemma3"])
def test_tiny_models_are_tiny_and_the_same_each_time(kind: str) -> None:
    first, again, other = (tiny_model(kind, meta=False, seed=seed) for seed in (0, 0, 1))
    before = torch.random.get_rng_state()
    tiny_model(kind, meta=False)
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in weights)
    assert not any(torch.equal(a, c) for a, _, c in weights if a.numel() > 1)
    text = first.config.get_text_config()
    assert (text.vocab_size, text.max_position_embeddings) == (TINY_VOCABULARY, TINY_LENGTH)


def test_every_type_of_layers_that_rotates_is_there() -> None:
    assert set(tiny_model("gemma3_text").config.layer_types) == {"full_attention", "sliding_attention"}


def test_changes_reach_the_config_and_the_configs_in_it() -> None:
    from transformers import Gemma3Config, LlamaConfig

    assert tiny_config(LlamaConfig, hidden_size=32).hidden_size == 32
    config: Any = tiny_config(Gemma3Config, text_config={"num_attention_heads": 2})
    assert (config.text_config.num_attention_heads, config.text_config.hidden_size) == (2, 64)


def test_decoders_of_encoder_kinds_see_the_past_alone() -> None:
    assert tiny_model("BertLMHeadModel").config.is_decoder is True
    assert tiny_model("BertForMaskedLM").config.is_decoder is False


def test_an_unknown_model_is_refused_with_near_names() -> None:
    with pytest.raises(UnknownNameError, match="unknown model 'lama'. Did you mean .*'llama'"):
        tiny_model("lama")


def test_refused_model_types_belong_to_no_family() -> None:
    claimed = {kind for _, family in FAMILIES.items() for kind in family.model_types}
    assert not claimed & REFUSED.keys()
