"""The rope parameters in a config: in which sub-config, for which layers, and what they mean.

Most models have one set of rope parameters. Some have one for each layer type. Then only the layers that see all tokens
matter for a longer context; the others, which see a window, keep theirs (as in Gemma 3).

Everything that asks what a config says of its rotation asks `rope_settings`. Its angles come from the papers' formulas
in float64: nothing of transformers is called.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.rope_math import default_inv_freq, temperature

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BY_TYPE: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "proportional": frozenset({"factor"}),
    "yarn": frozenset({
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    }),
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}
    ),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
}  # fmt: skip
"""By rope type, the keys that transformers reads besides the type, theta and the rotated share."""
SCALED = tuple(name for name in BY_TYPE if name != "default")
"""The rope types whose angles are not those of plain RoPE."""
FOLLOW_LENGTH = ("dynamic", "longrope")
"""The rope types whose angles depend on the length of the text."""


@dataclass(frozen=True)
class RopeSettings:
    """One set of rope parameters: those of all layers, or of the layers of one type.

    Attributes:
        values: as the config has them.
        layer_type: whose they are; "": those of all layers.
        length: `max_position_embeddings` of their config, in tokens; 0: it has none.

    Example:
        >>> yarn = RopeSettings({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, length=256)
        >>> yarn.rope_type, round(yarn.attention_factor, 4), yarn.follows_length
        ('yarn', 1.1386, False)
    """

    values: dict[str, Any] = field(default_factory=dict)
    layer_type: str = ""
    length: int = 0

    @property
    def rope_type(self) -> str:
        """Its rope type, in the new spelling or the old."""
        return str(self.values.get("rope_type", self.values.get("type", "default")))

    @property
    def factor(self) -> float:
        """Target length over original length; 1.0 where it names none."""
        return float(self.values.get("factor") or 1.0)

    @property
    def original(self) -> int:
        """The length that its scaling starts from, in tokens: `length` where it names none."""
        return int(self.values.get("original_max_position_embeddings") or self.length)

    @property
    def has_one_list(self) -> bool:
        """Whether LongRoPE's two lists are equal, so that its angles do not depend on the length."""
        short = self.values.get("short_factor")
        return bool(short) and short == self.values.get("long_factor")

    @property
    def follows_length(self) -> bool:
        """Whether its angles depend on the length of the text."""
        return self.rope_type in FOLLOW_LENGTH and not (self.rope_type == "longrope" and self.has_one_list)

    @property
    def attention_factor(self) -> float:
        """The factor on cos and sin.

        Raises:
            KeyError, TypeError, ValueError: the parameters are incomplete.
        """
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        given = self.values.get("attention_factor")
        if given is not None:
            return float(given)
        growth = self.values.get("factor") or self.length / self.original
        if self.rope_type == "longrope":
            return math.sqrt(1 + math.log(growth) / math.log(self.original)) if growth > 1 else 1.0
        scale, scale_all = self.values.get("mscale"), self.values.get("mscale_all_dim")
        if scale and scale_all:
            return temperature(growth, scale) / temperature(growth, scale_all)
        return temperature(growth)

    def angles(self, dim: int, length: int = 0) -> Tensor:
        """Return the angles in radians per position, [dim/2] in float64.

        Args:
            dim: rotated dimensions of a head.
            length: of the text, in tokens, for dynamic and longrope.

        Raises:
            KeyError, TypeError, ValueError: the parameters are incomplete, or of an unknown type.

        Example:
            >>> RopeSettings({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}).angles(4)
            tensor([0.5000, 0.0050], dtype=torch.float64)
        """
        values, theta = self.values, float(self.values["rope_theta"])
        plain = default_inv_freq(theta, dim, torch.float64)
        match self.rope_type:
            case "default":
                return plain
            case "linear":
                return plain / values["factor"]
            case "proportional":
                turning = int(values.get("partial_rotary_factor", 1.0) * dim // 2)
                return plain.masked_fill(torch.arange(dim // 2) >= turning, 0.0) / self.factor
            case "dynamic":
                growth = values["factor"] * max(length, self.length) / self.length - (values["factor"] - 1)
                return default_inv_freq(theta * growth ** (dim / (dim - 2)), dim, torch.float64)
            case "llama3":  # slow pairs divided, fast ones kept, a ramp over wavelengths between
                slow, fast = values["low_freq_factor"], values["high_freq_factor"]
                turns = self.original * plain / (2 * math.pi)  # in the original length
                ramp = ((turns - slow) / (fast - slow)).clamp(0, 1)
                return plain * (ramp + (1 - ramp) / values["factor"])
            case "yarn":
                ramp = self._yarn_ramp(theta, dim)
                return plain * (1 - ramp) + plain / (values.get("factor") or self.length / self.original) * ramp
            case "longrope":
                factors = values["long_factor" if length > self.original else "short_factor"]
                if len(factors) != len(plain):
                    raise ValueError(f"{len(factors)} factors for {len(plain)} angles.")
                return plain / torch.tensor(factors, dtype=torch.float64)
        raise ValueError(f"no formula for rope type {self.rope_type!r}.")

    def _yarn_ramp(self, theta: float, dim: int) -> Tensor:
        """Return how far each pair is interpolated, 0 to 1, [dim/2]: from pairs of beta_fast turns to beta_slow."""
        first, last = (
            dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.values.get("beta_fast") or 32, self.values.get("beta_slow") or 1)
        )
        if self.values.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        span = (last - first) or 0.001
        return ((torch.arange(dim // 2, dtype=torch.float64) - first) / span).clamp(0, 1)


def rope_settings(config: PreTrainedConfig) -> tuple[RopeSettings, ...]:
    """Return what `config` itself says of its rotation: one set, one for each type of layers, or none.

    Args:
        config: of a language model, or the dict of its config.json.

    Example:
        >>> from transformers import Gemma3TextConfig, GPT2Config
        >>> [(each.layer_type, each.values["rope_theta"]) for each in rope_settings(Gemma3TextConfig())]
        [('sliding_attention', 10000.0), ('full_attention', 1000000.0)]
        >>> rope_settings(GPT2Config())
        ()
    """
    read = config.get if isinstance(config, dict) else lambda name: getattr(config, name, None)
    parameters, length = read("rope_parameters"), read("max_position_embeddings")
    if not isinstance(parameters, dict) or not parameters:
        return ()
    sets = {name: values for name, values in parameters.items() if isinstance(values, dict)} or {"": parameters}
    return tuple(RopeSettings(v, name, length if isinstance(length, int) else 0) for name, v in sets.items())


def inv_freq_names(module: nn.Module) -> list[str]:
    """Return the names of the frequency buffers that `module` itself owns: a rotary module has some."""
    names = [name for name, _ in module.named_buffers(recurse=False)]
    return [name for name in names if name.endswith("inv_freq") and "original" not in name]


def rope_sets(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the sets of frequencies of a rotary module: types of layers, or "" where it has one set."""
    return tuple(name.removesuffix("inv_freq").removesuffix("_") for name in inv_freq_names(module))


def buffer_name(rope_set: str) -> str:
    """Return the name of the buffer that holds a set of frequencies."""
    return f"{rope_set}_inv_freq" if rope_set else "inv_freq"


def factor_of(module: nn.Module, rope_set: str) -> float:
    """Return the factor on cos and sin of a set in a rotary module."""
    return float(getattr(module, f"{rope_set}_attention_scaling" if rope_set else "attention_scaling", 1.0))


def reaching(sets: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the sets whose layers see all tokens; all of them, where none do.

    Example:
        >>> reaching(("full_attention", "sliding_attention"))
        ('full_attention',)
        >>> reaching(("sliding_attention",))
        ('sliding_attention',)
    """
    # "main" is DeepSeek-V4's name for the rotation of its sliding layers
    return tuple(name for name in sets if "sliding" not in name and name != "main") or sets


def parameters_of(config: PreTrainedConfig, rope_set: str) -> dict[str, Any]:
    """Return the rope parameters of one set; empty where the config has none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return (parameters.get(rope_set) if rope_set else parameters) or {}


def layer_config(config: PreTrainedConfig, rope_set: str) -> PreTrainedConfig:
    """Return the config of the layers of one type: some values may differ between layers."""
    types = getattr(config, "layer_types", None) or []
    views = getattr(config, "per_layer_config", None)  # None where all layers have the same values
    return views[types.index(rope_set)] if views and rope_set in types else config


def has_rope(config: PreTrainedConfig) -> bool:
    """Return whether `config`, or its text part, has rope parameters: one set, or one for each type of layers."""
    return any(each.layer_type or "rope_type" in each.values for each in rope_settings(config.get_text_config()))


def config_at(config: object, path: str) -> Any:
    """Return the sub-config of `config` at `path`; "" is `config` itself.

    Example:
        >>> from transformers import Gemma3Config
        >>> type(config_at(Gemma3Config(), "text_config")).__name__
        'Gemma3TextConfig'
    """
    for name in path.split(".") if path else ():
        config = getattr(config, name)
    return config


def config_parts(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Return `config` and the configs in it, by their paths."""
    configs = {"": config}
    for name in config.sub_configs or {}:
        inner = getattr(config, name, None)
        if inner is not None:
            configs |= {f"{name}.{path}".rstrip("."): sub for path, sub in config_parts(inner).items()}
    return configs


def config_path(config: PreTrainedConfig, target: object) -> str | None:
    """Return the path in `config` of the object `target`, or of an equal one; None: there is none."""
    configs = config_parts(config)
    same = [path for path, sub in configs.items() if sub is target]
    equal = [p for p, sub in configs.items() if type(sub) is type(target) and sub.to_dict() == target.to_dict()]
    return next(iter(same + equal), None)
