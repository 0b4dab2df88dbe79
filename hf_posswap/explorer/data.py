"""The choices on the page: schemes with their styles, sliders with limits, and initial values of learned schemes.

torch draws those values, so that the page needs them as data.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posswap.geometry import Geometry
from hf_posswap.plotting.styles import scheme_number
from hf_posswap.report.looks import look, shape
from hf_posswap.schemes import SCHEMES, Fire, Kerple, Scheme, T5Bias
from hf_posswap.schemes.common.bias import generator, uniform
from hf_posswap.schemes.learned_bias import buckets


@dataclass(frozen=True)
class Choice:
    """A scheme of the page.

    Attributes:
        name: name on the page.
        group: the group in which it is shown.
        scheme: its name in the registry.
        description: a description, if the registry's summary is not enough.
    """

    name: str
    group: str
    scheme: str
    description: str = ""

    @property
    def summary(self) -> str:
        """A one-line description."""
        return self.description or str(SCHEMES.get(self.scheme).summary)


_TURN, _FAR, _BIAS, _OTHER = "turn by fixed angles", "give far keys other distances", "add a bias", "others"


_BEGINS = "It is learned and drawn at initialization."


_MEMBERS = {
    _TURN: "rope yarn linear ntk llama3 ntk_by_parts dynamic longrope p_rope xpos",
    _FAR: "self_extend rerope leaky_rerope dual_chunk",
    _BIAS: "alibi alibi_interpolated kerple fire t5 t5_random",
    _OTHER: "nope sinusoidal learned learned_interpolated",
}


_VARIANTS = {
    "alibi_interpolated": "alibi",
    "t5_random": "t5",
    "learned_interpolated": "learned",
}


_WORDS = {
    "dynamic": "dynamic NTK: its angles at the length after the swap",
    "longrope": "LongRoPE: its divisors are searched for each model; drawn are some that rise evenly to the factor.",
    "alibi_interpolated": "ALiBi, its distances divided by the factor (interpolation=factor)",
    "kerple": f"KERPLE, log: a penalty on the logarithm of distance, for each head another. {_BEGINS}",
    "fire": f"FIRE: a small network of distance relative to the query's position. {_BEGINS}",
    "t5": "T5's bias: a number for each bucket of distances and head. It is learned and drawn at initialization, 0.",
    "t5_random": "T5's bias with random numbers in its buckets (init_std=1): it shows where the buckets lie.",
    "learned": "a learned table, tiled: its rows repeat. They are drawn as if similar only to themselves.",
    "learned_interpolated": "a learned table, stretched by the factor: new rows are interpolated between old ones, "
    "which are drawn as if similar only to themselves.",
}


_ORDER = (
    "nope rope yarn alibi linear ntk llama3 ntk_by_parts dynamic p_rope xpos self_extend rerope leaky_rerope "
    "dual_chunk alibi_interpolated kerple sinusoidal fire t5 t5_random learned learned_interpolated longrope"
).split()
"""The order of the choices."""


CHOICES = tuple(
    Choice(
        name,
        next(group for group, members in _MEMBERS.items() if name in members.split()),
        _VARIANTS.get(name, name),
        _WORDS.get(name, ""),
    )
    for name in _ORDER
)


GROUPS = (_TURN, _FAR, _BIAS, _OTHER)


FIRST = ("rope", "linear", "yarn", "self_extend", "alibi", "sinusoidal", "learned")
"""Initially selected schemes without a model."""


@dataclass(frozen=True)
class Slider:
    """A number to choose.

    Attributes:
        name: name of the setting.
        label: its label.
        low: the minimum.
        high: the maximum.
        step: step between values.
        first: initial value without a model.
    """

    name: str
    label: str
    low: float
    high: float
    step: float
    first: float


@dataclass(frozen=True)
class Preset:
    """A question that a button asks, with the schemes and numbers that answer it.

    Attributes:
        question: text of the button.
        schemes: that are then chosen.
        settings: the shape of a model of which the question is; a page of a model keeps that model's.
        answer: what the pictures then show.
    """

    question: str
    schemes: tuple[str, ...]
    settings: dict[str, float]
    answer: str


_LLAMA_3: dict[str, float] = {"base": 500_000, "factor": 4, "window": 8192, "heads": 32, "dim": 128}


_GPT_2: dict[str, float] = {"base": 10_000, "factor": 4, "window": 1024, "heads": 12, "dim": 64}


PRESETS = (
    Preset(
        "Why does Llama 3 break beyond 8,192 tokens?",
        ("rope",),
        _LLAMA_3,
        "Its slowest rotary pairs need more than 8,192 tokens for one turn (first picture, above the dashed line). In "
        "training they saw a part of the circle; in longer text they reach angles that no weight has met.",
    ),
    Preset(
        "What does YaRN do?",
        ("rope", "linear", "yarn"),
        _LLAMA_3,
        "YaRN leaves the fast pairs alone, which tell near tokens apart, and slows the pairs that complete no turn by "
        "the factor. Position interpolation (linear) slows all of them, so near tokens look alike.",
    ),
    Preset(
        "How do Self-Extend and ReRoPE work without training?",
        ("rope", "self_extend", "rerope"),
        _LLAMA_3,
        "They give far keys distances that training has seen: Self-Extend counts far tokens in groups, ReRoPE stops "
        "counting at a window. Near keys keep their distances.",
    ),
    Preset(
        "What can replace GPT-2's table?",
        ("learned", "sinusoidal", "rope", "alibi"),
        _GPT_2,
        "A learned table has no rows beyond its window: tiled, its rows repeat. Sinusoids, RoPE and ALiBi are formulas "
        "for every position; ALiBi also lowers the score of far keys.",
    ),
)


SLIDERS = (
    Slider("factor", "length of the text, in windows", 1, 64, 0.25, 4),
    Slider("base", "base (theta)", 100, 10_000_000, 1, 10_000),
    Slider("window", "window: tokens the model was made for", 8, 131_072, 1, 512),
    Slider("heads", "heads", 1, 128, 1, 8),
    Slider("dim", "dimensions of a head", 2, 256, 2, 64),
)


def number_of(choice: Choice) -> int:
    """Return the number of a choice's style, which is that of its scheme in every picture."""
    number = scheme_number(choice.name)
    assert number is not None
    return number


def styles() -> list[dict[str, str]]:
    """Return each choice with its style, for the page's script."""
    return [
        {
            "name": choice.name,
            "title": choice.name,
            "look": look(number),
            "shape": shape(number),
            "words": choice.description,
        }
        for choice, number in zip(CHOICES, map(number_of, CHOICES), strict=True)
    ]


def first_settings(geometry: Geometry | None, length: int | None) -> dict[str, float]:
    """Return the initial values of the sliders.

    Args:
        geometry: geometry of the model, or None.
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
    """Return minimum, maximum and step of each slider, wide enough for `settings`."""
    return {
        slider.name: [
            min(slider.low, settings[slider.name]),
            max(slider.high, settings[slider.name]),
            slider.step,
        ]
        for slider in SLIDERS
    }


def first_schemes(geometry: Geometry | None, scheme: Scheme | None) -> list[str]:
    """Return the initially selected schemes: for a model, its own kind and the requested scheme."""
    if geometry is None:
        return list(FIRST)
    native = ["rope"] if geometry.base is not None else ["sinusoidal"]
    requested = [choice.name for choice in CHOICES if scheme is not None and choice.scheme == scheme.name][:1]
    compared = requested or (["linear", "yarn", "self_extend"] if geometry.base is not None else ["rope", "alibi"])
    return list(dict.fromkeys([*native, *compared]))


def beginnings(heads: int) -> dict[str, object]:
    """Return the random initial values of KERPLE, FIRE and T5's bias for up to `heads` heads, in the order of drawing.

    For fewer heads each uses a prefix: KERPLE two numbers per head, FIRE its hidden layer and then a row and a number
    per head, T5 the table, bucket by bucket.
    """
    kerple, fire, t5 = Kerple(), Fire(), T5Bias()
    table = torch.empty(t5.num_buckets * heads).normal_(generator=generator(t5.seed))
    return {
        "kerple": packed(uniform(0.0, 1.0, (2 * heads,), generator(kerple.seed))),
        "fire": packed(uniform(-1.0, 1.0, (2 * fire.width + (fire.width + 1) * heads,), generator(fire.seed))),
        "t5": packed(table),
        "buckets": buckets(t5.num_buckets, t5.max_distance, causal=True)[t5.max_distance :].tolist(),
    }


def packed(values: Tensor) -> str:
    """Return `values` [N] as the base64 of their float32, little-endian.

    Example:
        >>> packed(torch.tensor([1.0]))
        'AACAPw=='
    """
    return base64.b64encode(values.float().numpy().astype("<f4").tobytes()).decode("ascii")
