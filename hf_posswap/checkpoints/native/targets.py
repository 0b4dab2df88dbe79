"""Convert weights to GPT-NeoX, JinaEmbeddingsV3, RoFormer and MPNet.

No stock class was found for: an encoder-decoder with rotation and norms after the sublayers (BART); a rotary decoder
with norms after the sublayers and none on the embeddings (OPT-350m); one with alternating local and global layers,
norms with biases and full rotation (GPT-Neo); ALiBi with biases (Falcon divides the slopes by sqrt(D) and rounds
positions to bfloat16, Bloom normalises its embeddings, MPT has no biases).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers

from hf_posswap.checkpoints.native.parts import Affine, Blueprint, TransformerWeights, Weights, by_head, named, refuse
from hf_posswap.checkpoints.native.rope import in_layout, rotary_scheme, say_rope
from hf_posswap.checkpoints.native.sources import transformer_weights_of
from hf_posswap.compat.transformers_models import masks_the_future
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.schemes import T5Bias

_MPNET_BUCKETS, _MPNET_DISTANCE = 32, 128  # written into its code
_MPNET_PADDING = 1


def gpt_neox(model: Any, plan: SwapPlan) -> Blueprint:
    """Return the GPT-NeoX, without its parallel residual, that computes what `model` does: a rotary GPT-2 or OPT.

    Raises:
        UnsupportedSwapError: it would not be exact, with the reason.
    """
    scheme, geometry, source = rotary_scheme(plan), plan.sites.geometry, transformer_weights_of(model)
    model_class: Any = transformers.GPTNeoXForCausalLM if source.head else transformers.GPTNeoXModel
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


def jina_embeddings_v3(model: Any, plan: SwapPlan) -> Blueprint:
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
    model_class: Any = transformers.JinaEmbeddingsV3ForMaskedLM if source.head else transformers.JinaEmbeddingsV3Model
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
        where = f"{base}layers.{i}"
        modules |= {
            f"{where}.self_attn.q_proj": turned.query,
            f"{where}.self_attn.k_proj": turned.key,
            f"{where}.self_attn.v_proj": layer.value,
            f"{where}.self_attn.o_proj": layer.out,
            f"{where}.post_attention_layernorm": layer.attention_norm,
            f"{where}.mlp.fc1": layer.up,
            f"{where}.mlp.fc2": layer.down,
            f"{where}.post_mlp_layernorm": layer.mlp_norm,
        }
    return Blueprint(model_class, say_rope(model_class, config, plan), named(modules) | _lm_head(source))


def roformer(model: Any, plan: SwapPlan) -> Blueprint:
    """Return the RoFormer that computes what `model` does: a BERT or RoBERTa with RoPE of base 10000.

    Raises:
        UnsupportedSwapError: it would not be exact, with the reason.
    """
    scheme, geometry = rotary_scheme(plan), plan.sites.geometry
    if scheme.name != "rope" or scheme.base != 10000.0 or scheme.rotary_dim(geometry) != geometry.head_dim:
        refuse("it computes only plain rope with base 10000 and full width")
    code = importlib.import_module("transformers.models.roformer.modeling_roformer")
    if geometry.causal and not masks_the_future(code):
        refuse(f"its decoder sees its future in transformers {transformers.__version__}; newer ones fixed that")
    source = transformer_weights_of(model)
    if source.pooler is not None:
        refuse("its base model has no pooler, and this one has")
    if source.head and source.shape["hidden_act"] != "gelu":
        refuse("its head takes the activation of the layers, and this model's gelu")
    model_class: Any = transformers.RoFormerModel
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
        where = f"{base}encoder.layer.{i}"
        modules |= {
            f"{where}.attention.self.query": turned.query,
            f"{where}.attention.self.key": turned.key,
            f"{where}.attention.self.value": layer.value,
            f"{where}.attention.output.dense": layer.out,
            f"{where}.attention.output.LayerNorm": layer.attention_norm,
            f"{where}.intermediate.dense": layer.up,
            f"{where}.output.dense": layer.down,
            f"{where}.output.LayerNorm": layer.mlp_norm,
        }
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
    assert isinstance(scheme, T5Bias)
    if geometry.causal:
        refuse("it sees both sides, and this model only the past")
    if (scheme.num_buckets, scheme.max_distance) != (_MPNET_BUCKETS, _MPNET_DISTANCE):
        refuse(f"its buckets are {_MPNET_BUCKETS}, up to distance {_MPNET_DISTANCE}")
    source = transformer_weights_of(model)
    if _types(source).shape[0] > 1:
        refuse("it has no token types, and this model has several (BERT's second sentence)")
    model_class: Any = transformers.MPNetForMaskedLM if source.head else transformers.MPNetModel
    base = "mpnet." if source.head else ""
    positions = plan.max_length + _MPNET_PADDING + 1
    config = transformers.MPNetConfig(**source.shape, max_position_embeddings=positions)
    modules = _embeddings(source, base)
    for i, layer in enumerate(source.layers):
        where = f"{base}encoder.layer.{i}"
        modules |= {
            f"{where}.attention.attn.q": layer.query,
            f"{where}.attention.attn.k": layer.key,
            f"{where}.attention.attn.v": layer.value,
            f"{where}.attention.attn.o": layer.out,
            f"{where}.attention.LayerNorm": layer.attention_norm,
            f"{where}.intermediate.dense": layer.up,
            f"{where}.output.dense": layer.down,
            f"{where}.output.LayerNorm": layer.mlp_norm,
        }
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
