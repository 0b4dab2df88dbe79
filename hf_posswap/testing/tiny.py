"""Tiny models of every class that transformers' Auto maps name for language models: for the census, and for tests.

A config is shrunk field by field, to the sizes in `tiny_sizes`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posswap.compat.torch_dispatch import PrivateRandomness
from hf_posswap.compat.transformers_loading import class_names
from hf_posswap.compat.transformers_models import without_initialising
from hf_posswap.errors import UnknownNameError
from hf_posswap.testing.tiny_sizes import OWN, SMALL, TINY_LENGTH, TINY_VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["TINY_LENGTH", "TINY_VOCABULARY", "language_models", "tiny_config", "tiny_model"]


def language_models() -> dict[str, tuple[str, ...]]:
    """Return the names of the classes for causal, masked and seq2seq language modelling, each with its model types."""
    types_by_class: dict[str, list[str]] = {}
    for task in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        for model_type, name in class_names(task).items():
            types = types_by_class.setdefault(name, [])
            if model_type not in types:
                types.append(model_type)
    return {name: tuple(types) for name, types in types_by_class.items()}


def tiny_config(cls: type, **changes: Any) -> PreTrainedConfig:
    """Return a shrunk config of the config class `cls`, including its nested configs.

    Args:
        cls: a config class of transformers.
        changes: fields to override; for a nested config, a dict of its fields.
    """
    model_type: str = cls.model_type  # type: ignore[attr-defined]
    overrides = OWN.get(model_type, {}) | changes
    names = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in SMALL.items() if name in names}
    if "qk_rope_head_dim" in names or model_type == "esmc":  # as many keys as queries
        values["num_key_value_heads"] = values["num_attention_heads"]
    inner = getattr(cls, "sub_configs", None) or {}
    if inner:
        typed = {name: value for name, value in overrides.items() if name not in inner or "model_type" in value}
        whole = cls(**typed)  # determines the classes of the nested configs
        for name in inner:
            inner_config = getattr(whole, name, None)
            if inner_config is not None:
                fields = {key: value for key, value in overrides.get(name, {}).items() if key != "model_type"}
                values[name] = tiny_config(type(inner_config), **fields)
    values |= {name: value for name, value in overrides.items() if name not in inner}
    return cls(**values | _all_layer_types(cls(**values)))


def _all_layer_types(config: PreTrainedConfig) -> dict[str, list[str]]:
    """Return `layer_types` that include each layer type with rope parameters, if the config's few layers lack one."""
    types = getattr(config, "layer_types", None) or []
    parameters = getattr(config, "rope_parameters", None) or {}
    rotating = [name for name, value in parameters.items() if isinstance(value, dict)]
    if not set(rotating) & set(types) or set(rotating) <= set(types):
        return {}
    return {"layer_types": [rotating[i % len(rotating)] for i in range(len(types))]}


def tiny_model(kind: str | type[PreTrainedModel], *, meta: bool = True, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny model of a class, or of the first known class of a model type, in eval mode.

    Args:
        kind: a model class, its name, or a model type.
        meta: whether it is on the meta device, where it is almost free and cannot run; otherwise its weights are
            random, determined by `seed`, and large enough for positions to matter.
        seed: random seed of the weights.
        changes: fields of the config to override.

    Raises:
        UnknownNameError: no class and no model type of that name.

    Example:
        >>> model = tiny_model("llama")
        >>> type(model).__name__, model.device.type
        ('LlamaForCausalLM', 'meta')
    """
    cls = _model_class(kind)
    if _decodes(cls):
        changes = {"is_decoder": True} | changes
    config = tiny_config(_config_class(cls, kind), **changes)
    if meta:
        with torch.device("meta"), without_initialising():
            skeleton: Any = cls(config).eval()
        return skeleton.to("meta")  # some classes create parameters on the CPU on any device
    with PrivateRandomness(seed):
        model = cls(config)
        _randomise(model)
    return model.eval()


def _model_class(kind: str | type[PreTrainedModel]) -> type[PreTrainedModel]:
    import transformers

    if not isinstance(kind, str):
        return kind
    classes = language_models()
    name = kind if kind in classes else next((name for name, types in classes.items() if kind in types), None)
    if name is None and isinstance(other := getattr(transformers, kind, None), type):
        return other  # of images, for one
    if name is None:
        raise UnknownNameError("model", kind, [*classes, *(t for types in classes.values() for t in types)])
    return getattr(transformers, name)


def _config_class(cls: type[PreTrainedModel], kind: Any) -> type:
    """Return the config class for `cls`: its own, or that of another model type that the Auto classes map to it."""
    from transformers import CONFIG_MAPPING

    native: Any = cls.config_class
    requested: Any = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else native
    return (
        native if requested.sub_configs else requested
    )  # a whole of several modalities, of which `cls` is the text part


def _decodes(cls: type[PreTrainedModel]) -> bool:
    """Return whether `cls` is causal only if its config sets is_decoder."""
    config: Any = cls.config_class
    names = {field.name for field in dataclasses.fields(config)}
    encodes_too = {"encoder_layers", "num_encoder_layers"} & names
    return cls.__name__ in class_names("CAUSAL_LM").values() and "is_decoder" in names and not encodes_too


def _randomise(model: nn.Module) -> None:
    """Set every trainable weight to random values: a weight of 0 or 1 would hide errors."""
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
