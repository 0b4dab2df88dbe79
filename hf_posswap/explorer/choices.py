"""What can be chosen on the page: schemes, with the look of each, and sliders, with their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_posswap.geometry import Geometry
from hf_posswap.report.looks import look, shape
from hf_posswap.schemes import SCHEMES, Scheme


@dataclass(frozen=True)
class Choice:
    """A scheme of the page.

    Attributes:
        name: on the page.
        scheme: its name in the registry.
        group: which it is shown in.
        fields: of the scheme, that differ from its own.
        words: about it, where the registry's summary does not say all.
    """

    name: str
    scheme: str
    group: str
    fields: tuple[tuple[str, Any], ...] = ()
    words: str = ""

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        return self.words or str(SCHEMES.get(self.scheme).summary)


_TURN, _FAR, _BIAS, _OTHER = "turn by fixed angles", "give far keys other distances", "add a bias", "others"
CHOICES = (
    Choice("nope", "nope", _OTHER),
    Choice("rope", "rope", _TURN),
    Choice("yarn", "yarn", _TURN),
    Choice("alibi", "alibi", _BIAS),
    Choice("linear", "linear", _TURN),
    Choice("ntk", "ntk", _TURN),
    Choice("llama3", "llama3", _TURN),
    Choice("ntk_by_parts", "ntk_by_parts", _TURN),
    Choice("dynamic", "dynamic", _TURN, words="dynamic NTK: its angles at the length after the swap"),
    Choice("p_rope", "p_rope", _TURN),
    Choice("xpos", "xpos", _TURN),
    Choice("self_extend", "self_extend", _FAR),
    Choice("rerope", "rerope", _FAR),
    Choice("leaky_rerope", "leaky_rerope", _FAR),
    Choice("dual_chunk", "dual_chunk", _FAR),
    Choice(
        "alibi_interpolated", "alibi", _BIAS, words="ALiBi, its distances divided by the factor (interpolation=factor)"
    ),
    Choice("kerple", "kerple", _BIAS, words="KERPLE, log: r1 and r2 are learned for each head; here 1 and 0.5 for all"),
    Choice("sinusoidal", "sinusoidal", _OTHER),
)
"""In the order of their looks: those that are often drawn together have colours far apart."""
GROUPS = (_TURN, _FAR, _BIAS, _OTHER)
FIRST = ("rope", "linear", "yarn", "self_extend", "alibi", "sinusoidal")
"""Chosen at first, where no model is asked about."""


@dataclass(frozen=True)
class Slider:
    """A number to choose.

    Attributes:
        name: of the setting.
        words: beside it.
        low: the least.
        high: the most.
        step: between values.
        first: at first, where no model is asked about.
    """

    name: str
    words: str
    low: float
    high: float
    step: float
    first: float


SLIDERS = (
    Slider("base", "base (theta)", 100, 10_000_000, 1, 10_000),
    Slider("factor", "factor: length after the swap, in windows", 1, 64, 0.25, 4),
    Slider("window", "window: tokens the model was made for", 8, 131_072, 1, 512),
    Slider("heads", "heads", 1, 128, 1, 8),
    Slider("dim", "dimensions of a head", 2, 256, 2, 64),
)


def styles() -> list[dict[str, str]]:
    """Return each choice with its look, as the page's script takes it."""
    return [
        {"name": choice.name, "title": choice.name, "look": look(number), "shape": str(shape(number))}
        for number, choice in enumerate(CHOICES)
    ]


def first_settings(geometry: Geometry | None, length: int | None) -> dict[str, float]:
    """Return what the sliders show at first.

    Args:
        geometry: of the model that is asked about, or None.
        length: tokens after the swap; None: four windows.
    """
    if geometry is None:
        return {slider.name: slider.first for slider in SLIDERS}
    window = geometry.original_length
    return {
        "base": geometry.base or 10_000,
        "factor": max(1.0, (length or 4 * window) / window),
        "window": window,
        "heads": geometry.num_heads,
        "dim": (geometry.rotary_dim or geometry.head_dim) // 2 * 2 or 2,
    }


def limits(settings: dict[str, float]) -> dict[str, list[float]]:
    """Return least, most and step of each slider, wide enough for `settings`."""
    return {
        slider.name: [
            min(slider.low, settings[slider.name]),
            max(slider.high, settings[slider.name]),
            slider.step,
        ]
        for slider in SLIDERS
    }


def first_schemes(geometry: Geometry | None, scheme: Scheme | None) -> list[str]:
    """Return the names that are chosen at first: of a model, its own kind and the scheme that is asked about."""
    if geometry is None:
        return list(FIRST)
    own = ["rope"] if geometry.base is not None else ["sinusoidal"]
    asked = [choice.name for choice in CHOICES if scheme is not None and choice.scheme == scheme.name][:1]
    beside = asked or (["linear", "yarn", "self_extend"] if geometry.base is not None else ["rope", "alibi"])
    return list(dict.fromkeys([*own, *beside]))
