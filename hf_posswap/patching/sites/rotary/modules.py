"""A native rotary module: its replacements, the rope parameters in its config, and what it is compared with."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.compat.torch_tensors import holds_values
from hf_posswap.compat.transformers_attention import rope_function
from hf_posswap.errors import PosswapError
from hf_posswap.families.locating import rounds
from hf_posswap.families.rope_config import (
    BY_TYPE,
    FOLLOW_LENGTH,
    buffer_name,
    config_at,
    factor_of,
    inv_freq_names,
    parameters_of,
    rope_sets,
)
from hf_posswap.families.sites import Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.record.refusals import POSSWAP_ROPE_TYPE
from hf_posswap.schemes.rope import RotaryScheme

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

RopeValues = dict[str, dict[str, Any]]
"""Rope parameters by layer type; see `families.rope_config`."""

# keys that rope types may set; every other key (mrope_section, ...) belongs to the model and is kept
_ROPE_KEYS = {"rope_type", "type", "rope_theta"}.union(*BY_TYPE.values())


class AroundNative(nn.Module):
    """Base of rotary modules that stand for a `native` one: some models read their rotary module's own attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("native"), name)


class NeutralRotary(AroundNative):
    """A rotary module with the identity rotation: cos 1 and sin 0 in the shapes of the native one.

    Args:
        native: the model's own rotary module; `unpatch_model` restores it.
        layer_types: layer types whose rotation is the identity; others, if it has several sets, rotate as before.
    """

    def __init__(self, native: nn.Module, layer_types: tuple[str, ...]) -> None:
        super().__init__()
        self.native = native
        # not `layer_types`: some models read that attribute of their rotary module and need the native one
        self.posswap_types = layer_types
        self._last: tuple[object, object] = None, None

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Return the output of `native` without rotation; for one token, as in decoding, the last output is cached."""
        if torch.compiler.is_compiling():
            return self._without_rotation(*args, **kwargs)
        key = _shapes(args, kwargs)
        cached, out = self._last
        if key is None or cached != key:
            out = self._without_rotation(*args, **kwargs)
            if key is not None:
                self._last = key, out
        return out

    def _without_rotation(self, *args: object, **kwargs: object) -> object:
        """Return the output of the native module with the identity rotation.

        Raises:
            PosswapError: the output is neither cos and sin nor complex numbers.
        """
        out = self.native(*args, **kwargs)
        layer_type = args[2] if len(args) > 2 else kwargs.get("layer_type")
        if isinstance(layer_type, str) and layer_type not in self.posswap_types:
            return out
        if isinstance(out, tuple) and len(out) == 2:
            cos, sin = out
            return torch.ones_like(cos), torch.zeros_like(sin)
        if isinstance(out, torch.Tensor) and out.is_complex():
            return torch.ones_like(out)
        raise PosswapError(
            f"{type(self.native).__name__} returns neither cos and sin nor complex numbers in this release of "
            f"transformers, but {_describe(out)}: the identity rotation is unknown. "
            "Install a release that hf_posswap was tested with."
        )


def _describe(out: object) -> str:
    if isinstance(out, torch.Tensor):
        return f"one tensor {list(out.shape)} of {out.dtype}"
    return f"{len(out)} values" if isinstance(out, tuple) else f"a {type(out).__name__}"


def _shapes(args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
    """Return a cache key for cos 1 and sin 0 of one token; None for more tokens or other arguments."""
    given = (*args, *kwargs.values())
    if len(given) != 2 or not all(type(argument) is torch.Tensor for argument in given):
        return None
    states, positions = given
    if positions.is_floating_point() or positions.shape[-1:] != (1,):
        return None
    return states.dtype, states.device, positions.shape, torch.is_inference_mode_enabled()


class KeepAngles:
    """Pre-hook of a rotary module that restores its angles after a cast of the model (`model.to(bfloat16)`).

    A cast replaces the tensors of the module, as does a move, which keeps the angles. A length-dependent module
    recomputes its frequencies but never replaces its original ones.

    Args:
        module: the newly built rotary module.
    """

    def __init__(self, module: nn.Module) -> None:
        buffers = dict(module.named_buffers(recurse=False))
        self.exact = {name: buffer.clone() for name, buffer in buffers.items()}
        lasting = {name: buffer for name, buffer in buffers.items() if "original" in name}
        self.seen = lasting or buffers

    def __call__(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if all(getattr(module, name) is buffer for name, buffer in self.seen.items()):
            return
        for name, exact in self.exact.items():
            setattr(module, name, exact.to(getattr(module, name).device, copy=True))
        self.seen = {name: getattr(module, name) for name in self.seen}
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:  # one for each set
            setattr(module, name, getattr(module, "original_max_seq_len", 0))  # angles of that length


def restore_angles(module: nn.Module) -> None:
    """Restore the angles of a rotary module with `KeepAngles`, as its next forward would."""
    for hook in pre_hooks(module):
        if isinstance(hook, KeepAngles):
            hook(module, ())


def rebuilt(module: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """Return a new rotary module of the class of `module`, on the CPU, for `config`; `module` is not changed."""
    with torch.device("cpu"):
        return type(module)(config)


def follows_config(module: nn.Module, config: PreTrainedConfig) -> bool:
    """Return whether a rotary module rebuilt from `config` has the frequencies of `module`; on meta, the shape.

    Some families build it from an altered copy of the config; those must not be rebuilt from the config itself.
    """
    new = rebuilt(module, config)
    for rope_set, name in zip(rope_sets(new), inv_freq_names(new), strict=True):
        actual, expected = getattr(module, name, None), getattr(new, name)
        if (
            parameters_of(config, rope_set).get("rope_type") in FOLLOW_LENGTH
        ):  # `actual` is of the last text it has seen
            actual = getattr(module, name.replace("inv_freq", "original_inv_freq"), actual)
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
    with torch.device("cpu"):  # a skeleton may be planned where the default is meta
        stock, _ = rope_function(rope_type)(config, "cpu", seq_len=length, layer_type=rope_set or None)
        expected = scheme.angles(geometry, torch.tensor([length])).inv_freq
    return torch.allclose(stock, expected, rtol=1e-5, atol=0)


def turns_nothing(module: nn.Module) -> bool:
    """Return whether a rebuilt rotary `module` rotates nothing; True if it has no values."""
    buffers: list[Tensor] = [getattr(module, name) for name in inv_freq_names(module)]
    return all(not holds_values(buffer) or not bool(buffer.any()) for buffer in buffers)


def running(old: nn.Module, current: Any, config: PreTrainedConfig) -> nn.Module | None:
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


def keeps(module: nn.Module, old: nn.Module, config: PreTrainedConfig, layer_types: tuple[str, ...]) -> bool:
    """Return whether a rebuilt rotary `module` equals the `old` one for all layer types except `layer_types`."""
    before = rebuilt(old, config)
    others = [name for name in rope_sets(old) if name not in layer_types]
    return all(
        torch.equal(getattr(module, buffer_name(name)), getattr(before, buffer_name(name)))
        and factor_of(module, name) == factor_of(before, name)
        for name in others
    )


def with_rope(config: PreTrainedConfig, values: Mapping[str, dict[str, object]]) -> dict[str, object]:
    """Return the `rope_parameters` of `config` with the rope keys of the sets in `values` replaced.

    Args:
        config: the sub-config that has them.
        values: new rope keys, by the name of their set; the model's own keys, and the other sets, are kept.
    """
    changed = {}
    for name, given in values.items():
        old = parameters_of(config, name)
        # the attention of Ministral 3 and similar models scales queries by it, whatever the rope type
        kept = _ROPE_KEYS - ({"original_max_position_embeddings"} if "llama_4_scaling_beta" in old else set())
        changed[name] = {key: value for key, value in old.items() if key not in kept} | given
    return changed[""] if "" in changed else copy.deepcopy(config.rope_parameters) | changed


def trial_config(
    config: PreTrainedConfig, path: str, values: Mapping[str, dict[str, object]], length: int
) -> PreTrainedConfig:
    """Return a copy of `config` whose sub-config at `path` has these rope parameters and this length."""
    trial = copy.deepcopy(config)
    text = config_at(trial, path)
    text.max_position_embeddings = length
    text.rope_parameters = with_rope(text, values)
    text.standardize_rope_params()
    return with_real_dtype(trial, text)


def with_real_dtype(config: Any, subconfig: Any) -> Any:
    """Return `config` with a torch dtype in it and in its `subconfig`, where saving has left a name."""
    for target in (config, subconfig):
        if isinstance(target.dtype, str):
            target.dtype = getattr(torch, target.dtype)
    return config


def read_back(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return `config` as read back from a checkpoint; None: its class refuses to read it."""
    try:
        return type(config).from_dict(config.to_dict())
    except Exception:  # config validators may raise anything
        return None


def says(config: PreTrainedConfig, values: dict[str, dict[str, object]]) -> bool:
    """Return whether `config` still has `values` after transformers has standardised it: some models override them."""
    actual = {name: parameters_of(config, name) for name in values}
    return all(actual[name].get(key) == value for name, given in values.items() for key, value in given.items())


def refused_values(model: PreTrainedModel, stack: Stack, layer_types: tuple[str, ...]) -> dict[str, object]:
    """Return config values, by path, that stock transformers refuses, for identity rotations."""
    config = config_at(model.config, stack.config)
    refused = {name: {"rope_type": POSSWAP_ROPE_TYPE, "rope_theta": base_of(config, name)} for name in layer_types}
    return {f"{stack.config}.rope_parameters".lstrip("."): with_rope(config, refused)}


def base_of(config: PreTrainedConfig, layer_type: str) -> float:
    """Return theta of the layers of one type."""
    return float(parameters_of(config, layer_type).get("rope_theta") or 10000.0)
