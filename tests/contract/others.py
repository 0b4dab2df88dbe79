"""Tiny random models of the other families of one stack: the schemes of each site run every point on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_posswap.testing.contract.models import MODELS
from tests.contract.limits import limits_of
from tests.contract.models import BERT, BERT_QV, GPT2, LENGTH, QV, ROBERTA, TINY, Tiny
from tests.contract.paired import PAIRED
from tests.contract.rotary_kinds import KINDS_OF_ROTARY

_GPT_NEO: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
}
_BLOOM: dict[str, Any] = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
_FALCON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
}
_XGLM: dict[str, Any] = {
    "d_model": 64,
    "ffn_dim": 96,
    "num_layers": 2,
    "attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "init_std": 0.2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_MPT: dict[str, Any] = {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": LENGTH, "initializer_range": 0.2}
_CTRL: dict[str, Any] = {
    "n_embd": 64,
    "dff": 96,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LENGTH,
    "initializer_range": 0.2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
_DISTILBERT: dict[str, Any] = {
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}

_TROCR: dict[str, Any] = {
    "d_model": 64,
    "decoder_ffn_dim": 96,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "init_std": 0.2,
    "dropout": 0.0,
    "is_decoder": True,
}

_XLM: dict[str, Any] = {
    "emb_dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": LENGTH,
    "embed_init_std": 0.2,
    "init_std": 0.2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}

OTHERS: dict[str, Tiny] = {
    "gpt_neo": Tiny("GPTNeoForCausalLM", "GPTNeoConfig", _GPT_NEO, QV),
    "bloom": Tiny("BloomForCausalLM", "BloomConfig", _BLOOM, ("query_key_value",), inside="alibi"),
    "falcon": Tiny("FalconForCausalLM", "FalconConfig", _FALCON, ("query_key_value",)),
    "gptj": Tiny("GPTJForCausalLM", "GPTJConfig", GPT2 | {"rotary_dim": 8}, QV, inside="rope"),
    "biogpt": Tiny("BioGptForCausalLM", "BioGptConfig", BERT, QV),
    "xglm": Tiny("XGLMForCausalLM", "XGLMConfig", _XGLM, QV),
    "mpt": Tiny("MptForCausalLM", "MptConfig", _MPT, ("Wqkv",), inside="alibi"),
    "codegen": Tiny("CodeGenForCausalLM", "CodeGenConfig", GPT2 | {"rotary_dim": 8}, ("qkv_proj",), inside="rope"),
    "ctrl": Tiny("CTRLLMHeadModel", "CTRLConfig", _CTRL, ("Wq", "Wv")),
    "openai-gpt": Tiny("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", GPT2, ("c_attn",)),
    "distilbert": Tiny("DistilBertForMaskedLM", "DistilBertConfig", _DISTILBERT, ("q_lin", "v_lin"), generates=False),
    "albert": Tiny("AlbertForMaskedLM", "AlbertConfig", BERT | {"embedding_size": 16}, BERT_QV, generates=False),
    "mpnet": Tiny("MPNetForMaskedLM", "MPNetConfig", ROBERTA, ("q", "v"), generates=False),
    "roformer": Tiny("RoFormerForMaskedLM", "RoFormerConfig", BERT, BERT_QV, generates=False, inside="rope"),
    "esm": Tiny("EsmForMaskedLM", "EsmConfig", ROBERTA, BERT_QV, generates=False),
    "megatron-bert": Tiny("MegatronBertForMaskedLM", "MegatronBertConfig", BERT, BERT_QV, generates=False),
    "squeezebert": Tiny(  # PEFT merges no grouped convolution, as those of queries and keys are
        "SqueezeBertForMaskedLM",
        "SqueezeBertConfig",
        BERT | {"embedding_size": 64},
        ("post_attention.conv1d",),
        generates=False,
    ),
    "big_bird": Tiny(
        "BigBirdForMaskedLM", "BigBirdConfig", BERT | {"attention_type": "original_full"}, BERT_QV, generates=False
    ),
    "convbert": Tiny("ConvBertForMaskedLM", "ConvBertConfig", BERT | {"embedding_size": 16}, BERT_QV, generates=False),
    "deberta": Tiny("DebertaForMaskedLM", "DebertaConfig", BERT, ("in_proj",), generates=False),
    "trocr": Tiny("TrOCRForCausalLM", "TrOCRConfig", _TROCR, QV),
    "layoutlm": Tiny("LayoutLMForMaskedLM", "LayoutLMConfig", BERT, BERT_QV, generates=False),
    "xlm": Tiny("XLMWithLMHeadModel", "XLMConfig", _XLM, ("q_lin", "v_lin"), generates=False),
    "longformer": Tiny(
        "LongformerForMaskedLM", "LongformerConfig", ROBERTA | {"attention_window": 8}, BERT_QV, generates=False
    ),
    "tapas": Tiny("TapasForMaskedLM", "TapasConfig", BERT, BERT_QV, generates=False),
    **KINDS_OF_ROTARY,
}
"""One model of each other family of one stack: the schemes of each site run every point on it."""

ALL = {name: replace(tiny, limits=limits_of(name)) for name, tiny in (TINY | OTHERS | PAIRED).items()}
"""Every tiny model, by name."""
MODELS.update(ALL)
