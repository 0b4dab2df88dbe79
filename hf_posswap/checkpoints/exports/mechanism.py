"""The position mechanism of a checkpoint, read from its config alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_posswap.compat.transformers_loading import class_names
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.families.rope_config import parameters_of, reaching
from hf_posswap.patching.inspect.describe import model_class_of
from hf_posswap.patching.inspect.paged import paged_problem
from hf_posswap.patching.inspect.untrusted_config import recorded_plan
from hf_posswap.patching.record.record import SwapRecord, native_config_class

Kind = Literal["plugin", "table", "rope"]
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""The ends of the names of transformers' classes that generate text."""


@dataclass(frozen=True)
class PositionConfig:
    """The positions in the config of a checkpoint.

    Attributes:
        kind: "plugin": only hf_posswap computes it; "table": rows of a table, ordinary weights; "rope": rope
            parameters.
        model_type: of the stock class; for "plugin" of the base model.
        rope: the rope parameters, standardised; {} where there are none. Where each type of layers has its own, those
            of full attention.
        length: positions that the model is meant for, in tokens.
        original: positions before any scaling, in tokens; None where unknown.
        scheme: name of the scheme that hf_posswap put in, or None.
        settings: that scheme's fields; {} where there is none.
        rotates: for each layer, whether it rotates, where the config says so layer by layer; () elsewhere.
        window: of sliding attention, in tokens; None where all layers see all.
        unpaged: for "plugin", why a program with its own paged cache and kernels cannot compute it even with hf_posswap
            installed, as the rest of a sentence; None: it can.
        dtype: of the weights, as the config names it; None where it names none.
        architecture: the class that config.json names; "" where it names none.
        generates: whether it predicts next tokens; False: an encoder, whatever its head.
        rope_set: the layer type of `rope`, where each layer type has its own rope parameters (Gemma 3, ModernBERT); "":
            all layers.
        other_sets: the rope parameters of the other layer types, by their names.
        slides: for each layer, whether its attention slides, where the config has layer types; () elsewhere.
    """

    kind: Kind
    model_type: str
    rope: dict[str, Any]
    length: int
    original: int | None
    scheme: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    rotates: tuple[bool, ...] = ()
    window: int | None = None
    unpaged: str | None = None
    dtype: str | None = None
    architecture: str = ""
    rope_set: str = ""
    generates: bool = True
    other_sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    slides: tuple[bool, ...] = ()

    @property
    def rope_type(self) -> str:
        return str(self.rope.get("rope_type", "default"))

    @property
    def factor(self) -> float:
        return float(self.rope.get("factor") or 1.0)

    @property
    def usual_attention(self) -> float:
        """YaRN's own factor on cos and sin, 0.1 ln s + 1."""
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    @property
    def attention(self) -> float:
        """The factor on cos and sin that transformers uses with YaRN or LongRoPE."""
        given = self.rope.get("attention_factor")
        if given is not None:
            return float(given)
        if self.rope_type == "longrope":
            original = self.rope["original_max_position_embeddings"]
            grown = self.rope.get("factor") or self.length / original
            return math.sqrt(1 + math.log(grown) / math.log(original)) if grown > 1 else 1.0
        first, second = float(self.rope.get("mscale") or 0), float(self.rope.get("mscale_all_dim") or 0)
        if first and second:
            return (0.1 * first * math.log(self.factor) + 1) / (0.1 * second * math.log(self.factor) + 1)
        return self.usual_attention

    @property
    def fixed_list(self) -> bool:
        """Whether LongRoPE's two lists are equal, so that the angles do not depend on the length."""
        return bool(self.rope.get("short_factor")) and self.rope.get("short_factor") == self.rope.get("long_factor")


def position_config_of(config: Any) -> PositionConfig:
    """Return the positions in the config of a checkpoint.

    Raises:
        UnsupportedModelError: the model reads images, or the config has no length.
        RecordError: its record cannot be read or applied.
    """
    values = getattr(config, "posswap", None)
    record = None if values is None else SwapRecord.from_dict(values)
    length = getattr(config, "max_position_embeddings", None)
    rope_set = _rope_set(config)
    rope = dict(parameters_of(config, rope_set))
    if length is None and (hasattr(config, "image_size") or hasattr(config, "vision_config")):
        raise UnsupportedModelError(
            f"{type(config).__name__} belongs to a model that reads images; only language models can be exported. "
            "Load it with hf_posswap.load; of a multimodal model, save the language model alone and export that."
        )
    if length is None:
        raise UnsupportedModelError(
            f"{type(config).__name__} has no max_position_embeddings: it is unknown how other programs read its "
            "positions."
        )
    original = rope.get("original_max_position_embeddings")
    if record is not None and original is None:
        original = record.original.get("max_position_embeddings")
        original = min(original, length) if isinstance(original, int) else None  # whatever a record says
    plugin = native_config_class(config) is not type(config)
    kind: Kind = "plugin" if plugin else "rope" if rope else "table"
    name = None if record is None else str(record.scheme["name"])
    model_type = config.model_type if record is None else record.base_type
    settings = {} if record is None else dict(record.scheme)
    used = set(getattr(config, "layer_types", None) or ()) - {rope_set}  # a set that no layer has says nothing
    sets = {} if plugin or not rope_set else config.rope_parameters
    rotates = tuple(bool(layer) for layer in getattr(config, "no_rope_layers", None) or ())  # 1 there: it rotates
    return PositionConfig(
        kind,
        model_type,
        {} if plugin else rope,
        length,
        original,
        name,
        settings,
        rotates,
        _window(config),
        paged_problem(recorded_plan(config, model_class_of(config))[1]) if plugin else None,
        str(config.dtype).removeprefix("torch.") if getattr(config, "dtype", None) is not None else None,
        next(iter(getattr(config, "architectures", None) or ()), ""),
        "" if plugin else rope_set,
        _generates(config, model_type),
        {name: dict(parameters_of(config, name)) for name in sets if name in used},
        tuple(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()),
    )


def _generates(config: Any, model_type: str) -> bool:
    """Return whether the model predicts next tokens, by the class that its config names, else by its model type."""
    if config.is_encoder_decoder or getattr(config, "is_decoder", False):
        return True
    architecture = next(iter(getattr(config, "architectures", None) or ()), "")
    if architecture.endswith(_GENERATING):
        return True
    return model_type not in class_names("MASKED_LM")


def _rope_set(config: Any) -> str:
    """Return the first layer type with full attention, where each layer type has its own rope parameters; else ""."""
    sets = (getattr(config, "rope_parameters", None) or {}).items()
    names = tuple(name for name, values in sets if isinstance(values, dict))
    return reaching(names)[0] if names else ""


def _window(config: Any) -> int | None:
    """Return the window of sliding attention, in tokens; None where no layer has one."""
    views = config.per_layer_config if getattr(config, "is_heterogeneous", False) else None
    windows = [getattr(layer, "sliding_window", None) for layer in views or (config,)]
    window = min(filter(None, windows), default=None)
    layer_types = getattr(config, "layer_types", None)
    slides = "sliding_attention" in layer_types if layer_types else getattr(config, "use_sliding_window", True)
    return int(window) if window and slides else None
