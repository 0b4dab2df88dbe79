"""Ways to extend a model's length: schemes without training, and recipes, by kind of model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_posswap.families.rope_config import rope_settings
from hf_posswap.inspection.advice.case import Case, Kind


@dataclass(frozen=True)
class Candidate:
    """One way to extend the length.

    Attributes:
        subject: subject of its figures.
        title: description.
        scheme: returns the scheme for a case, as typed in a command.
        recipe: the training recipe; None: no training.
        swap: returns the recipe keys that configure the swap for a case.
        windows: training length in windows of the base; None: the whole length.
        plan: scheme to plan with if `scheme` needs the weights' values.
        fitted: the Python calls of a fit before the swap, which no command provides; "" without a fit.
    """

    subject: str
    title: str
    scheme: Callable[[Case], str]
    recipe: str | None = None
    swap: Callable[[Case], tuple[str, ...]] = lambda case: ()
    windows: int | None = None
    plan: str | None = None
    fitted: str = ""


def _named(name: str) -> Callable[[Case], str]:
    return lambda case: name


def _scaled(name: str) -> Callable[[Case], str]:
    return lambda case: f"{name}:factor={case.factor}"


def _factor(case: Case) -> tuple[str, ...]:
    return (f"swap.scheme.factor={case.factor}",)


def _length(case: Case) -> tuple[str, ...]:
    return (f"swap.max_length={case.length}",)


_BASE = 500_000
"""The base of the recipes `abf` and `rope-to-abf`."""


def _larger_base(case: Case) -> int:
    """Return the base to swap to: that of the recipe, or by NTK-aware scaling for a model whose base is not smaller.

    NTK-aware scaling multiplies the base by factor^(d / (d - 2)): https://arxiv.org/abs/2309.00071, section 3.1.
    """
    sets = rope_settings(case.model.config.get_text_config())
    base = max((float(each.values["rope_theta"]) for each in sets if each.values.get("rope_theta")), default=0.0)
    if base < _BASE:
        return _BASE
    dims = case.report.geometry.rotary_dim or case.report.geometry.head_dim
    return int(float(f"{base * case.windows ** (dims / max(dims - 2, 1)):.1e}"))


def _with_larger_base(case: Case) -> str:
    return f"rope:base={_larger_base(case)}"


def _base_and_length(case: Case) -> tuple[str, ...]:
    base = _larger_base(case)
    return (*((f"swap.scheme.base={base}",) if base != _BASE else ()), *_length(case))


_ROPE = (
    *(
        Candidate(name, f"{name} without training", _scaled(name))
        for name in ("yarn", "ntk_by_parts", "ntk", "linear", "dynamic")
    ),
    Candidate(
        "dynamic-by-query",
        "dynamic that follows each token's own past, without training",
        lambda case: f"dynamic:factor={case.factor},follow=query",
    ),
    *(Candidate(name, f"{name} without training", _named(name)) for name in ("self_extend", "rerope", "dual_chunk")),
    Candidate("yarn", "YaRN, trained at the new length", _scaled("yarn"), "yarn", _factor),
    Candidate(
        "rope-to-yarn",
        "YaRN, trained with the base's sliding window as teacher of every layer",
        _scaled("yarn"),
        "rope-to-yarn",
        _factor,
        windows=8,
    ),
    Candidate(
        "rope-to-abf",
        "RoPE with a larger base, trained with the model's sliding window as teacher of every layer",
        _with_larger_base,
        "rope-to-abf",
        _base_and_length,
        windows=8,
    ),
    Candidate("abf", "RoPE with a larger base, trained at the new length", _with_larger_base, "abf", _base_and_length),
    Candidate("linear", "linear interpolation, trained at the new length", _scaled("linear"), "linear", _factor),
    Candidate(
        "pose", "linear interpolation, trained on short windows (PoSE)", _scaled("linear"), "pose", _factor, windows=1
    ),
)
_FITTED = "fit_bias after centre_table, from Python"
_LEARNED = (
    Candidate("t5, fitted", "T5's bias fitted to the table, without training", _named("t5"), fitted=_FITTED),
    Candidate("alibi, fitted", "ALiBi fitted to the table, without training", _named("alibi"), fitted=_FITTED),
    Candidate(
        "rope, fitted",
        "RoPE in half of each head fitted to the table, without training",
        _named("rope:partial=0.5"),
        fitted="fit_rotation after the swap, from Python",
    ),
    Candidate("learned, tiled", "the table repeated, without training", _named("learned:extend=tile")),
    Candidate(
        "sinusoidal, ridge 100",
        "sinusoids fitted to the table, without training",
        _named("sinusoidal:ridge=100"),
        plan="sinusoidal:scale=1",
    ),
    Candidate(
        "learned-to-rope",
        "RoPE in half of each head, fitted and trained with the base as teacher",
        _named("rope:partial=0.5"),
        "learned-to-rope",
        _length,
        windows=8,
    ),
    Candidate(
        "to-alibi",
        "ALiBi with learned slopes, fitted and trained with the base as teacher",
        _named("alibi:learned=true"),
        "to-alibi",
        _length,
        windows=8,
    ),
    Candidate(
        "learned-to-t5",
        "T5's bias, fitted and trained with the base as teacher",
        _named("t5"),
        "learned-to-t5",
        _length,
        windows=8,
    ),
    Candidate(
        "learned-to-sinusoidal",
        "a sinusoidal table, fitted and trained with the base as teacher",
        _named("sinusoidal:ridge=100"),
        "learned-to-sinusoidal",
        _length,
        windows=8,
        plan="sinusoidal:scale=1",
    ),
)
_ENCODER = (
    Candidate("encoder-mlm", "RoPE, trained on masked tokens", _named("rope"), "encoder-mlm", _length, windows=1),
    Candidate(
        "embedding",
        "RoPE, trained to keep the vectors of the unswapped encoder",
        _named("rope"),
        "embedding",
        _length,
        windows=1,
    ),
)
CANDIDATES: dict[Kind, tuple[Candidate, ...]] = {
    "learned": _LEARNED,
    "rope": _ROPE,
    "encoder": _ENCODER,
    "unlimited": (),
    "other": (),
}
"""Candidates by kind of model; their order is determined by the figures."""
