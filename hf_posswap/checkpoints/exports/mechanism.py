"""The position mechanism of a checkpoint, read from its config alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from hf_posswap.compat.transformers_loading import class_names
from hf_posswap.compat.transformers_models import layer_configs
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.families.locating import family_of
from hf_posswap.families.rope_config import RopeSettings, reaching, rope_settings
from hf_posswap.patching.inspect.describe import model_class_of
from hf_posswap.patching.inspect.paged import paged_problem, plan_needs_own_attention
from hf_posswap.patching.inspect.untrusted_config import recorded_plan
from hf_posswap.patching.record.record import SwapRecord, native_config_class
from hf_posswap.rope_math import temperature

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Kind = Literal["plugin", "inside", "table", "rope"]
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""The ends of the names of transformers' classes that generate text."""


@dataclass(frozen=True)
class PositionConfig:
    """The positions in the config of a checkpoint.

    Attributes:
        kind: "plugin": only hf_posswap computes it; "inside": a bias of the model's own (BLOOM, MPT, T5); "table": rows
            of a table, ordinary weights; "rope": rope parameters.
        model_type: of the stock class; for "plugin" of the base model.
        rotation: the rope parameters, standardised; without values where there are none. Where each type of layers has
            its own, those of full attention.
        length: positions that the model is meant for, in tokens.
        original: positions before any scaling, in tokens; None where unknown.
        scheme: name of the scheme that hf_posswap put in, or None.
        settings: that scheme's fields; {} where there is none.
        rotates: for each layer, whether it rotates, where the config says so layer by layer; () elsewhere.
        window: of sliding attention, in tokens; None where all layers see all.
        unpaged: for "plugin", why a program with its own paged cache and kernels cannot compute it even with hf_posswap
            installed, as the rest of a sentence; None: it can.
        own_attention: for "plugin", whether a program with its own kernels needs hf_posswap's attention for it: several
            rotations of a key, or a bias that is not linear in the distance.
        dtype: of the weights, as the config names it; None where it names none.
        architecture: the class that config.json names; "" where it names none.
        generates: whether it predicts next tokens; False: an encoder, whatever its head.
        others: the rope parameters of the other layer types, where each has its own (Gemma 3, ModernBERT).
        has_length: whether the config says `length` as max_position_embeddings, where other programs read it.
        slides: for each layer, whether its attention slides, where the config has layer types; () elsewhere.
    """

    kind: Kind
    model_type: str
    rotation: RopeSettings
    length: int
    original: int | None
    scheme: str | None
    settings: dict[str, object] = field(default_factory=dict)
    rotates: tuple[bool, ...] = ()
    window: int | None = None
    unpaged: str | None = None
    own_attention: bool = False
    dtype: str | None = None
    architecture: str = ""
    generates: bool = True
    others: tuple[RopeSettings, ...] = ()
    slides: tuple[bool, ...] = ()
    has_length: bool = True

    @property
    def rope(self) -> dict[str, Any]:
        """The rope parameters; {} where there are none."""
        return self.rotation.values

    @property
    def rope_set(self) -> str:
        """The layer type of `rope`, where each layer type has its own rope parameters; "": all layers."""
        return self.rotation.layer_type

    @property
    def rope_type(self) -> str:
        return self.rotation.rope_type

    @property
    def factor(self) -> float:
        return self.rotation.factor

    @property
    def usual_attention(self) -> float:
        """YaRN's own factor on cos and sin, 0.1 ln s + 1."""
        return temperature(self.factor)

    @property
    def attention(self) -> float:
        """The factor on cos and sin that transformers uses with YaRN or LongRoPE."""
        return replace(self.rotation, length=self.length).attention_factor


def position_config_of(config: PreTrainedConfig) -> PositionConfig:
    """Return the positions in the config of a checkpoint.

    Raises:
        UnsupportedModelError: the model reads images, or neither its config nor its family names a length.
        RecordError: its record cannot be read or applied.
    """
    values = getattr(config, "posswap", None)
    record = None if values is None else SwapRecord.from_dict(values)
    max_positions = getattr(config, "max_position_embeddings", None)
    sets = rope_settings(config)
    main = reaching(tuple(each.layer_type for each in sets))
    rotation = next((each for each in sets if each.layer_type in main), RopeSettings())
    if max_positions is None and (hasattr(config, "image_size") or hasattr(config, "vision_config")):
        raise UnsupportedModelError(
            f"{type(config).__name__} belongs to a model that reads images; only language models can be exported. "
            "Load it with hf_posswap.load; of a multimodal model, save the language model alone and export that."
        )
    length, inside = max_positions, False
    if length is None and record is not None:
        length = record.max_length
    elif length is None:
        stack = family_of(config).parts[-1]
        length, inside = stack.length_in(config), stack.traits is not None and stack.traits.inside(config) is not None
    if length is None:
        raise UnsupportedModelError(f"{type(config).__name__} names no length, and its family knows none.")
    original = rotation.values.get("original_max_position_embeddings")
    if record is not None and original is None:
        original = record.original.get("max_position_embeddings")
        original = min(original, length) if isinstance(original, int) else None  # whatever a record says
    plugin = native_config_class(config) is not type(config)
    kind: Kind = "plugin" if plugin else "rope" if rotation.values else "inside" if inside else "table"
    name = None if record is None else str(record.scheme["name"])
    model_type = config.model_type if record is None else record.base_type
    used = set(getattr(config, "layer_types", None) or ()) - {rotation.layer_type}  # what no layer has says nothing
    plan = recorded_plan(config, model_class_of(config))[1] if plugin else None
    return PositionConfig(
        kind,
        model_type,
        RopeSettings() if plugin else rotation,
        length,
        original,
        name,
        settings={} if record is None else dict(record.scheme),
        rotates=tuple(bool(layer) for layer in getattr(config, "no_rope_layers", None) or ()),  # 1 there: it rotates
        window=_window(config),
        unpaged=None if plan is None else paged_problem(plan),
        own_attention=plan is not None and plan_needs_own_attention(plan),
        dtype=str(config.dtype).removeprefix("torch.") if getattr(config, "dtype", None) is not None else None,
        architecture=next(iter(getattr(config, "architectures", None) or ()), ""),
        generates=_generates(config, model_type),
        others=() if plugin else tuple(each for each in sets if each.layer_type in used),
        slides=tuple(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()),
        has_length=max_positions is not None,
    )


def _generates(config: PreTrainedConfig, model_type: str) -> bool:
    """Return whether the model predicts next tokens, by the class that its config names, else by its model type."""
    if config.is_encoder_decoder or getattr(config, "is_decoder", False):
        return True
    architecture = next(iter(getattr(config, "architectures", None) or ()), "")
    if architecture.endswith(_GENERATING):
        return True
    return model_type not in class_names("MASKED_LM")


def _window(config: PreTrainedConfig) -> int | None:
    """Return the window of sliding attention, in tokens; None where no layer has one."""
    windows = [getattr(layer, "sliding_window", None) for layer in layer_configs(config)]
    window = min(filter(None, windows), default=None)
    layer_types = getattr(config, "layer_types", None)
    slides = "sliding_attention" in layer_types if layer_types else getattr(config, "use_sliding_window", True)
    return int(window) if window and slides else None
