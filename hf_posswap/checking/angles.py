"""The angles in a model's rotary modules, held against its config.

Those that rope parameters name come from the papers' formulas in float64: nothing of transformers is called.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.checkpoints.doctor_findings import Finding
from hf_posswap.families.rope_config import buffer_name, factor_of, inv_freq_names, parameters_of, rope_sets
from hf_posswap.rope_math import default_inv_freq
from hf_posswap.schemes.scaled import temperature

_REBUILD = "Set rope_parameters in the config before the model is built: config = AutoConfig.from_pretrained(...), "
_REBUILD += (
    "config.rope_parameters = {...}, from_pretrained(..., config=config). Or call hf_posswap.patch_model, which "
)
_REBUILD += "changes a model that is built."
SCALED = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


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
    def rope(self) -> dict[str, Any]:
        """Its rope parameters; {} where its config has none."""
        whole = getattr(self.config, "rope_parameters", None)
        rope = parameters_of(self.config, self.name) if isinstance(whole, dict) else {}
        return rope if isinstance(rope, dict) else {}

    @property
    def actual(self) -> Tensor:
        """The angles that the model computes with."""
        return getattr(self.module, buffer_name(self.name))

    @property
    def due(self) -> Tensor | None:
        """The angles that the class makes of its config today."""
        return None if self.fresh is None else getattr(self.fresh, buffer_name(self.name), None)

    @property
    def length(self) -> int:
        most = getattr(self.config, "max_position_embeddings", None)
        return most if isinstance(most, int) else 0


def rotary_sets(model: nn.Module) -> list[RotarySet]:
    """Return the sets of angles of all rotary modules in `model`."""
    sets = []
    for path, module in model.named_modules():
        if inv_freq_names(module):
            fresh = _built_anew(module)
            sets += [RotarySet(path, module, name, fresh) for name in rope_sets(module)]
    return sets


def _built_anew(module: Any, rope: Any = None) -> nn.Module | None:
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
            "error", each.where, "its values are no angles (not finite, or all zero, or above 1000): memory that "
            "nothing filled. Angles are not among the saved weights, so to_empty() and load_state_dict() leave them.",
            "Load with from_pretrained, or build the rotary module again from the config.", "angles-nonfinite",
        )  # fmt: skip
    if angles.dtype in (torch.float16, torch.bfloat16) and each.due is not None:
        off = (angles.detach().double().cpu() - each.due.double()).abs().max().item() * each.length
        cast = str(angles.dtype).removeprefix("torch.")
        return Finding(
            "error", each.where, f"the angles were cast to {cast} (model.half(), .bfloat16() or .to(dtype) do that): "
            f"at position {each.length} they are wrong by up to {off:.3g} radians.",
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
        wanted = f"{_rope_text(each.rope)} (theta {_theta_text(due)})" if each.rope else "the config's"
        yield Finding(
            "error", each.where, f"the angles in force are {_described(angles)}, and the config says {wanted}. "
            "transformers computes them once, when the model is built: a later change of the config has no effect.",
            _REBUILD, "angles-differ",
        )  # fmt: skip
        return
    assert each.fresh is not None
    factor, wanted_factor = factor_of(each.module, each.name), factor_of(each.fresh, each.name)
    if abs(factor - wanted_factor) > 1e-4 * abs(wanted_factor) and rope_type_of(each.rope) != "dynamic":
        yield Finding(
            "error", f"{each.path}.attention_scaling", f"cos and sin are multiplied by {factor:.6g}, and the config "
            f"says {wanted_factor:.6g}.", _REBUILD, "attention-factor",
        )  # fmt: skip


def _allowed(each: RotarySet, due: Tensor) -> Iterator[Tensor]:
    """Yield the angles that the config allows: those of every length, where they follow the length."""
    yield due
    if rope_type_of(each.rope) in ("dynamic", "longrope"):
        prefix = f"{each.name}_" if each.name else ""
        reached = int(getattr(each.module, f"{prefix}max_seq_len_cached", 0) or 0)
        for length in (reached, 2**40):
            try:
                yield rope_angles(each.rope, 2 * len(due), each.length, length)[0]
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
    rope_type = rope_type_of(each.rope)
    plain = rope_angles(each.rope | {"rope_type": "default"}, 2 * len(due), each.length)[0]
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
    if due is None or due.dim() != 1 or not each.rope:
        return None
    try:
        return rope_angles(each.rope, 2 * len(due), each.length)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


def own_formula(each: RotarySet) -> str | None:
    """Return why a set's angles were not held against a formula, or None: they were."""
    name = f"{each.where} ({type(each.module).__name__})"
    if each.due is None:
        return f"the angles of {name}: the module cannot be built from its config alone"
    formula = formula_of(each)
    if formula is None:
        return (
            f"the angles of {name} against a formula: it has one of its own for rope type {rope_type_of(each.rope)!r}"
        )
    if not _alike(each.due.double(), formula[0]) and rope_type_of(each.rope) == "default":
        return f"the angles of {name} against a formula: the class has one of its own"
    return None


def _described(angles: Tensor) -> str:
    theta = theta_of(angles)
    return f"those of plain RoPE with theta {theta:g}" if theta else "those of no plain RoPE"


def _theta_text(angles: Tensor) -> str:
    theta = theta_of(angles)
    return "scaled" if theta is None else f"{theta:g}"


def _rope_text(rope: dict[str, Any]) -> str:
    """Return rope parameters in words, without their long lists."""
    shown = {key: value for key, value in rope.items() if not isinstance(value, (list, tuple)) and key != "type"}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def rope_type_of(rope: dict[str, Any]) -> str:
    """Return the rope type of one set of rope parameters."""
    return str(rope.get("rope_type", rope.get("type", "default")))


def rope_angles(rope: dict[str, Any], dim: int, most: int, length: int = 0) -> tuple[Tensor, float]:
    """Return the angles in radians per position, [dim/2] in float64, and the factor on cos and sin.

    Args:
        rope: one set of rope parameters.
        dim: rotated dimensions of a head.
        most: max_position_embeddings.
        length: of the text, in tokens, for dynamic and longrope.

    Raises:
        KeyError, TypeError, ValueError: the parameters are incomplete, or of an unknown type.

    Example:
        >>> rope_angles({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 4, 64)
        (tensor([0.5000, 0.0050], dtype=torch.float64), 1.0)
    """
    kind, theta = rope_type_of(rope), float(rope["rope_theta"])
    plain = default_inv_freq(theta, dim, torch.float64)
    original = rope.get("original_max_position_embeddings") or most
    match kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / rope["factor"], 1.0
        case "proportional":
            turning = int(rope.get("partial_rotary_factor", 1.0) * dim // 2)
            still = torch.arange(dim // 2) >= turning
            return plain.masked_fill(still, 0.0) / (rope.get("factor") or 1.0), 1.0
        case "dynamic":
            growth = rope["factor"] * max(length, most) / most - (rope["factor"] - 1)
            return default_inv_freq(theta * growth ** (dim / (dim - 2)), dim, torch.float64), 1.0
        case "llama3":
            return _llama3(plain, rope, original), 1.0
        case "yarn":
            return _yarn(plain, rope, theta, original, most)
        case "longrope":
            return _longrope(plain, rope, original, most, length)
    raise ValueError(f"no formula for rope type {kind!r}.")


def _llama3(plain: Tensor, rope: dict[str, Any], original: int) -> Tensor:
    """Return the angles of Llama 3.1: slow pairs divided, fast ones kept, a ramp over wavelengths between."""
    slow, fast = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = original * plain / (2 * math.pi)  # in the original length
    ramp = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return plain * (ramp + (1 - ramp) / rope["factor"])


def _yarn(plain: Tensor, rope: dict[str, Any], theta: float, original: int, most: int) -> tuple[Tensor, float]:
    """Return the angles and the factor of YaRN."""
    factor = rope.get("factor") or most / original
    dim = 2 * len(plain)

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = (last - first) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - first) / span).clamp(0, 1)
    angles = plain * (1 - ramp) + plain / factor * ramp
    given, scale, scale_all = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return angles, float(given)
    if scale and scale_all:
        return angles, temperature(factor, scale) / temperature(factor, scale_all)
    return angles, temperature(factor)


def _longrope(plain: Tensor, rope: dict[str, Any], original: int, most: int, length: int) -> tuple[Tensor, float]:
    """Return the angles and the factor of LongRoPE."""
    factors = rope["long_factor" if length > original else "short_factor"]
    if len(factors) != len(plain):
        raise ValueError(f"{len(factors)} factors for {len(plain)} angles.")
    growth, given = rope.get("factor") or most / original, rope.get("attention_factor")
    usual = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    return plain / torch.tensor(factors, dtype=torch.float64), usual if given is None else float(given)


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
