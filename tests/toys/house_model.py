"""A model of one's own, known to the Auto classes and to no family of ours: the toy family describes it."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, BertGenerationConfig, BertGenerationDecoder


class HouseConfig(BertGenerationConfig):
    """The config of a decoder."""

    model_type = "house"


class HouseForCausalLM(BertGenerationDecoder):
    """BertGeneration's code under another name."""

    config_class = HouseConfig


AutoConfig.register(HouseConfig.model_type, HouseConfig)
AutoModelForCausalLM.register(HouseConfig, HouseForCausalLM)
