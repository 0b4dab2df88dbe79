"""Tiny random models, one a family: the only thing that the suite must be told of a new family."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hf_posswap.testing.contract.models import (
    BERT,
    BERT_QV,
    FIRST_WORD,
    GPT2,
    LENGTH,
    LLAMA,
    PADDING,
    QV,
    SMALL,
    VOCABULARY,
    Tiny,
)
from tests.toys.house_model import HouseConfig, HouseForCausalLM

__all__ = [
    "BERT",
    "BERT_QV",
    "FIRST_WORD",
    "GPT2",
    "LENGTH",
    "PADDING",
    "QV",
    "ROBERTA",
    "TINY",
    "VOCABULARY",
    "Tiny",
    "build",
]

_OPT: dict[str, Any] = {
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "word_embed_proj_dim": 64,
    "init_std": 0.2,
    "dropout": 0.0,
}
ROBERTA = BERT | {"max_position_embeddings": LENGTH + PADDING + 1, "type_vocab_size": 1}
_NEOX: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "rotary_pct": 0.5,
}
TINY: dict[str, Tiny] = {
    "gpt2": SMALL["gpt2"],
    "opt": Tiny("OPTForCausalLM", "OPTConfig", _OPT, QV),
    "bert": SMALL["bert"],
    "bert (is_decoder)": Tiny("BertLMHeadModel", "BertConfig", BERT | {"is_decoder": True}, BERT_QV),
    "roberta": Tiny("RobertaForMaskedLM", "RobertaConfig", ROBERTA, BERT_QV, generates=False),
    "llama": SMALL["llama"],
    "mistral": Tiny("MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": None}, QV),
    "mistral (sliding_window)": Tiny("MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 8}, QV),
    "qwen2": Tiny("Qwen2ForCausalLM", "Qwen2Config", LLAMA, QV),
    "qwen3": Tiny("Qwen3ForCausalLM", "Qwen3Config", LLAMA, QV),
    "gemma": Tiny("GemmaForCausalLM", "GemmaConfig", LLAMA, QV),
    "gpt_neox": Tiny("GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX, ("query_key_value",)),
    "cohere": Tiny("CohereForCausalLM", "CohereConfig", LLAMA | {"logit_scale": 1.0}, QV),
    "glm": Tiny("GlmForCausalLM", "GlmConfig", LLAMA | {"attention_bias": True}, QV),
    "house": Tiny(HouseForCausalLM, HouseConfig, BERT | {"is_decoder": True}, BERT_QV),
}


def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return the tiny model called `name`, in eval mode; the same weights for the same seed."""
    return TINY[name].build(seed, **changes)
