"""Tiny random models, one a family: the only thing that the suite must be told of a new family.

Two layers, weights of standard deviation 0.2, so that logits are about 3 to 5 and a wrong position shows; no dropout.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_posswap.testing.tiny import tiny_config
from tests.toys import house_model

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
        inside: the registered scheme that is native inside its attention; "": none is.
        rounding: what its own class differs by, beyond NOISE, between two ways to compute the same.
        steps: whether its own class says through a cache what it says at once.
        paired: whether an encoder feeds its decoder.
        hears: whether the encoder takes sound.
        merged: whether the decoder attends to its own words and to the encoder's in one, by the positions of both.
        shrunk: whether the fields that `values` leaves out are shrunk by their names.
    """

    model_class: str
    config_class: str
    values: dict[str, Any]
    projections: tuple[str, ...]
    generates: bool = True
    inside: str = ""
    rounding: float = 0.0
    steps: bool = True
    paired: bool = False
    hears: bool = False
    merged: bool = False
    shrunk: bool = False

    @property
    def stock(self) -> Any:
        """The class in transformers, or the toy's own."""
        return _class(self.model_class)

    def takes(self, argument: str) -> bool:
        """Return whether the forward of the stock class takes an argument of this name."""
        return argument in inspect.signature(self.stock.forward).parameters

    def config(self, **changes: Any) -> Any:
        """Return the config, with `changes`."""
        cls = _class(self.config_class)
        values = _COMMON | self.values | changes
        return tiny_config(cls, **values) if self.shrunk else cls(**values)

    def build(self, seed: int = 0, **changes: Any) -> PreTrainedModel:
        """Return the model, in eval mode; the same weights for the same seed.

        Biases and norms are made random too: a zero would hide a mistake.
        """
        torch.manual_seed(seed)
        model = self.stock(self.config(**changes))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                elif parameter.std() < 0.05:  # whatever its config says
                    parameter.normal_(std=0.2)
        return model.eval()


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
GPT2: dict[str, Any] = {
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
BERT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
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
QV = ("q_proj", "v_proj")
BERT_QV = ("query", "value")

TINY: dict[str, Tiny] = {
    "gpt2": Tiny("GPT2LMHeadModel", "GPT2Config", GPT2, ("c_attn",)),
    "opt": Tiny("OPTForCausalLM", "OPTConfig", _OPT, QV),
    "bert": Tiny("BertForMaskedLM", "BertConfig", BERT, BERT_QV, generates=False),
    "bert (is_decoder)": Tiny("BertLMHeadModel", "BertConfig", BERT | {"is_decoder": True}, BERT_QV),
    "roberta": Tiny("RobertaForMaskedLM", "RobertaConfig", ROBERTA, BERT_QV, generates=False),
    "llama": Tiny("LlamaForCausalLM", "LlamaConfig", _LLAMA, QV),
    "mistral": Tiny("MistralForCausalLM", "MistralConfig", _LLAMA | {"sliding_window": None}, QV),
    "mistral (sliding_window)": Tiny("MistralForCausalLM", "MistralConfig", _LLAMA | {"sliding_window": 8}, QV),
    "qwen2": Tiny("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, QV),
    "qwen3": Tiny("Qwen3ForCausalLM", "Qwen3Config", _LLAMA, QV),
    "gemma": Tiny("GemmaForCausalLM", "GemmaConfig", _LLAMA, QV),
    "gpt_neox": Tiny("GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX, ("query_key_value",)),
    "cohere": Tiny("CohereForCausalLM", "CohereConfig", _LLAMA | {"logit_scale": 1.0}, QV),
    "glm": Tiny("GlmForCausalLM", "GlmConfig", _LLAMA | {"attention_bias": True}, QV),
    "house": Tiny("HouseForCausalLM", "HouseConfig", BERT | {"is_decoder": True}, BERT_QV),
}


def _class(name: str) -> Any:
    return getattr(transformers, name, None) or getattr(house_model, name)


def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return the tiny model called `name`, in eval mode; the same weights for the same seed."""
    return TINY[name].build(seed, **changes)
