"""Tiny random models, one a family: the only thing that the suite must be told of a new family.

Two layers, weights of standard deviation 0.2, so that logits are about 3 to 5 and a wrong position shows; no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

LENGTH = 32
"""Original length of every tiny model, in tokens."""
VOCABULARY = 97
FIRST_WORD = 5
"""Smaller token ids are special somewhere."""
PADDING = 1


@dataclass(frozen=True)
class Tiny:
    """How to build one tiny model.

    Attributes:
        model_class: name of the class in transformers.
        config_class: name of its config class.
        values: of the config.
        projections: modules that LoRA adapts.
        generates: whether `generate` works on it.
    """

    model_class: str
    config_class: str
    values: dict[str, Any]
    projections: tuple[str, ...]
    generates: bool = True

    def config(self, **changes: Any) -> Any:
        """Return the config, with `changes`."""
        return getattr(transformers, self.config_class)(**_COMMON, **self.values | changes)


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PADDING,
    "bos_token_id": 2,
    "eos_token_id": None,  # generation runs to its full length
}
_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
}
_GPT2: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "n_positions": LENGTH,
    "initializer_range": 0.2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
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
_BERT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_ROBERTA = _BERT | {"max_position_embeddings": LENGTH + PADDING + 1, "type_vocab_size": 1}
_NEOX: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "rotary_pct": 0.5,
}
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
_QV = ("q_proj", "v_proj")
_BERT_QV = ("query", "value")

TINY: dict[str, Tiny] = {
    "gpt2": Tiny("GPT2LMHeadModel", "GPT2Config", _GPT2, ("c_attn",)),
    "opt": Tiny("OPTForCausalLM", "OPTConfig", _OPT, _QV),
    "bert": Tiny("BertForMaskedLM", "BertConfig", _BERT, _BERT_QV, generates=False),
    "bert (is_decoder)": Tiny("BertLMHeadModel", "BertConfig", _BERT | {"is_decoder": True}, _BERT_QV),
    "roberta": Tiny("RobertaForMaskedLM", "RobertaConfig", _ROBERTA, _BERT_QV, generates=False),
    "llama": Tiny("LlamaForCausalLM", "LlamaConfig", _LLAMA, _QV),
    "mistral": Tiny("MistralForCausalLM", "MistralConfig", _LLAMA | {"sliding_window": None}, _QV),
    "mistral (sliding_window)": Tiny("MistralForCausalLM", "MistralConfig", _LLAMA | {"sliding_window": 8}, _QV),
    "qwen2": Tiny("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, _QV),
    "qwen3": Tiny("Qwen3ForCausalLM", "Qwen3Config", _LLAMA, _QV),
    "gemma": Tiny("GemmaForCausalLM", "GemmaConfig", _LLAMA, _QV),
    "gpt_neox": Tiny("GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX, ("query_key_value",)),
    "cohere": Tiny("CohereForCausalLM", "CohereConfig", _LLAMA | {"logit_scale": 1.0}, _QV),
    "glm": Tiny("GlmForCausalLM", "GlmConfig", _LLAMA | {"attention_bias": True}, _QV),
    "bert-generation": Tiny("BertGenerationDecoder", "BertGenerationConfig", _BERT | {"is_decoder": True}, _BERT_QV),
}


OTHERS: dict[str, Tiny] = {
    "gpt_neo": Tiny("GPTNeoForCausalLM", "GPTNeoConfig", _GPT_NEO, _QV),
    "bloom": Tiny("BloomForCausalLM", "BloomConfig", _BLOOM, ("query_key_value",)),
    "falcon": Tiny("FalconForCausalLM", "FalconConfig", _FALCON, ("query_key_value",)),
    "gptj": Tiny("GPTJForCausalLM", "GPTJConfig", _GPT2 | {"rotary_dim": 8}, _QV),
    "biogpt": Tiny("BioGptForCausalLM", "BioGptConfig", _BERT, _QV),
    "xglm": Tiny("XGLMForCausalLM", "XGLMConfig", _XGLM, _QV),
    "mpt": Tiny("MptForCausalLM", "MptConfig", _MPT, ("Wqkv",)),
    "codegen": Tiny("CodeGenForCausalLM", "CodeGenConfig", _GPT2 | {"rotary_dim": 8}, ("qkv_proj",)),
    "ctrl": Tiny("CTRLLMHeadModel", "CTRLConfig", _CTRL, ("Wq", "Wv")),
    "openai-gpt": Tiny("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", _GPT2, ("c_attn",)),
    "distilbert": Tiny("DistilBertForMaskedLM", "DistilBertConfig", _DISTILBERT, ("q_lin", "v_lin"), generates=False),
    "albert": Tiny("AlbertForMaskedLM", "AlbertConfig", _BERT | {"embedding_size": 16}, _BERT_QV, generates=False),
    "mpnet": Tiny("MPNetForMaskedLM", "MPNetConfig", _ROBERTA, ("q", "v"), generates=False),
    "roformer": Tiny("RoFormerForMaskedLM", "RoFormerConfig", _BERT, _BERT_QV, generates=False),
    "esm": Tiny("EsmForMaskedLM", "EsmConfig", _ROBERTA, _BERT_QV, generates=False),
    "megatron-bert": Tiny("MegatronBertForMaskedLM", "MegatronBertConfig", _BERT, _BERT_QV, generates=False),
    "squeezebert": Tiny("SqueezeBertForMaskedLM", "SqueezeBertConfig", _BERT | {"embedding_size": 64}, _BERT_QV, generates=False),
    "big_bird": Tiny("BigBirdForMaskedLM", "BigBirdConfig", _BERT | {"attention_type": "original_full"}, _BERT_QV, generates=False),
    "convbert": Tiny("ConvBertForMaskedLM", "ConvBertConfig", _BERT | {"embedding_size": 16}, _BERT_QV, generates=False),
    "deberta": Tiny("DebertaForMaskedLM", "DebertaConfig", _BERT, ("in_proj",), generates=False),
}
"""One model of each other family of one stack: the schemes of each site run every point on it."""

ALL = TINY | OTHERS


def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return the tiny model called `name`, in eval mode; the same weights for the same seed.

    Biases and norms are made random too: a zero would hide a mistake.
    """
    tiny = ALL[name]
    torch.manual_seed(seed)
    model = getattr(transformers, tiny.model_class)(tiny.config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()
