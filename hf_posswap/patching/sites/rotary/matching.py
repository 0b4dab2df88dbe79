"""Comparing a rotary module with a scheme, a config, or another module."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_fake import holds_values
from hf_posswap.compat.transformers_rotary import rope_function
from hf_posswap.families.measuring import rounds
from hf_posswap.families.rope_config import buffer_name, factor_of, inv_freq_names, parameters_of, rope_sets
from hf_posswap.geometry import Geometry
from hf_posswap.patching.sites.rotary.modules import rebuilt, restore_angles
from hf_posswap.schemes.rope import RotaryScheme

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def follows_config(module: nn.Module, config: PreTrainedConfig) -> bool:
    """Return whether a rotary module rebuilt from `config` has the frequencies of `module`; on meta, the shape.

    Some families build it from an altered copy of the config; those must not be rebuilt from the config itself.
    """
    new = rebuilt(module, config)
    for name in inv_freq_names(new):
        actual, expected = getattr(module, name, None), getattr(new, name)
        if actual is None or not rounds(actual, expected):  # a model that was cast has lost digits
            return False
    return True


def matches(module: nn.Module, scheme: RotaryScheme, geometry: Geometry, rope_set: str = "") -> bool:
    """Return whether a rebuilt rotary `module` has the frequencies and factor of `scheme`; on meta, the shape only."""
    within = matches_within(module, scheme, geometry, rope_set)
    return within and _matches_beyond(module, scheme, geometry, rope_set)


def matches_within(module: nn.Module, scheme: RotaryScheme, geometry: Geometry, rope_set: str = "") -> bool:
    """Return whether rotary `module` matches `scheme` within the original length; on meta, the shape only."""
    restore_angles(module)
    frequencies = scheme.angles(geometry)
    name = buffer_name(rope_set)
    # a length-dependent module has the angles of the last length that it saw
    original = name.replace("inv_freq", "original_inv_freq") if scheme.length_dependent else name
    actual: Tensor = getattr(module, original, getattr(module, name))
    same_shape = actual.shape == frequencies.inv_freq.shape
    return bool(
        scheme.only_rotates
        and same_shape
        and (not holds_values(actual) or torch.allclose(actual.float().cpu(), frequencies.inv_freq, rtol=1e-5, atol=0))
        and abs(factor_of(module, rope_set) - frequencies.attention_factor) < 1e-6
    )


def _matches_beyond(module: nn.Module, scheme: RotaryScheme, geometry: Geometry, rope_set: str) -> bool:
    """Return whether stock transformers computes the frequencies of `scheme` past the original length as well."""
    if not scheme.length_dependent:
        return True
    config: Any = module.config
    length = 3 * geometry.original_length
    rope_type = parameters_of(config, rope_set)["rope_type"]
    stock, _ = rope_function(rope_type)(config, "cpu", seq_len=length, layer_type=rope_set or None)
    return torch.allclose(stock, scheme.angles(geometry, torch.tensor([length])).inv_freq, rtol=1e-5, atol=0)


def turns_nothing(module: nn.Module) -> bool:
    """Return whether a rebuilt rotary `module` rotates nothing; True if it has no values."""
    buffers: list[Tensor] = [getattr(module, name) for name in inv_freq_names(module)]
    return all(not holds_values(buffer) or not bool(buffer.any()) for buffer in buffers)


def running(old: nn.Module, current: Any, config: Any) -> nn.Module | None:
    """Return a new rotary module of the class of `old` for `config`; None if it cannot be built or does not run.

    Args:
        old: a module of the model.
        current: its config; if the probe fails with this one too, the failure is ignored.
        config: the new one.
    """
    try:
        _probe(rebuilt(old, current))
    except Exception:  # arbitrary model code
        return rebuilt(old, config)
    try:
        new = rebuilt(old, config)
        _probe(new)
    except Exception:  # arbitrary model code, written for other rope parameters
        return None
    return new


def _probe(module: nn.Module) -> None:
    wanted = inspect.signature(type(module).forward).parameters
    for name in rope_sets(module):
        given = {"layer_type": name} if "layer_type" in wanted and name else {}
        module(torch.zeros(1, 2, 8, device="cpu"), torch.arange(2, device="cpu")[None], **given)


def same_widths(module: nn.Module, old: nn.Module) -> bool:
    """Return whether two rotary modules rotate the same number of pairs in each of their sets."""
    widths, before = ({n: getattr(m, n).shape[-1] for n in inv_freq_names(m)} for m in (module, old))
    return widths == before


def keeps(module: nn.Module, old: nn.Module, config: Any, layer_types: tuple[str, ...]) -> bool:
    """Return whether a rebuilt rotary `module` equals the `old` one for all layer types except `layer_types`."""
    before = rebuilt(old, config)
    others = [name for name in rope_sets(old) if name not in layer_types]
    return all(
        torch.equal(getattr(module, buffer_name(name)), getattr(before, buffer_name(name)))
        and factor_of(module, name) == factor_of(before, name)
        for name in others
    )
