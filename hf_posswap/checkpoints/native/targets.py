"""Putting weights together as GPT-NeoX, JinaEmbeddingsV3, RoFormer and MPNet.

Searched for and not there: a stock encoder-decoder with rotation and norms after the sublayers (BART); a rotary decoder
with norms after the sublayers and none on the embeddings (OPT-350m); one with local and global layers by turns, norms
with biases and full rotation (GPT-Neo); ALiBi beside biases (Falcon divides the slopes by sqrt(D) and rounds positions
to bfloat16, Bloom normalises its embeddings, MPT has no biases).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers

from hf_posswap.checkpoints.native.parts import Affine, Blueprint, Parts, Weights, by_head, named, refuse
from hf_posswap.checkpoints.native.rope import in_layout, rotary_scheme, say_rope
from hf_posswap.checkpoints.native.sources import parts_of
from hf_posswap.compat.transformers_models import masks_the_future
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.schemes import T5Bias

_MPNET_BUCKETS, _MPNET_DISTANCE = 32, 128  # written into its code
_MPNET_PADDING = 1


def gpt_neox(model: Any, plan: SwapPlan) -> Blueprint:
    """Return the GPT-NeoX, without its parallel residual, that computes what `model` does: a rotary GPT-2 or OPT.

    Raises:
        UnsupportedSwapError: it would not be exact: why.
    """
    scheme, geometry, parts = rotary_scheme(plan), plan.sites.geometry, parts_of(model)
    model_class: Any = transformers.GPTNeoXForCausalLM if parts.head else transformers.GPTNeoXModel
    base = "gpt_neox." if parts.head else ""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": scheme.filled("partial")}
    config = transformers.GPTNeoXConfig(
        **parts.shape,
        max_position_embeddings=geometry.original_length,
        use_parallel_residual=False,
        rope_parameters=rope,
    )
    pieces: dict[str, Affine | None] = {
        f"{base}embed_in": parts.words,
        f"{base}final_layer_norm": parts.final_norm,
        "lm_head": parts.head.get("decoder"),
    }
    for i, layer in enumerate(parts.layers):
        turned = in_layout(layer, scheme, geometry, "half")
        where = f"{base}layers.{i}"
        pieces |= {
            f"{where}.input_layernorm": layer.attention_norm,
            f"{where}.post_attention_layernorm": layer.mlp_norm,
            f"{where}.attention.query_key_value": by_head(turned, geometry.num_heads),
            f"{where}.attention.dense": layer.out,
            f"{where}.mlp.dense_h_to_4h": layer.up,
            f"{where}.mlp.dense_4h_to_h": layer.down,
        }
    return Blueprint(model_class, say_rope(model_class, config, plan), named(pieces))


def jina_embeddings_v3(model: Any, plan: SwapPlan) -> Blueprint:
    """Return the JinaEmbeddingsV3 that computes what `model` does: a rotary BERT or RoBERTa.

    Raises:
        UnsupportedSwapError: it would not be exact: why.
    """
    scheme, geometry = rotary_scheme(plan), plan.sites.geometry
    if geometry.causal:
        refuse("it sees both sides, and this model only the past")
    if scheme.rotary_dim(geometry) != geometry.head_dim:
        refuse("it rotates all dimensions of a head, and this scheme a part of them")
    parts = parts_of(model)
    model_class: Any = transformers.JinaEmbeddingsV3ForMaskedLM if parts.head else transformers.JinaEmbeddingsV3Model
    base = "roberta." if parts.head else ""
    config = transformers.JinaEmbeddingsV3Config(
        **parts.shape,
        type_vocab_size=_types(parts).shape[0],
        max_position_embeddings=geometry.original_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    pieces = _embeddings(parts, base) | {f"{base}embeddings.token_type_embeddings": parts.types}
    for i, layer in enumerate(parts.layers):
        turned = in_layout(layer, scheme, geometry, "half")
        where = f"{base}layers.{i}"
        pieces |= {
            f"{where}.self_attn.q_proj": turned.query,
            f"{where}.self_attn.k_proj": turned.key,
            f"{where}.self_attn.v_proj": layer.value,
            f"{where}.self_attn.o_proj": layer.out,
            f"{where}.post_attention_layernorm": layer.attention_norm,
            f"{where}.mlp.fc1": layer.up,
            f"{where}.mlp.fc2": layer.down,
            f"{where}.post_mlp_layernorm": layer.mlp_norm,
        }
    return Blueprint(model_class, say_rope(model_class, config, plan), named(pieces) | _lm_head(parts))


def roformer(model: Any, plan: SwapPlan) -> Blueprint:
    """Return the RoFormer that computes what `model` does: a BERT or RoBERTa with RoPE of base 10000.

    Raises:
        UnsupportedSwapError: it would not be exact: why.
    """
    scheme, geometry = rotary_scheme(plan), plan.sites.geometry
    if scheme.name != "rope" or scheme.base != 10000.0 or scheme.rotary_dim(geometry) != geometry.head_dim:
        refuse("it computes plain rope alone, of base 10000 and full width")
    code = importlib.import_module("transformers.models.roformer.modeling_roformer")
    if geometry.causal and not masks_the_future(code):
        refuse(f"its decoder sees its future in transformers {transformers.__version__}; newer ones mended that")
    parts = parts_of(model)
    if parts.pooler is not None:
        refuse("its base model has no pooler, and this one has")
    if parts.head and parts.shape["hidden_act"] != "gelu":
        refuse("its head takes the activation of the layers, and this model's gelu")
    model_class: Any = transformers.RoFormerModel
    if parts.head:
        model_class = transformers.RoFormerForCausalLM if geometry.causal else transformers.RoFormerForMaskedLM
    base = "roformer." if parts.head else ""
    config = transformers.RoFormerConfig(
        **parts.shape,
        embedding_size=parts.shape["hidden_size"],
        type_vocab_size=_types(parts).shape[0],
        max_position_embeddings=plan.max_length,
        is_decoder=geometry.causal,
    )
    pieces = _embeddings(parts, base) | {f"{base}embeddings.token_type_embeddings": parts.types}
    for i, layer in enumerate(parts.layers):
        turned = in_layout(layer, scheme, geometry, "interleaved")
        where = f"{base}encoder.layer.{i}"
        pieces |= {
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
    weights = named(pieces) | {f"{base}encoder.embed_positions.weight": _sinusoids(table.weight)}
    if parts.head:
        dense, norm, decoder = (parts.head[role] for role in ("dense", "norm", "decoder"))
        head = {"transform.dense": dense, "transform.LayerNorm": norm, "decoder": decoder}
        weights |= named({f"cls.predictions.{path}": part for path, part in head.items()})
        weights["cls.predictions.bias"] = decoder["bias"]
    return Blueprint(model_class, config, weights, limit=plan.max_length)


def mpnet(model: Any, plan: SwapPlan) -> Blueprint:
    """Return the MPNet that computes what `model` does: a BERT or RoBERTa with T5's bias, all token types 0.

    MPNet adds T5's bias to scaled scores, as hf_posswap does; its position table holds the token type's row alone.

    Raises:
        UnsupportedSwapError: it would not be exact: why.
    """
    scheme, geometry = plan.scheme, plan.sites.geometry
    if not isinstance(scheme, T5Bias):
        refuse(f"it computes T5's bias, and not {scheme.name}")
    assert isinstance(scheme, T5Bias)
    if geometry.causal:
        refuse("it sees both sides, and this model only the past")
    if (scheme.num_buckets, scheme.max_distance) != (_MPNET_BUCKETS, _MPNET_DISTANCE):
        refuse(f"its buckets are {_MPNET_BUCKETS}, up to distance {_MPNET_DISTANCE}")
    parts = parts_of(model)
    if _types(parts).shape[0] > 1:
        refuse("it has no token types, and this model has several (BERT's second sentence)")
    model_class: Any = transformers.MPNetForMaskedLM if parts.head else transformers.MPNetModel
    base = "mpnet." if parts.head else ""
    positions = plan.max_length + _MPNET_PADDING + 1
    config = transformers.MPNetConfig(**parts.shape, max_position_embeddings=positions)
    pieces = _embeddings(parts, base)
    for i, layer in enumerate(parts.layers):
        where = f"{base}encoder.layer.{i}"
        pieces |= {
            f"{where}.attention.attn.q": layer.query,
            f"{where}.attention.attn.k": layer.key,
            f"{where}.attention.attn.v": layer.value,
            f"{where}.attention.attn.o": layer.out,
            f"{where}.attention.LayerNorm": layer.attention_norm,
            f"{where}.intermediate.dense": layer.up,
            f"{where}.output.dense": layer.down,
            f"{where}.output.LayerNorm": layer.mlp_norm,
        }
    carried = model.get_submodule(".".join(part for part in (plan.sites.base, "posswap") if part))
    weights = named(pieces) | _lm_head(parts)
    weights[f"{base}encoder.relative_attention_bias.weight"] = carried.table.detach()
    weights[f"{base}embeddings.position_embeddings.weight"] = _types(parts)[:1].expand(positions, -1)
    return Blueprint(model_class, config, weights, limit=plan.max_length)


def _types(parts: Parts) -> torch.Tensor:
    assert parts.types is not None
    return parts.types["weight"]


def _embeddings(parts: Parts, base: str) -> dict[str, Affine | None]:
    return {
        f"{base}embeddings.word_embeddings": parts.words,
        f"{base}embeddings.LayerNorm": parts.embedding_norm,
        f"{base}pooler.dense": parts.pooler,
    }


def _lm_head(parts: Parts) -> Weights:
    """Return the head under the names that RoBERTa and those like it have for it."""
    if not parts.head:
        return {}
    paths = {"dense": "dense", "norm": "layer_norm", "decoder": "decoder"}
    weights = named({f"lm_head.{paths[role]}": part for role, part in parts.head.items()})
    return weights | {"lm_head.bias": parts.head["decoder"]["bias"]}


def _sinusoids(like: torch.Tensor) -> torch.Tensor:
    """Return RoFormer's table [P, D]: sin of p 10000^(-2i/D) in the first half, cos in the second."""
    count, width = like.shape
    angles = torch.arange(count).double()[:, None] * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()
