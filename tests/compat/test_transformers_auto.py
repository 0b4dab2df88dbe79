"""What transformers' Auto classes know, of the transformers that is installed."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

from hf_posswap.compat import transformers_auto
from tests.toys.house_model import HouseConfig, HouseForCausalLM

TINY = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)


def test_auto_mapping() -> None:
    mapping = transformers_auto.auto_mapping(AutoModelForCausalLM)
    assert mapping[GPT2Config] is GPT2LMHeadModel
    assert LlamaConfig in mapping
    assert transformers_auto.auto_mapping(GPT2LMHeadModel) is None


def test_language_classes() -> None:
    assert transformers_auto.language_classes("gpt2") == {"CAUSAL_LM": (GPT2Config, GPT2LMHeadModel)}
    assert set(transformers_auto.language_classes("bert")) == {"CAUSAL_LM", "MASKED_LM"}
    assert transformers_auto.language_classes("no_such_type") == {}


def test_language_classes_that_another_package_registers() -> None:
    assert transformers_auto.language_classes(HouseConfig.model_type) == {"CAUSAL_LM": (HouseConfig, HouseForCausalLM)}


def test_auto_mappings() -> None:
    class OwnConfig(GPT2Config):
        """A config that no Auto class knows."""

        model_type = "own_of_a_test"

    class OwnModel(GPT2LMHeadModel):
        """Its model."""

        config_class = OwnConfig

    found = list(transformers_auto.auto_mappings())
    of_gpt2 = [mapping for mapping in found if GPT2Config in mapping]
    assert len(of_gpt2) >= 4  # the base, causal, sequences, tokens, ...
    ids = set(map(id, found))
    assert {id(transformers_auto.auto_mapping(auto)) for auto in (AutoModel, AutoModelForCausalLM)} <= ids
    mapping = transformers_auto.auto_mapping(AutoModelForCausalLM)
    assert OwnConfig not in mapping  # a config of the same base, and another name
    mapping.register(OwnConfig, OwnModel, exist_ok=True)
    assert OwnConfig in mapping
    assert type(AutoModelForCausalLM.from_config(OwnConfig(**TINY.to_diff_dict()))) is OwnModel


def test_class_names() -> None:
    for task, kind, name in (
        ("CAUSAL_LM", "gpt2", "GPT2LMHeadModel"),
        ("MASKED_LM", "bert", "BertForMaskedLM"),
        ("SEQ_TO_SEQ_CAUSAL_LM", "t5", "T5ForConditionalGeneration"),
    ):
        names = transformers_auto.class_names(task)
        assert names[kind] == name
        assert set(names.values()) <= set(dir(transformers))


def test_build_model() -> None:
    model = transformers_auto.build_model(GPT2LMHeadModel, TINY, dtype=torch.bfloat16, attn_implementation="eager")
    assert type(model) is GPT2LMHeadModel
    assert model.dtype == torch.bfloat16
    model.set_attn_implementation("sdpa")  # which it may choose, as a loaded one


def test_auto_class_name() -> None:
    for auto, names in {
        "AutoModelForCausalLM": ("GPT2LMHeadModel", "LlamaForCausalLM"),
        "AutoModelForMaskedLM": ("BertForMaskedLM",),
        "AutoModelForSeq2SeqLM": ("T5ForConditionalGeneration", "BartForConditionalGeneration"),
        "AutoModelForImageTextToText": ("Qwen2VLForConditionalGeneration",),
        "AutoModelForSpeechSeq2Seq": ("WhisperForConditionalGeneration",),
        "AutoModelForSequenceClassification": ("BertForSequenceClassification",),
        "AutoModelForTokenClassification": ("BertForTokenClassification",),
        "AutoModelForQuestionAnswering": ("BertForQuestionAnswering",),
        "AutoModelForMultipleChoice": ("BertForMultipleChoice",),
        "AutoModelForImageClassification": ("ViTForImageClassification",),
        "AutoModel": ("BertModel", "LlamaModel"),
    }.items():
        mapping = transformers_auto.auto_mapping(getattr(transformers, auto))
        for name in names:
            assert transformers_auto.auto_class_name(name) == auto
            cls = getattr(transformers, name)
            assert mapping[cls.config_class] is cls
