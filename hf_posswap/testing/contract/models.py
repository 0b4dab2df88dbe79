"""Tiny random models that the contract runs on, with what their own classes cannot do.

Two layers, weights of standard deviation 0.2, so that logits are about 3 to 5 and a wrong position shows; no dropout.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_posswap.testing.tiny import tiny_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LENGTH = 32
"""Original length of every tiny model, in tokens."""
VOCABULARY = 97
FIRST_WORD = 5
"""Smaller token ids are special somewhere."""
PADDING = 1
WAYS = ("deepcopy", "torch.save")
"""Of copying a model, see `copied`."""


@dataclass(frozen=True)
class Limits:
    """What the stock class of a model does not do itself, so that no swap of it has to.

    Attributes:
        known: whether the limits are known. If not, a point that fails is run on the stock class too, and what that
            does not do either is skipped.
        leaks: packed documents see one another.
        sees_places: it knows a token's place in the row beside its position: by a window, a convolution or a state.
        convolves: it convolves padding with the words, whatever the positions.
        counts_embeddings_otherwise: it reads other rows of its table for embeddings than for tokens.
        unstatic: it masks a static cache wrongly.
        mixed_precision_error: what it raises in mixed precision; "": it runs.
        overflows: its gradients overflow in float16.
        single: its code is not for float64.
        steady: changes of its config without which rounding turns gradients over.
        settles_later: its config writes more after it was read once.
        mixed_dtypes: loaded in bfloat16, it keeps some weights in float32, and cannot run.
        thawed: parameters that it freezes, and loads trainable.
        blurred: a cast blurs the angles of some of its layers, and it makes them anew.
        rounded: it rounds otherwise beside an adapter that is off.
    """

    known: bool = True
    leaks: bool = False
    sees_places: bool = False
    convolves: bool = False
    counts_embeddings_otherwise: bool = False
    unstatic: bool = False
    mixed_precision_error: str = ""
    overflows: bool = False
    single: bool = False
    steady: Mapping[str, object] = field(default_factory=dict)
    settles_later: bool = False
    mixed_dtypes: bool = False
    thawed: frozenset[str] = frozenset()
    blurred: bool = False
    rounded: bool = False


@dataclass(frozen=True)
class Tiny:
    """How to build one tiny model.

    Attributes:
        model_class: the class, or its name in transformers.
        config_class: its config class, or the name of that.
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
        limits: what its own class does not do.
    """

    model_class: str | type
    config_class: str | type
    values: dict[str, object]
    projections: tuple[str, ...]
    generates: bool = True
    inside: str = ""
    rounding: float = 0.0
    steps: bool = True
    paired: bool = False
    hears: bool = False
    merged: bool = False
    shrunk: bool = False
    limits: Limits = field(default_factory=Limits)

    @property
    def stock(self) -> Any:
        """The unswapped class."""
        return _class(self.model_class)

    def takes(self, argument: str) -> bool:
        """Return whether the forward of the stock class takes an argument of this name."""
        return argument in inspect.signature(self.stock.forward).parameters

    def config(self, **changes: object) -> PreTrainedConfig:
        """Return the config, with `changes`."""
        cls = _class(self.config_class)
        values = _COMMON | self.values | changes
        return tiny_config(cls, **values) if self.shrunk else cls(**values)

    def build(self, seed: int = 0, **changes: object) -> PreTrainedModel:
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


def _class(named: str | type) -> type:
    return getattr(transformers, named) if isinstance(named, str) else named


_COMMON: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PADDING,
    "bos_token_id": 2,
    "eos_token_id": None,  # generation runs to its full length
}
LLAMA: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
}
GPT2: dict[str, object] = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "n_positions": LENGTH,
    "initializer_range": 0.2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
BERT: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
START = {"decoder_start_token_id": 3}
T5: dict[str, object] = START | {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
QV = ("q_proj", "v_proj")
BERT_QV = ("query", "value")

SMALL: dict[str, Tiny] = {
    "gpt2": Tiny("GPT2LMHeadModel", "GPT2Config", GPT2, ("c_attn",)),
    "bert": Tiny("BertForMaskedLM", "BertConfig", BERT, BERT_QV, generates=False),
    "llama": Tiny("LlamaForCausalLM", "LlamaConfig", LLAMA, QV),
    "t5": Tiny("T5ForConditionalGeneration", "T5Config", T5, ("q", "v"), paired=True, inside="t5"),
}
"""One model of each kind: a position table in a decoder and in an encoder, a rotary module, a bias in two stacks."""
MODELS: dict[str, Tiny] = dict(SMALL)
"""Every tiny model that a `Pair` may name; whoever has more of them adds them."""


def copied(model: PreTrainedModel, way: str) -> PreTrainedModel:
    """Return a copy of `model` made in one of `WAYS`, in which users copy models."""
    if way == "deepcopy":
        return copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
