"""The rotary site: the model's own rotary modules, rebuilt from another config, or made to rotate by nothing."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.families.base import inv_freq_names
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.rope import RotaryScheme

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

POSSWAP_ROPE_TYPE = "posswap (pip install hf-posswap)"
"""Written as rope_type where stock transformers must refuse the config: it is in no table of rope functions."""

# what the rope types may set; every other key (mrope_section, ...) belongs to the model and is kept
_ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim",
    "truncate",
}  # fmt: skip


class NeutralRotary(nn.Module):
    """A rotary module that rotates by nothing: cos 1 and sin 0 in the shapes that the native one gives.

    Args:
        native: the model's own rotary module; `unpatch_model` puts it back.
    """

    def __init__(self, native: nn.Module) -> None:
        super().__init__()
        self.native = native

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `native` returns, without any rotation."""
        out = self.native(*args, **kwargs)
        if isinstance(out, tuple):
            cos, sin = out
            return torch.ones_like(cos), torch.zeros_like(sin)
        return torch.ones_like(out)  # complex unit


class KeepAngles:
    """Pre-hook of a rotary module: a cast of the model (`model.to(bfloat16)`) blurs its angles, this gives them back.

    Args:
        module: the rotary module, as it was built.
    """

    def __init__(self, module: nn.Module) -> None:
        self.exact = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}

    def __call__(self, module: Any, args: tuple[Any, ...]) -> None:
        for name, exact in self.exact.items():
            held = getattr(module, name)
            if held.dtype != exact.dtype:
                setattr(module, name, exact.to(held.device))
                module.max_seq_len_cached = getattr(module, "original_max_seq_len", 0)  # angles of that length


def with_rope(config: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return the `rope_parameters` of `config` with the rope keys replaced by `values`, the model's own keys kept."""
    kept = {key: value for key, value in (config.rope_parameters or {}).items() if key not in _ROPE_KEYS}
    return kept | values


def trial_config(config: PreTrainedConfig, values: dict[str, Any], length: int) -> PreTrainedConfig:
    """Return a copy of `config` with these rope parameters and this `max_position_embeddings`."""
    trial = copy.deepcopy(config)
    trial.max_position_embeddings = length
    trial.rope_parameters = with_rope(config, values)
    trial.standardize_rope_params()
    return trial


def rebuilt(module: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """Return a new rotary module of the class of `module`, on the CPU, for `config`; `module` is not changed."""
    with torch.device("cpu"):
        return type(module)(config)


def follows_config(module: nn.Module, config: PreTrainedConfig) -> bool:
    """Return whether a new rotary module built from `config` has the frequencies that `module` has; on meta, the shape.

    Some families build theirs from an altered copy of the config; those must not be rebuilt from the config itself.
    """
    new = rebuilt(module, config)
    for name in inv_freq_names(new):
        found, expected = getattr(module, name, None), getattr(new, name)
        if found is None or found.shape != expected.shape:
            return False
        # loosely: a model cast to bfloat16 has lost digits, which rebuilding gives back
        if not found.is_meta and not torch.allclose(found.float().cpu(), expected.float(), rtol=2e-2, atol=1e-12):
            return False
    return True


Scalar = bool | int | float | str | None


def changed_settings(
    model: nn.Module, fresh: nn.Module, rotary: tuple[str, ...]
) -> list[tuple[str, str, Scalar, Scalar]]:
    """Return where a `fresh` model of the new config differs from `model` in plain attributes: path, name, old, new.

    Some families read the rope parameters outside their rotary modules too (the attention scale of multi-head latent
    attention, say); a swap must change those as well. The rotary modules themselves are left out.
    """
    found = []
    new = dict(fresh.named_modules())
    for path, module in model.named_modules():
        if path in rotary or path not in new:
            continue
        for name, value in _scalars(new[path]).items():
            old = _scalars(module).get(name)
            if old != value:
                found.append((path, name, old, value))
    return found


def _scalars(module: nn.Module) -> dict[str, Scalar]:
    plain = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
    return {k: v for k, v in plain.items() if v is None or isinstance(v, (bool, int, float, str))}


def matches(module: nn.Module, scheme: RotaryScheme, geometry: Geometry) -> bool:
    """Return whether a rebuilt rotary `module` has the frequencies and the factor of `scheme`; on meta, their shape."""
    return matches_within(module, scheme, geometry) and _matches_beyond(module, scheme, geometry)


def matches_within(module: nn.Module, scheme: RotaryScheme, geometry: Geometry) -> bool:
    """Return whether rotary `module` does within the original length what `scheme` does; on meta, their shape."""
    frequencies = scheme.angles(geometry)
    name = inv_freq_names(module)[0]
    # what follows the length holds the angles of the last one that it met
    found: Tensor = getattr(module, f"original_{name}" if scheme.length_dependent else name, getattr(module, name))
    factor = float(getattr(module, "attention_scaling", 1.0))
    same_shape = found.shape == frequencies.inv_freq.shape
    return bool(
        scheme.only_rotates
        and same_shape
        and (found.is_meta or torch.allclose(found.float().cpu(), frequencies.inv_freq, rtol=1e-5, atol=0))
        and abs(factor - frequencies.attention_factor) < 1e-6
    )


def _matches_beyond(module: nn.Module, scheme: RotaryScheme, geometry: Geometry) -> bool:
    """Return whether stock transformers computes the frequencies of `scheme` past the original length as well."""
    if not scheme.length_dependent:
        return True
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = module.config
    length = 3 * geometry.original_length
    stock, _ = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu", seq_len=length)
    return torch.allclose(stock, scheme.angles(geometry, torch.tensor([length])).inv_freq, rtol=1e-5, atol=0)


def says(config: PreTrainedConfig, values: dict[str, Any]) -> bool:
    """Return whether `config` still says `values` after transformers has standardised it: some models override them."""
    return all((config.rope_parameters or {}).get(name) == value for name, value in values.items())


def is_still(module: nn.Module, width: int) -> bool:
    """Return whether a rebuilt rotary `module` rotates nothing, in the native width R; on meta, the width alone."""
    found: Tensor = getattr(module, inv_freq_names(module)[0])
    return found.shape[-1] == width // 2 and (found.is_meta or not bool(found.any()))
