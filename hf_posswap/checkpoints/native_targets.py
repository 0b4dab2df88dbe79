"""The stock models that compute what a swapped one does: a builder for each class, and what each class cannot say.

No stock class was found for: an encoder-decoder with rotation and norms after the sublayers (BART); a rotary decoder
with norms after the sublayers and none on the embeddings (OPT-350m); one with alternating local and global layers,
norms with biases and full rotation (GPT-Neo); ALiBi with biases (Falcon divides the slopes by sqrt(D) and rounds
positions to bfloat16, Bloom normalises its embeddings, MPT has no biases).
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hf_posswap.checkpoints.native_weights import (
    BERT_LAYER,
    Affine,
    Blueprint,
    Layer,
    LayerNames,
    TransformerWeights,
    Weights,
    by_head,
    layer_under,
    named,
    refuse,
    transformer_weights_of,
)
from hf_posswap.compat.transformers_models import building_on_meta, masks_the_future
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.settings import EditConfig
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import native_class, native_skeleton
from hf_posswap.patching.record.record import native_config, without_record
from hf_posswap.rope_math import default_inv_freq, permute_rows
from hf_posswap.schemes import NoPE, RotaryScheme, T5Bias
from hf_posswap.schemes.layered import Layered

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hf_posswap.schemes.base import Scheme

_JINA_LAYER: LayerNames = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "attention_norm": "post_attention_layernorm",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "mlp_norm": "post_mlp_layernorm",
}
_MPNET_LAYER: LayerNames = BERT_LAYER | {
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "out": "attention.attn.o",
    "attention_norm": "attention.LayerNorm",
}
_LLAMA_KIND = ("llama", "mistral", "qwen2")
_MPNET_BUCKETS, _MPNET_DISTANCE = 32, 128  # written into its code
_MPNET_PADDING = 1


def rotary_scheme(plan: SwapPlan) -> RotaryScheme:
    """Return the scheme of `plan` if a stock class may compute it at every length and with every cache.

    Raises:
        UnsupportedSwapError: it is not rotary, does more than rotate, or follows the length.
    """
    scheme = plan.scheme
    if not isinstance(scheme, RotaryScheme) or not scheme.only_rotates:
        refuse(f"it rotates queries and keys, and {scheme.name} does not do that alone")
    if scheme.length_dependent:
        refuse(
            f"the angles of {scheme.name} follow the length, and stock classes keep keys rotated by those of an "
            "earlier one"
        )
    return scheme


def say_rope(model_class: type[PreTrainedModel], config: PreTrainedConfig, plan: SwapPlan) -> Any:
    """Return `config` with the rope parameters that make a stock model compute the scheme of `plan`.

    Args:
        model_class: of transformers.
        config: of a model with plain rotation in the half-split layout, of the original length.
        plan: with a rotary scheme.

    Raises:
        UnsupportedSwapError: no rope type of transformers says it.
    """
    half = dataclasses.replace(rotary_scheme(plan), layout="half")
    with building_on_meta():
        skeleton = model_class(config)
    trial = plan_swap(skeleton, half, max_length=plan.max_length)
    if trial.route != "native":
        refuse(f"no rope type of transformers computes {plan.scheme.name} with these parameters")
    for edit in trial.edits:
        if isinstance(edit, EditConfig):
            setattr(config, edit.path, edit.value)
    return config


def in_layout(layer: Layer, scheme: RotaryScheme, geometry: Geometry, layout: Any) -> Layer:
    """Return `layer` with the rows of query and key in the order that the other layout has them."""
    here, width = scheme.filled("layout"), scheme.rotary_dim(geometry)
    if here == layout:
        return layer
    turned = {
        projection: {
            name: permute_rows(t, heads, width, here, layout) for name, t in getattr(layer, projection).items()
        }
        for projection, heads in (("query", geometry.num_heads), ("key", geometry.num_kv_heads))
    }
    return dataclasses.replace(layer, **turned)


def same_class(model: PreTrainedModel, plan: SwapPlan) -> Blueprint:
    """Return a stock model of the class of `model` that computes what `model` does.

    Of a native swap only hf_posswap's record is removed. A rotary model whose scheme acts inside attention becomes one
    with other rope parameters, if necessary with the rows of queries and keys reordered.

    Raises:
        UnsupportedSwapError: it would not be exact, with the reason.
    """
    weights = dict(model.state_dict())  # without the metadata by which a stock class refuses them
    if plan.route == "native":
        config = without_record(model.config)
        ends = plan.sites.table_path is not None
        return Blueprint(native_class(type(model)), config, weights, limit=plan.max_length if ends else None)
    if not plan.sites.rotary:
        refuse(f"its config has no rope parameters, so it cannot express {plan.scheme.name}")
    return Blueprint(native_class(type(model)), _same_class_config(model, plan), _in_native_layout(weights, plan))


def _same_class_config(model: PreTrainedModel, plan: SwapPlan) -> PreTrainedConfig:
    """Return the config of the native model with rope parameters that express the scheme of `plan`."""
    config = native_config(model.config)
    scheme: Scheme = plan.scheme
    if not isinstance(scheme, NoPE):
        scheme = dataclasses.replace(rotary_scheme(plan), layout=plan.sites.geometry.layout)
    trial = plan_swap(native_skeleton(model, config), scheme, max_length=plan.max_length)
    if trial.route != "native":
        refuse(f"its rope parameters cannot express {plan.scheme.name} with these parameters")
    for edit in trial.edits:
        if isinstance(edit, EditConfig):
            setattr(config, edit.path, edit.value)
    return config


def _in_native_layout(weights: Weights, plan: SwapPlan) -> Weights:
    """Return `weights` with the rows of queries and keys, and of norms on them, in the layout of the class."""
    geometry = plan.sites.geometry
    here, there = getattr(plan.scheme, "layout", None), geometry.layout
    if isinstance(plan.scheme, NoPE) or here == there:
        return weights
    assert here is not None
    assert there is not None
    width = rotary_scheme(plan).rotary_dim(geometry)
    turned = dict(weights)
    for path in plan.sites.attention:
        if f"{path}.q_proj.weight" not in weights:
            refuse("its queries and keys are not projected separately, so their rows cannot be reordered")
        for name in ("q_proj.weight", "q_proj.bias", "q_norm.weight", "k_proj.weight", "k_proj.bias", "k_norm.weight"):
            rows = weights.get(f"{path}.{name}")
            if rows is not None:
                turned[f"{path}.{name}"] = permute_rows(rows, rows.shape[0] // geometry.head_dim, width, here, there)
    return turned


def smollm3(model: PreTrainedModel, plan: SwapPlan) -> Blueprint:
    """Return the SmolLM3 that computes what `model` does: a Llama, Mistral or Qwen2 with layers without rotation.

    Raises:
        UnsupportedSwapError: it would not be exact, with the reason.
    """
    config = native_config(model.config)
    rope, rotates = _rotation(plan)
    model_type = str(model.config.model_type)
    if model_type not in _LLAMA_KIND:
        refuse(f"its layers are those of {', '.join(_LLAMA_KIND)}, and not of {model_type}")
    name = type(model).__name__.replace(model_type.capitalize(), "SmolLM3", 1)
    model_class = getattr(transformers, name, None)
    if model_class is None:
        refuse(f"transformers has no class {name}")
    weights = dict(model.state_dict())  # without the metadata by which a stock class refuses them
    biased = any(path.endswith("_proj.bias") and ".self_attn." in path for path in weights)
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    shared = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
        "initializer_range rms_norm_eps use_cache pad_token_id bos_token_id eos_token_id attention_dropout "
        "tie_word_embeddings dtype"
    )
    values = {key: getattr(config, key) for key in shared.split()} | {"head_dim": plan.sites.geometry.head_dim}
    new = transformers.SmolLM3Config(
        **values,
        max_position_embeddings=plan.sites.geometry.original_length if rope else plan.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        no_rope_layers=rotates,
        layer_types=list(layer_types),
        use_sliding_window=window is not None,
        sliding_window=window,
        attention_bias=biased,
        mlp_bias=getattr(config, "mlp_bias", False),
    )
    if rope is not None:
        of_rope = dataclasses.replace(plan, scheme=rope)
        new, weights = say_rope(model_class, new, of_rope), _in_native_layout(weights, of_rope)
    return Blueprint(model_class, new, _with_biases(weights, plan) if biased else weights)


def _rotation(plan: SwapPlan) -> tuple[RotaryScheme | None, list[int]]:
    """Return the one rotary scheme among the layers, or None, and for each layer whether it rotates (1) or not (0)."""
    count = plan.sites.geometry.num_layers
    chosen = [plan.scheme.of_layer(i) if isinstance(plan.scheme, Layered) else plan.scheme for i in range(count)]
    rotates = [int(isinstance(scheme, RotaryScheme)) for scheme in chosen]
    ropes = list(dict.fromkeys(scheme for scheme in chosen if isinstance(scheme, RotaryScheme)))
    plain = all(
        isinstance(scheme, RotaryScheme) or (isinstance(scheme, NoPE) and not scheme.acts_inside) for scheme in chosen
    )
    if not plain or len(ropes) > 1 or all(rotates):
        refuse(
            f"it adds only layers without positions, with one rotation in all others, and this scheme is {plan.scheme}"
        )
    return (ropes[0] if ropes else None), rotates


def _with_biases(weights: Weights, plan: SwapPlan) -> Weights:
    """Return `weights` with zeros for the biases that SmolLM3 has in attention and this model lacks."""
    full = dict(weights)
    for path in plan.sites.attention:
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = weights[f"{path}.{projection}.weight"]
            full.setdefault(f"{path}.{projection}.bias", weight.new_zeros(weight.shape[0]))
    return full


def gpt_neox(model: PreTrainedModel, plan: SwapPlan) -> Blueprint:
    """Return the GPT-NeoX, without its parallel residual, that computes what `model` does: a rotary GPT-2 or OPT.

    Raises:
        UnsupportedSwapError: it would not be exact, with the reason.
    """
    scheme, geometry, source = rotary_scheme(plan), plan.sites.geometry, transformer_weights_of(model)
    model_class: type[PreTrainedModel] = transformers.GPTNeoXForCausalLM if source.head else transformers.GPTNeoXModel
    base = "gpt_neox." if source.head else ""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": scheme.filled("partial")}
    config = transformers.GPTNeoXConfig(
        **source.shape,
        max_position_embeddings=geometry.original_length,
        use_parallel_residual=False,
        rope_parameters=rope,
    )
    modules: dict[str, Affine | None] = {
        f"{base}embed_in": source.token_embedding,
        f"{base}final_layer_norm": source.final_norm,
        "lm_head": source.head.get("decoder"),
    }
    for i, layer in enumerate(source.layers):
        turned = in_layout(layer, scheme, geometry, "half")
        where = f"{base}layers.{i}"
        modules |= {
            f"{where}.input_layernorm": layer.attention_norm,
            f"{where}.post_attention_layernorm": layer.mlp_norm,
            f"{where}.attention.query_key_value": by_head(turned, geometry.num_heads),
            f"{where}.attention.dense": layer.out,
            f"{where}.mlp.dense_h_to_4h": layer.up,
            f"{where}.mlp.dense_4h_to_h": layer.down,
        }
    return Blueprint(model_class, say_rope(model_class, config, plan), named(modules))


def jina_embeddings_v3(model: PreTrainedModel, plan: SwapPlan) -> Blueprint:
    """Return the JinaEmbeddingsV3 that computes what `model` does: a rotary BERT or RoBERTa.

    Raises:
        UnsupportedSwapError: it would not be exact, with the reason.
    """
    scheme, geometry = rotary_scheme(plan), plan.sites.geometry
    if geometry.causal:
        refuse("it sees both sides, and this model only the past")
    if scheme.rotary_dim(geometry) != geometry.head_dim:
        refuse("it rotates all dimensions of a head, and this scheme only some")
    source = transformer_weights_of(model)
    model_class: type[PreTrainedModel] = (
        transformers.JinaEmbeddingsV3ForMaskedLM if source.head else transformers.JinaEmbeddingsV3Model
    )
    base = "roberta." if source.head else ""
    config = transformers.JinaEmbeddingsV3Config(
        **source.shape,
        type_vocab_size=_types(source).shape[0],
        max_position_embeddings=geometry.original_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    modules = _embeddings(source, base) | {f"{base}embeddings.token_type_embeddings": source.types}
    for i, layer in enumerate(source.layers):
        turned = in_layout(layer, scheme, geometry, "half")
        modules |= layer_under(f"{base}layers.{i}", turned, _JINA_LAYER)
    return Blueprint(model_class, say_rope(model_class, config, plan), named(modules) | _lm_head(source))


def roformer(model: PreTrainedModel, plan: SwapPlan) -> Blueprint:
    """Return the RoFormer that computes what `model` does: a BERT or RoBERTa with RoPE of base 10000.

    Raises:
        UnsupportedSwapError: it would not be exact, with the reason.
    """
    scheme, geometry = rotary_scheme(plan), plan.sites.geometry
    inv_freq = scheme.angles(geometry).inv_freq
    plain = default_inv_freq(10000.0, geometry.head_dim)
    if scheme.attention_scaling(geometry) != 1.0 or inv_freq.tolist() != plain.tolist():
        refuse("it computes only plain rope with base 10000 and full width")
    code = importlib.import_module("transformers.models.roformer.modeling_roformer")
    if geometry.causal and not masks_the_future(code):
        refuse(f"its decoder sees its future in transformers {transformers.__version__}; newer ones fixed that")
    source = transformer_weights_of(model)
    if source.pooler is not None:
        refuse("its base model has no pooler, and this one has")
    if source.head and source.shape["hidden_act"] != "gelu":
        refuse("its head takes the activation of the layers, and this model's gelu")
    model_class: type[PreTrainedModel] = transformers.RoFormerModel
    if source.head:
        model_class = transformers.RoFormerForCausalLM if geometry.causal else transformers.RoFormerForMaskedLM
    base = "roformer." if source.head else ""
    config = transformers.RoFormerConfig(
        **source.shape,
        embedding_size=source.shape["hidden_size"],
        type_vocab_size=_types(source).shape[0],
        max_position_embeddings=plan.max_length,
        is_decoder=geometry.causal,
    )
    modules = _embeddings(source, base) | {f"{base}embeddings.token_type_embeddings": source.types}
    for i, layer in enumerate(source.layers):
        turned = in_layout(layer, scheme, geometry, "interleaved")
        modules |= layer_under(f"{base}encoder.layer.{i}", turned, BERT_LAYER)
    table = torch.nn.Embedding(plan.max_length, geometry.head_dim)
    weights = named(modules) | {f"{base}encoder.embed_positions.weight": _sinusoids(table.weight)}
    if source.head:
        dense, norm, decoder = (source.head[role] for role in ("dense", "norm", "decoder"))
        head = {"transform.dense": dense, "transform.LayerNorm": norm, "decoder": decoder}
        weights |= named({f"cls.predictions.{path}": module for path, module in head.items()})
        weights["cls.predictions.bias"] = decoder["bias"]
    return Blueprint(model_class, config, weights, limit=plan.max_length)


def mpnet(model: Any, plan: SwapPlan) -> Blueprint:
    """Return the MPNet that computes what `model` does: a BERT or RoBERTa with T5's bias, all token types 0.

    MPNet adds T5's bias to scaled scores, as hf_posswap does; its position table holds the token type's row alone.

    Raises:
        UnsupportedSwapError: it would not be exact, with the reason.
    """
    scheme, geometry = plan.scheme, plan.sites.geometry
    if not isinstance(scheme, T5Bias):
        refuse(f"it computes T5's bias, and not {scheme.name}")
    if geometry.causal:
        refuse("it sees both sides, and this model only the past")
    if (scheme.num_buckets, scheme.max_distance) != (_MPNET_BUCKETS, _MPNET_DISTANCE):
        refuse(f"its buckets are {_MPNET_BUCKETS}, up to distance {_MPNET_DISTANCE}")
    source = transformer_weights_of(model)
    if _types(source).shape[0] > 1:
        refuse("it has no token types, and this model has several (BERT's second sentence)")
    model_class = transformers.MPNetForMaskedLM if source.head else transformers.MPNetModel
    base = "mpnet." if source.head else ""
    positions = plan.max_length + _MPNET_PADDING + 1
    config = transformers.MPNetConfig(**source.shape, max_position_embeddings=positions)
    modules = _embeddings(source, base)
    for i, layer in enumerate(source.layers):
        modules |= layer_under(f"{base}encoder.layer.{i}", layer, _MPNET_LAYER)
    carried = model.get_submodule(".".join(name for name in (plan.sites.base, "posswap") if name))
    weights = named(modules) | _lm_head(source)
    weights[f"{base}encoder.relative_attention_bias.weight"] = carried.table.detach()
    weights[f"{base}embeddings.position_embeddings.weight"] = _types(source)[:1].expand(positions, -1)
    return Blueprint(model_class, config, weights, limit=plan.max_length)


def _types(source: TransformerWeights) -> torch.Tensor:
    assert source.types is not None
    return source.types["weight"]


def _embeddings(source: TransformerWeights, base: str) -> dict[str, Affine | None]:
    return {
        f"{base}embeddings.word_embeddings": source.token_embedding,
        f"{base}embeddings.LayerNorm": source.embedding_norm,
        f"{base}pooler.dense": source.pooler,
    }


def _lm_head(source: TransformerWeights) -> Weights:
    """Return the head under RoBERTa's names."""
    if not source.head:
        return {}
    paths = {"dense": "dense", "norm": "layer_norm", "decoder": "decoder"}
    weights = named({f"lm_head.{paths[role]}": module for role, module in source.head.items()})
    return weights | {"lm_head.bias": source.head["decoder"]["bias"]}


def _sinusoids(like: torch.Tensor) -> torch.Tensor:
    """Return RoFormer's table [P, D]: sin of p 10000^(-2i/D) in the first half, cos in the second."""
    count, width = like.shape
    angles = torch.arange(count).double()[:, None] * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()
