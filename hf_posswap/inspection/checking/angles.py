"""The angles in a model's rotary modules, held against its config.

What rope parameters mean comes from the papers' formulas: `RopeSettings.angles`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.checkpoints.doctor_findings import Finding
from hf_posswap.families.rope_config import (
    SCALED,
    RopeSettings,
    buffer_name,
    factor_of,
    inv_freq_names,
    rope_sets,
    rope_settings,
)
from hf_posswap.rope_math import default_inv_freq

_REBUILD = "Set rope_parameters in the config before the model is built: config = AutoConfig.from_pretrained(...), "
_REBUILD += (
    "config.rope_parameters = {...}, from_pretrained(..., config=config). Or call hf_posswap.patch_model, which "
)
_REBUILD += "changes a model that is built."


@dataclass(frozen=True)
class RotarySet:
    """One set of angles of a model.

    Attributes:
        path: of the rotary module.
        module: that module.
        name: of the set: a type of layers, or "".
        fresh: the same module, built anew from its config; None where it has none, or cannot be built alone.
    """

    path: str
    module: nn.Module
    name: str
    fresh: nn.Module | None

    @property
    def where(self) -> str:
        return f"{self.path}.{buffer_name(self.name)}".lstrip(".")

    @property
    def config(self) -> Any:
        return getattr(self.module, "config", None)

    @property
    def rope(self) -> RopeSettings:
        """Its rope parameters; without values where its config has none."""
        most = getattr(self.config, "max_position_embeddings", None)
        none = RopeSettings({}, self.name, most if isinstance(most, int) else 0)
        return next((each for each in rope_settings(self.config) if each.layer_type == self.name), none)

    @property
    def actual(self) -> Tensor:
        """The angles that the model computes with."""
        return getattr(self.module, buffer_name(self.name))

    @property
    def due(self) -> Tensor | None:
        """The angles that the class makes of its config today."""
        return None if self.fresh is None else getattr(self.fresh, buffer_name(self.name), None)


def rotary_sets(model: nn.Module) -> list[RotarySet]:
    """Return the sets of angles of all rotary modules in `model`."""
    sets = []
    for path, module in model.named_modules():
        if inv_freq_names(module):
            fresh = _built_anew(module)
            sets += [RotarySet(path, module, name, fresh) for name in rope_sets(module)]
    return sets


def _built_anew(module: nn.Module, rope: object = None) -> nn.Module | None:
    """Return a rotary module of the same class and config, on the CPU; None: it needs more than a config.

    Args:
        module: the rotary module.
        rope: other rope parameters for the config; None: its own.
    """
    config = getattr(module, "config", None)
    if config is None:
        return None
    config = copy.deepcopy(config)
    if rope is not None:
        config.rope_parameters = rope
    try:
        with torch.device("cpu"):
            return type(module)(config)
    except Exception:  # a class may ask for more than a config; null settings raise what they like
        return None


def angle_findings(sets: list[RotarySet], *, is_skeleton: bool) -> Iterator[Finding]:
    """Yield where the angles of a model are not those of its config.

    Args:
        sets: as `rotary_sets` returns them.
        is_skeleton: whether the whole model is on the meta device, so that only its classes and config are checked.
    """
    for each in sets:
        problem = None if is_skeleton else _of_buffer(each)
        if problem is not None:
            yield problem
            continue
        if not is_skeleton:
            yield from _of_config(each)
        yield from _of_formula(each)


def _of_buffer(each: RotarySet) -> Finding | None:
    """Return what is wrong with the tensor itself, or None."""
    angles = each.actual
    if angles.is_meta:
        return Finding(
            "error", each.where, "it is on the meta device: there are no angles.",
            "Load with from_pretrained, which fills them, or build the module on the CPU and load the state dict then.",
            "angles-missing",
        )  # fmt: skip
    is_unset = not bool(angles.any()) and (each.due is None or bool(each.due.any()))  # without positions, all are zero
    if not bool(torch.isfinite(angles).all()) or float(angles.abs().max()) > 1e3 or is_unset:
        return Finding(
            "error", each.where, "its values are not angles (not finite, or all zero, or above 1000): memory that "
            "nothing filled. Angles are not among the saved weights, so to_empty() and load_state_dict() leave them.",
            "Load with from_pretrained, or build the rotary module again from the config.", "angles-nonfinite",
        )  # fmt: skip
    if angles.dtype in (torch.float16, torch.bfloat16) and each.due is not None:
        off = (angles.detach().double().cpu() - each.due.double()).abs().max().item() * each.rope.length
        cast = str(angles.dtype).removeprefix("torch.")
        return Finding(
            "error", each.where, f"the angles were cast to {cast} (model.half(), .bfloat16() or .to(dtype) do that): "
            f"at position {each.rope.length} they are wrong by up to {off:.3g} radians.",
            f"Load with from_pretrained(..., dtype=torch.{cast}), which leaves them in float32.", "angles-rounded",
        )  # fmt: skip
    return None


def _of_config(each: RotarySet) -> Iterator[Finding]:
    """Yield where angles and factor are not what the class makes of its config today."""
    angles, due = each.actual.detach().double().cpu(), each.due
    if due is None:
        return
    due = due.double()
    if angles.shape != due.shape or not any(_alike(angles, other) for other in _allowed(each, due)):
        theta = theta_of(due)
        shown = "scaled" if theta is None else f"{theta:g}"
        wanted = f"{_rope_text(each.rope)} (theta {shown})" if each.rope.values else "the config's"
        yield Finding(
            "error", each.where, f"the angles in force are {_described(angles)}, and the config says {wanted}. "
            "transformers computes them once, when the model is built: a later change of the config has no effect.",
            _REBUILD, "angles-differ",
        )  # fmt: skip
        return
    assert each.fresh is not None
    factor, wanted_factor = factor_of(each.module, each.name), factor_of(each.fresh, each.name)
    if abs(factor - wanted_factor) > 1e-4 * abs(wanted_factor) and each.rope.rope_type != "dynamic":
        yield Finding(
            "error", f"{each.path}.attention_scaling", f"cos and sin are multiplied by {factor:.6g}, and the config "
            f"says {wanted_factor:.6g}.", _REBUILD, "attention-factor",
        )  # fmt: skip


def _allowed(each: RotarySet, due: Tensor) -> Iterator[Tensor]:
    """Yield the angles that the config allows: those of every length, where they follow the length."""
    yield due
    if each.rope.follows_length:
        prefix = f"{each.name}_" if each.name else ""
        reached = int(getattr(each.module, f"{prefix}max_seq_len_cached", 0) or 0)
        for length in (reached, 2**40):
            try:
                yield each.rope.angles(2 * len(due), length)
            except (KeyError, TypeError, ValueError, ArithmeticError):
                return


def _alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second.double(), rtol=1e-4, atol=1e-12)


def _of_formula(each: RotarySet) -> Iterator[Finding]:
    """Yield where the class makes something else of its rope parameters than their formula."""
    formula, due = formula_of(each), each.due
    if formula is None or due is None:
        return
    angles, factor = formula
    due = due.double()
    if _alike(due, angles):
        applied = factor_of(each.fresh, each.name) if each.fresh is not None else factor
        if abs(applied - factor) > 1e-4 * factor:
            yield Finding(
                "error", each.where, f"{type(each.module).__name__} multiplies cos and sin by {applied:.6g}, and "
                f"{_rope_text(each.rope)} means {factor:.6g}.", "Write attention_factor itself.", "attention-factor",
            )  # fmt: skip
        return
    rope_type = each.rope.rope_type
    plain = RopeSettings({"rope_theta": each.rope.values["rope_theta"]}).angles(2 * len(due))
    if rope_type in SCALED and _alike(due, plain):
        yield Finding(
            "error", each.where, f"{type(each.module).__name__} does not read rope type {rope_type!r}: its angles are "
            "those of plain RoPE.", "Use a class that applies it, or hf_posswap.patch_model.", "scaling-ignored",
        )  # fmt: skip
    elif _same_whatever_theta(each, due):
        yield Finding(
            "error", each.where, f"{type(each.module).__name__} does not read rope_theta: its angles are "
            f"{_described(due)}.", "Use a class that applies it, or hf_posswap.patch_model.", "theta-ignored",
        )  # fmt: skip
    elif rope_type in SCALED and not hasattr(each.module, f"compute_{rope_type}_rope_parameters"):
        yield Finding(
            "error", each.where, f"the angles of {type(each.module).__name__} differ from the formula of rope type "
            f"{rope_type!r} by up to {float((due - angles).abs().max() / angles.abs().max()):.2g} of the fastest.",
            "Compare with hf_posswap.patch_model(model, config.rope_parameters), and report it to transformers.",
            "angles-formula",
        )  # fmt: skip


def _same_whatever_theta(each: RotarySet, due: Tensor) -> bool:
    """Return whether the class makes the same angles of another theta."""
    parameters = copy.deepcopy(each.config.rope_parameters)
    inner = parameters[each.name] if each.name else parameters
    inner["rope_theta"] = 7.0 * inner["rope_theta"]
    other = _built_anew(each.module, parameters)
    angles = None if other is None else getattr(other, buffer_name(each.name), None)
    return angles is not None and _alike(due, angles)


def formula_of(each: RotarySet) -> tuple[Tensor, float] | None:
    """Return what the formula of the set's rope parameters gives; None: it has none, or one of its class alone."""
    due = each.due
    if due is None or due.dim() != 1 or not each.rope.values:
        return None
    try:
        return each.rope.angles(2 * len(due)), each.rope.attention_factor
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


def own_formula(each: RotarySet) -> str | None:
    """Return why a set's angles were not held against a formula, or None: they were."""
    name = f"{each.where} ({type(each.module).__name__})"
    if each.due is None:
        return f"the angles of {name}: the module cannot be built from its config alone"
    formula = formula_of(each)
    if formula is None:
        return f"the angles of {name} against a formula: it has one of its own for rope type {each.rope.rope_type!r}"
    if not _alike(each.due.double(), formula[0]) and each.rope.rope_type == "default":
        return f"the angles of {name} against a formula: the class has one of its own"
    return None


def _described(angles: Tensor) -> str:
    theta = theta_of(angles)
    return f"those of plain RoPE with theta {theta:g}" if theta else "those of no plain RoPE"


def _rope_text(rope: RopeSettings) -> str:
    """Return rope parameters in words, without their long lists."""
    shown = {key: value for key, value in rope.values.items() if not isinstance(value, (list, tuple)) and key != "type"}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def theta_of(angles: Tensor) -> float | None:
    """Return the theta whose plain angles these are; None: they are those of no theta.

    Example:
        >>> theta_of(default_inv_freq(500000.0, 8))
        500000.0
    """
    angles = angles.detach().double().cpu()
    pairs = len(angles)
    if pairs < 2 or not bool(torch.isfinite(angles).all()) or float(angles.min()) <= 0:
        return None
    theta = float((angles[0] / angles[1]) ** pairs)
    if not (1 < theta < 1e30) or not torch.allclose(
        angles, default_inv_freq(theta, 2 * pairs, torch.float64), rtol=1e-3
    ):
        return None
    return float(f"{theta:.4g}")
