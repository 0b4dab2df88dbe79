"""The rotary site: the model's own rotary modules, rebuilt from another config, or made to rotate by nothing."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.families.rope_config import buffer_name, config_at, factor_of, inv_freq_names, parameters_of, rope_sets
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
        sets: of its frequencies that are neutral, where it has one for each type of layers; the others turn as ever.
    """

    def __init__(self, native: nn.Module, sets: tuple[str, ...]) -> None:
        super().__init__()
        self.native, self.sets = native, sets

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some models read their rotary module's own attributes
            return getattr(super().__getattr__("native"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `native` returns, without any rotation."""
        out = self.native(*args, **kwargs)
        layer_type = args[2] if len(args) > 2 else kwargs.get("layer_type")
        if isinstance(layer_type, str) and layer_type not in self.sets:
            return out
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


def with_rope(config: Any, values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the `rope_parameters` of `config` with the rope keys of the sets in `values` replaced.

    Args:
        config: the part of a config that has them.
        values: new rope keys, by the name of their set; the model's own keys, and the other sets, are kept.
    """
    changed = {}
    for name, given in values.items():
        old = parameters_of(config, name)
        # the attention of Ministral 3 and its kin scales queries by it, whatever the rope type
        kept = _ROPE_KEYS - ({"original_max_position_embeddings"} if "llama_4_scaling_beta" in old else set())
        changed[name] = {key: value for key, value in old.items() if key not in kept} | given
    return changed[""] if "" in changed else copy.deepcopy(config.rope_parameters) | changed


def trial_config(
    config: PreTrainedConfig, part: str, values: dict[str, dict[str, Any]], length: int
) -> PreTrainedConfig:
    """Return a copy of `config` whose part at the path `part` has these rope parameters and this length."""
    trial = copy.deepcopy(config)
    text = config_at(trial, part)
    text.max_position_embeddings = length
    text.rope_parameters = with_rope(text, values)
    text.standardize_rope_params()
    for one in (trial, text):
        if isinstance(one.dtype, str):  # saving leaves a name there, and some models want the dtype itself
            one.dtype = getattr(torch, one.dtype)
    return trial


def read_back(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return what a checkpoint with `config` would be read with; None: its class refuses to read it."""
    try:
        return type(config).from_dict(config.to_dict())
    except Exception:  # validators of configs raise what they like
        return None


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


def matches(module: nn.Module, scheme: RotaryScheme, geometry: Geometry, rope_set: str = "") -> bool:
    """Return whether a rebuilt rotary `module` has the frequencies and the factor of `scheme`; on meta, their shape."""
    within = matches_within(module, scheme, geometry, rope_set)
    return within and _matches_beyond(module, scheme, geometry, rope_set)


def matches_within(module: nn.Module, scheme: RotaryScheme, geometry: Geometry, rope_set: str = "") -> bool:
    """Return whether rotary `module` does within the original length what `scheme` does; on meta, their shape."""
    frequencies = scheme.angles(geometry)
    name = buffer_name(rope_set)
    # what follows the length holds the angles of the last one that it met
    original = name.replace("inv_freq", "original_inv_freq") if scheme.length_dependent else name
    found: Tensor = getattr(module, original, getattr(module, name))
    same_shape = found.shape == frequencies.inv_freq.shape
    return bool(
        scheme.only_rotates
        and same_shape
        and (found.is_meta or torch.allclose(found.float().cpu(), frequencies.inv_freq, rtol=1e-5, atol=0))
        and abs(factor_of(module, rope_set) - frequencies.attention_factor) < 1e-6
    )


def _matches_beyond(module: nn.Module, scheme: RotaryScheme, geometry: Geometry, rope_set: str) -> bool:
    """Return whether stock transformers computes the frequencies of `scheme` past the original length as well."""
    if not scheme.length_dependent:
        return True
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = module.config
    length = 3 * geometry.original_length
    kind = parameters_of(config, rope_set)["rope_type"]
    stock, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length, layer_type=rope_set or None)
    return torch.allclose(stock, scheme.angles(geometry, torch.tensor([length])).inv_freq, rtol=1e-5, atol=0)


def says(config: Any, values: dict[str, dict[str, Any]]) -> bool:
    """Return whether `config` still says `values` after transformers has standardised it: some models override them."""
    held = {name: parameters_of(config, name) for name in values}
    return all(held[name].get(key) == value for name, given in values.items() for key, value in given.items())


def is_still(module: nn.Module) -> bool:
    """Return whether a rebuilt rotary `module` turns nothing; always so on meta."""
    found: list[Tensor] = [getattr(module, name) for name in inv_freq_names(module)]
    return all(buffer.is_meta or not bool(buffer.any()) for buffer in found)


def running(old: nn.Module, own: Any, config: Any) -> nn.Module | None:
    """Return a new rotary module of the class of `old` for `config`, None where it cannot be built or does not run.

    Args:
        old: a module of the model.
        own: its config: what does not run the probe with this one either is not held against `config`.
        config: the new one.
    """
    try:
        _probe(rebuilt(old, own))
    except Exception:  # code of any model
        return rebuilt(old, config)
    try:
        new = rebuilt(old, config)
        _probe(new)
    except Exception:  # code of any model, written for other rope parameters
        return None
    return new


def _probe(module: nn.Module) -> None:
    wanted = inspect.signature(type(module).forward).parameters
    for name in rope_sets(module):
        given = {"layer_type": name} if "layer_type" in wanted and name else {}
        module(torch.zeros(1, 2, 8, device="cpu"), torch.arange(2, device="cpu")[None], **given)


def same_widths(module: nn.Module, old: nn.Module) -> bool:
    """Return whether two rotary modules turn as many pairs, in each of their sets."""
    widths, before = ({n: getattr(m, n).shape[-1] for n in inv_freq_names(m)} for m in (module, old))
    return widths == before


def keeps(module: nn.Module, old: nn.Module, config: Any, turning: tuple[str, ...]) -> bool:
    """Return whether a rebuilt rotary `module` has in all sets but those that are `turning` what the `old` one has."""
    before = rebuilt(old, config)
    others = [name for name in rope_sets(old) if name not in turning]
    return all(
        torch.equal(getattr(module, buffer_name(name)), getattr(before, buffer_name(name)))
        and factor_of(module, name) == factor_of(before, name)
        for name in others
    )
