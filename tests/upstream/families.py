"""Ten families, with the swap of each, and the tiny models that transformers' suite is run on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

SIZE = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = SIZE | {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ENCODER = DECODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        config: the name of its config class, with the fields that make it tiny.
        models: the names of its classes that are tested.
        scheme: what each model is swapped to, with its settings.
        native: whether its stock class runs the swapped model.
    """

    config: str
    fields: dict[str, Any]
    models: tuple[str, ...]
    scheme: str
    options: dict[str, Any] = field(default_factory=dict)
    native: bool = False


FAMILIES = {
    "gpt2": Family(
        "GPT2Config",
        SIZE
        | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
        | {"embd_pdrop": 0.0},
        ("GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification", "GPT2ForTokenClassification"),
        "rope",
    ),
    "opt": Family(
        "OPTConfig",
        SIZE
        | {"hidden_size": 32, "ffn_dim": 37, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.0}
        | {"max_position_embeddings": 64, "word_embed_proj_dim": 32},
        ("OPTModel", "OPTForCausalLM", "OPTForSequenceClassification"),
        "rope",
    ),
    "bert": Family(
        "BertConfig",
        ENCODER,
        ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification"),
        "rope",
    ),
    "roberta": Family(
        "RobertaConfig",
        ENCODER,
        ("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
        "rope",
    ),
    "bart": Family(
        "BartConfig",
        SIZE
        | {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "dropout": 0.0}
        | {"decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "max_position_embeddings": 64}
        | {"decoder_start_token_id": 2, "forced_eos_token_id": None},
        ("BartModel", "BartForConditionalGeneration"),
        "rope",
    ),
    "t5": Family(
        "T5Config",
        SIZE
        | {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0},
        ("T5Model", "T5ForConditionalGeneration"),
        "alibi",
    ),
    "bloom": Family(
        "BloomConfig",
        SIZE | {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        ("BloomModel", "BloomForCausalLM", "BloomForSequenceClassification"),
        "rope",
    ),
    "gpt_neox": Family("GPTNeoXConfig", DECODER, ("GPTNeoXModel", "GPTNeoXForCausalLM"), "alibi"),
    "llama": Family(
        "LlamaConfig",
        DECODER | {"num_key_value_heads": 2},
        ("LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification"),
        "alibi",
    ),
    "mistral": Family(
        "MistralConfig",
        DECODER | {"num_key_value_heads": 2, "sliding_window": None},
        ("MistralModel", "MistralForCausalLM"),
        "yarn",
        {"factor": 2.0},
        native=True,
    ),
}


class ModelTester:
    """What transformers' suite asks for tiny configs and inputs; its attributes are named as there."""

    batch_size, seq_length, is_training = 3, 7, True
    num_hidden_layers, num_attention_heads, hidden_size = 2, 4, 32

    def __init__(self, family: Family) -> None:
        self.family = family
        self.encoder_seq_length = self.decoder_seq_length = self.key_length = self.seq_length

    def get_config(self) -> Any:
        """Return a new tiny config."""
        return getattr(transformers, self.family.config)(**self.family.fields)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return a new config and a batch for it."""
        config = self.get_config()
        ids = torch.randint(3, config.vocab_size, (self.batch_size, self.seq_length))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.is_encoder_decoder:
            inputs |= {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": torch.ones_like(ids)}
        return config, inputs
