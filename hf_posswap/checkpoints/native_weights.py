"""The weights of a transformer by their role, whatever names its class gives them, and those of four model types.

Shapes: E hidden size, I inner size, V vocabulary, H heads, D head dim. Linear weights are [out, in], as nn.Linear has
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from hf_posswap.compat.transformers_models import opt_lacks_final_norm
from hf_posswap.errors import UnsupportedSwapError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

Affine = dict[str, Tensor]
"""The `weight` and `bias` of a Linear or a LayerNorm; an Embedding has a weight alone."""
Weights = dict[str, Tensor]
LayerNames = dict[str, str]
"""The names of a layer's modules in a class, by the fields of `Layer`."""
BERT_LAYER: LayerNames = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
"""Of BERT, RoBERTa and RoFormer."""
_OPT_LAYER: LayerNames = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "up": "fc1",
    "down": "fc2",
    "mlp_norm": "final_layer_norm",
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Layer:
    """One layer: attention and MLP, each with its norm, which comes before or after it.

    Attributes:
        query: [H D, E].
        key: [H D, E].
        value: [H D, E].
        out: [E, H D].
        attention_norm: [E].
        up: [I, E].
        down: [E, I].
        mlp_norm: [E].
    """

    query: Affine
    key: Affine
    value: Affine
    out: Affine
    attention_norm: Affine
    up: Affine
    down: Affine
    mlp_norm: Affine


@dataclass(frozen=True)
class TransformerWeights:
    """All weights of one model without its position mechanism.

    Attributes:
        token_embedding: [V, E].
        types: the token type embedding, or None.
        embedding_norm: the norm on the embeddings, or None.
        layers: in order.
        final_norm: the norm after the last layer, or None.
        pooler: the Linear of the pooler, or None.
        head: of the language model, by role ("decoder", "dense", "norm"); empty for a base model.
        shape: config values under the names that most classes share.
    """

    token_embedding: Affine
    types: Affine | None
    embedding_norm: Affine | None
    layers: tuple[Layer, ...]
    final_norm: Affine | None
    pooler: Affine | None
    head: dict[str, Affine]
    shape: dict[str, Any]


@dataclass(frozen=True)
class Blueprint:
    """A stock model to build.

    Attributes:
        model_class: of transformers.
        config: of the model.
        weights: its whole state dict.
        limit: its longest input in tokens; None: no limit.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    weights: Weights
    limit: int | None = None


def affine(state: Weights, path: str, *, transposed: bool = False) -> Affine:
    """Return the weight and the bias at `path` of a state dict; `transposed`: GPT-2's Conv1D has them [in, out].

    A missing bias is zeros, as the class computes it.
    """
    weight = state[f"{path}.weight"]
    weight = weight.T if transposed else weight
    bias = state.get(f"{path}.bias")
    return {"weight": weight, "bias": weight.new_zeros(weight.shape[0]) if bias is None else bias}


def layer_from(state: Weights, where: str, names: LayerNames) -> Layer:
    """Return the layer at `where` of a state dict."""
    return Layer(**{role: affine(state, f"{where}.{name}") for role, name in names.items()})


def layer_under(where: str, layer: Layer, names: LayerNames) -> dict[str, Affine | None]:
    """Return the modules of `layer` by their paths, for a layer at `where`."""
    return {f"{where}.{name}": getattr(layer, role) for role, name in names.items()}


def scaled(module: Affine, factor: float) -> Affine:
    """Return `module` with its output times `factor`."""
    return module if factor == 1.0 else {name: tensor * factor for name, tensor in module.items()}


def rows(module: Affine, first: int, count: int) -> Affine:
    """Return `count` outputs of `module` from `first` on."""
    return {name: tensor[first : first + count] for name, tensor in module.items()}


def by_head(layer: Layer, heads: int) -> Affine:
    """Return query, key and value as one Linear [3 H D, E] whose rows are q, k and v of each head in turn."""
    joined = {}
    for name in ("weight", "bias"):
        each = [
            module[name].unflatten(0, (heads, -1)) for module in (layer.query, layer.key, layer.value)
        ]  # [H, D, ...]
        joined[name] = torch.stack(each, dim=1).flatten(0, 2)
    return joined


def named(modules: dict[str, Affine | None]) -> Weights:
    """Return a state dict with each module's weights under its path; None is left out."""
    return {
        f"{path}.{weight_or_bias}": t
        for path, module in modules.items()
        if module is not None
        for weight_or_bias, t in module.items()
    }


def refuse(reason: str) -> NoReturn:
    """Raise the reason why a conversion would not be exact.

    Raises:
        UnsupportedSwapError: always.
    """
    raise UnsupportedSwapError(reason)


def transformer_weights_of(model: PreTrainedModel) -> TransformerWeights:
    """Return the weights of a swapped `model` by role.

    Raises:
        UnsupportedSwapError: its class or its settings have parts that no stock rotary class has.
    """
    take = SOURCES.get(model.config.model_type)
    if take is None:
        raise TypeError(f"no source for model type {model.config.model_type!r}")
    if getattr(model.config, "add_cross_attention", False):
        refuse("it has cross-attention")
    base = model.base_model_prefix + "." if hasattr(model, model.base_model_prefix) else ""
    return take(model, model.state_dict(), base)


def _shape(config: PreTrainedConfig, **more: object) -> dict[str, object]:
    shared = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings", *_TOKENS)
    return {name: getattr(config, name) for name in shared} | {"dtype": config.dtype} | more


def _decoder_head(model: nn.Module, state: Weights, base: str) -> dict[str, Affine]:
    if not base:
        return {}
    if not type(model).__name__.endswith(("LMHeadModel", "ForCausalLM")):
        refuse(f"its head ({type(model).__name__}) is neither a language model's nor absent")
    return {"decoder": {"weight": state["lm_head.weight"]}}


def _gpt2(model: Any, state: Weights, base: str) -> TransformerWeights:
    config = model.config
    width = config.hidden_size
    layers = []
    for i, block in enumerate(model.base_model.h):
        joined = affine(state, f"{base}h.{i}.attn.c_attn", transposed=True)  # [3 E, E]
        extra = block.attn.scaling * block.attn.head_dim**0.5  # stock rotary classes scale by 1/sqrt(D) alone
        layers.append(
            Layer(
                query=scaled(rows(joined, 0, width), extra),
                key=rows(joined, width, width),
                value=rows(joined, 2 * width, width),
                out=affine(state, f"{base}h.{i}.attn.c_proj", transposed=True),
                attention_norm=affine(state, f"{base}h.{i}.ln_1"),
                up=affine(state, f"{base}h.{i}.mlp.c_fc", transposed=True),
                down=affine(state, f"{base}h.{i}.mlp.c_proj", transposed=True),
                mlp_norm=affine(state, f"{base}h.{i}.ln_2"),
            )
        )
    shape = _shape(
        config,
        intermediate_size=config.n_inner or 4 * width,
        hidden_act=config.activation_function,
        layer_norm_eps=config.layer_norm_epsilon,
        hidden_dropout=config.resid_pdrop,
        attention_dropout=config.attn_pdrop,
        initializer_range=config.initializer_range,
    )
    head = _decoder_head(model, state, base)
    token_embedding = {"weight": state[f"{base}wte.weight"]}
    return TransformerWeights(
        token_embedding, None, None, tuple(layers), affine(state, f"{base}ln_f"), None, head, shape
    )


def _opt(model: PreTrainedModel, state: Weights, base: str) -> TransformerWeights:
    config = model.config
    if not config.do_layer_norm_before:
        refuse("it normalises after each sublayer and not its embeddings (OPT-350m): no stock rotary class does so")
    if config.word_embed_proj_dim != config.hidden_size:
        refuse(f"its word embeddings are {config.word_embed_proj_dim} wide and projected to {config.hidden_size}")
    if opt_lacks_final_norm(config) or not config.layer_norm_elementwise_affine:
        refuse("it lacks the final norm, or the weights of its norms")
    where = f"{base}decoder"
    layers = tuple(layer_from(state, f"{where}.layers.{i}", _OPT_LAYER) for i in range(config.num_hidden_layers))
    shape = _shape(
        config,
        intermediate_size=config.ffn_dim,
        hidden_act=config.activation_function,
        layer_norm_eps=1e-5,  # nn.LayerNorm's own: OPT has no setting
        hidden_dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        initializer_range=config.init_std,
    )
    token_embedding, norm = (
        {"weight": state[f"{where}.embed_tokens.weight"]},
        affine(state, f"{where}.final_layer_norm"),
    )
    return TransformerWeights(token_embedding, None, None, layers, norm, None, _decoder_head(model, state, base), shape)


def _bert(model: PreTrainedModel, state: Weights, base: str) -> TransformerWeights:
    config = model.config
    layers = tuple(layer_from(state, f"{base}encoder.layer.{i}", BERT_LAYER) for i in range(config.num_hidden_layers))
    shape = _shape(
        config,
        intermediate_size=config.intermediate_size,
        hidden_act=config.hidden_act,
        layer_norm_eps=config.layer_norm_eps,
        hidden_dropout_prob=config.hidden_dropout_prob,
        attention_probs_dropout_prob=config.attention_probs_dropout_prob,
        initializer_range=config.initializer_range,
    )
    pooler = affine(state, f"{base}pooler.dense") if f"{base}pooler.dense.weight" in state else None
    embedding = {n: {"weight": state[f"{base}embeddings.{n}_embeddings.weight"]} for n in ("word", "token_type")}
    norm = affine(state, f"{base}embeddings.LayerNorm")
    head = _encoder_head(model, state, base)
    return TransformerWeights(embedding["word"], embedding["token_type"], norm, layers, None, pooler, head, shape)


def _encoder_head(model: PreTrainedModel, state: Weights, base: str) -> dict[str, Affine]:
    """Return the head as dense, norm and decoder: BERT and RoBERTa have the same one under two sets of names."""
    if not base:
        return {}
    roles = {"dense": "dense", "norm": "layer_norm", "decoder": "decoder"}
    where, activation = "lm_head", "gelu"  # RoBERTa's head knows no other
    if "cls.predictions.decoder.weight" in state:
        roles = {"dense": "transform.dense", "norm": "transform.LayerNorm", "decoder": "decoder"}
        where, activation = "cls.predictions", model.config.hidden_act
    if f"{where}.decoder.weight" not in state or "cls.seq_relationship.weight" in state:
        refuse(f"its head ({type(model).__name__}) is neither a language model's nor absent")
    if activation != "gelu":
        refuse(f"its head uses {activation!r}, and those of the stock rotary encoders gelu")
    return {role: affine(state, f"{where}.{name}") for role, name in roles.items()}


SOURCES: dict[str, Callable[[Any, Weights, str], TransformerWeights]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "bert": _bert,
    "roberta": _bert,
}
