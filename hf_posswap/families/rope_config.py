"""The rope parameters in a config: in which sub-config, for which layers, and which of those see all tokens.

Most models have one set of rope parameters. Some have one for each layer type. Then only the layers that see all tokens
matter for a longer context; the others, which see a window, keep theirs (as in Gemma 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
    return tuple(name for name in sets if not _is_windowed(name)) or sets


def _is_windowed(rope_set: str) -> bool:
    return "sliding" in rope_set or rope_set == "main"  # DeepSeek-V4's name for the rotation of its sliding layers


def parameters_of(config: Any, rope_set: str) -> dict[str, Any]:
    """Return the rope parameters of one set; empty where the config has none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return (parameters.get(rope_set) if rope_set else parameters) or {}


def layer_config(config: Any, rope_set: str) -> Any:
    """Return the config of the layers of one type: some values may differ between layers."""
    types = getattr(config, "layer_types", None) or []
    views = getattr(config, "per_layer_config", None)  # None where all layers have the same values
    return views[types.index(rope_set)] if views and rope_set in types else config


def has_rope(config: PreTrainedConfig) -> bool:
    """Return whether `config`, or its text part, has rope parameters: one set, or one for each type of layers."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None)
    if not isinstance(parameters, dict):
        return False
    return "rope_type" in parameters or any(isinstance(value, dict) for value in parameters.values())


def config_at(config: Any, path: str) -> Any:
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


def config_path(config: PreTrainedConfig, target: Any) -> str | None:
    """Return the path in `config` of the object `target`, or of an equal one; None: there is none."""
    configs = config_parts(config)
    same = [path for path, sub in configs.items() if sub is target]
    equal = [p for p, sub in configs.items() if type(sub) is type(target) and sub.to_dict() == target.to_dict()]
    return next(iter(same + equal), None)
