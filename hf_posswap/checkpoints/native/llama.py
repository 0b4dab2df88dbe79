"""Llama-like models: as their own class with another config, and as SmolLM3, whose layers may lack rotation."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers

from hf_posswap.checkpoints.native.parts import Blueprint, Weights, refuse
from hf_posswap.checkpoints.native.rope import rotary_scheme, say_rope
from hf_posswap.patching.edits.settings import EditConfig
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.building import build_native
from hf_posswap.patching.record.model_class import native_class
from hf_posswap.patching.record.record import native_config, without_record
from hf_posswap.rope_layout import permute_rows
from hf_posswap.schemes import NoPE, RotaryScheme
from hf_posswap.schemes.layered import Layered

_LLAMA_KIND = ("llama", "mistral", "qwen2")


def same_class(model: Any, plan: SwapPlan) -> Blueprint:
    """Return a stock model of the class of `model` that computes what `model` does.

    Of a native swap only hf_posswap's record is removed. A rotary model whose scheme acts inside attention becomes one
    with other rope parameters, if necessary with the rows of queries and keys reordered.

    Raises:
        UnsupportedSwapError: it would not be exact, with the reason.
    """
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if plan.route == "native":
        config = without_record(model.config)
        ends = plan.sites.table_path is not None
        return Blueprint(native_class(type(model)), config, weights, limit=plan.max_length if ends else None)
    if not plan.sites.rotary:
        refuse("the class has a position table, and this scheme needs none")
    return Blueprint(native_class(type(model)), _config(model, plan), _in_native_layout(weights, plan))


def _config(model: Any, plan: SwapPlan) -> Any:
    """Return the config of the native model with rope parameters that express the scheme of `plan`."""
    config = native_config(model.config)
    scheme: Any = plan.scheme
    if not isinstance(scheme, NoPE):
        scheme = dataclasses.replace(rotary_scheme(plan), layout=plan.sites.geometry.layout)
    with torch.device("meta"):
        skeleton = build_native(model, config)
    trial = plan_swap(skeleton, scheme, max_length=plan.max_length)
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


def smollm3(model: Any, plan: SwapPlan) -> Blueprint:
    """Return the SmolLM3 that computes what `model` does: a Llama, Mistral or Qwen2 with layers without rotation.

    Raises:
        UnsupportedSwapError: it would not be exact, with the reason.
    """
    config = native_config(model.config)
    rope, rotates = _rotation(plan)
    name = type(model).__name__.replace(_prefix(model), "SmolLM3", 1)
    model_class = getattr(transformers, name, None)
    if model_class is None:
        refuse(f"transformers has no class {name}")
    weights = {path: tensor.detach() for path, tensor in model.state_dict().items()}
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


def _prefix(model: Any) -> str:
    """Return the architecture in the class's name: Llama, Mistral, Qwen2."""
    model_type = model.config.model_type
    if model_type not in _LLAMA_KIND:
        refuse(f"its layers are those of {', '.join(_LLAMA_KIND)}, and not of {model_type}")
    return str(model_type).capitalize()


def _with_biases(weights: Weights, plan: SwapPlan) -> Weights:
    """Return `weights` with zeros for the biases that SmolLM3 has in attention and this model lacks."""
    full = dict(weights)
    for path in plan.sites.attention:
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = weights[f"{path}.{projection}.weight"]
            full.setdefault(f"{path}.{projection}.bias", weight.new_zeros(weight.shape[0]))
    return full
