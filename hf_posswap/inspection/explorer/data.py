"""The data of the page: for each scheme, shape and length of text the numbers that its pictures draw.

The mechanisms themselves compute them, through `hf_posswap.plotting.positions.numbers`; the browser only draws them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posswap.errors import PosswapError
from hf_posswap.geometry import Geometry
from hf_posswap.plotting.positions import numbers
from hf_posswap.plotting.positions.numbers import Shown, sample_geometry, shown
from hf_posswap.plotting.styles import distinct_numbers, scheme_number
from hf_posswap.schemes import SCHEMES, Scheme, make_scheme
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.testing.twin import isolated
from hf_posswap.utils.result_views import brief

FACTORS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Lengths of the text, in windows."""
GROUPS = ("turn by angles", "give far keys other distances", "add a bias", "others")


@dataclass(frozen=True)
class Shape:
    """A shape of models to draw in.

    Attributes:
        name: name on the page.
        geometry: the shape.
    """

    name: str
    geometry: Geometry


SMALL, LLAMA_3, GPT_2 = "a small model", "Llama 3 8B", "GPT-2"
SHAPES = (
    Shape(SMALL, sample_geometry()),
    Shape(LLAMA_3, dataclasses.replace(sample_geometry(32, 128, 8192, 500_000.0), num_kv_heads=8, num_layers=32)),
    Shape(GPT_2, Geometry(768, 12, 12, head_dim=64, num_layers=12, original_length=1024, causal=True)),
)
"""The shapes of a page without a model, the first of them initially."""


@dataclass(frozen=True)
class Preset:
    """A question that a button asks, with the schemes and the shape that answer it.

    Attributes:
        question: text of the button.
        schemes: that are then selected.
        shape: name of the shape that the question is about; a page of a model keeps that model's.
        answer: what the pictures then show.
    """

    question: str
    schemes: tuple[str, ...]
    shape: str
    answer: str


PRESETS = (
    Preset(
        "Why does Llama 3 break beyond 8,192 tokens?",
        ("rope",),
        LLAMA_3,
        "Its slowest rotary pairs need more than 8,192 tokens for one turn (first picture, above the dashed line). In "
        "training they saw a part of the circle; in longer text they reach angles that no weight has met.",
    ),
    Preset(
        "What does YaRN do?",
        ("rope", "linear", "yarn"),
        LLAMA_3,
        "YaRN leaves the fast pairs alone, which tell near tokens apart, and slows the pairs that complete no turn by "
        "the factor. Position interpolation (linear) slows all of them, so near tokens look alike.",
    ),
    Preset(
        "How do Self-Extend and ReRoPE work without training?",
        ("rope", "self_extend", "rerope"),
        LLAMA_3,
        "They give far keys distances that training has seen: Self-Extend counts far tokens in groups, ReRoPE stops "
        "counting at a window. Near keys keep their distances.",
    ),
    Preset(
        "What can replace GPT-2's table?",
        ("learned", "sinusoidal", "rope", "alibi"),
        GPT_2,
        "A learned table has no rows beyond its window: tiled, its rows repeat. Sinusoids, RoPE and ALiBi are formulas "
        "for every position; ALiBi also lowers the score of far keys.",
    ),
)
FIRST = ("rope", "linear", "yarn", "self_extend", "alibi", "sinusoidal", "learned")
"""Initially selected schemes without a model."""
ROTARY, OTHER = ("rope", "linear", "yarn", "self_extend"), ("sinusoidal", "rope", "alibi")
"""Initially selected schemes for a model that rotates queries and keys, and for another; the first is its own kind."""

Options = Callable[[float, Geometry], dict[str, object]]
_VARIANTS: dict[str, tuple[str, Options, str]] = {
    "alibi_interpolated": ("alibi", lambda factor, _: {"interpolation": factor}, "its distances divided by the factor"),
    "t5_random": ("t5", lambda *_: {"init_std": 1.0}, "with random numbers, which show where its buckets lie"),
    "learned_interpolated": ("learned", lambda *_: {"extend": "interpolate"}, "new rows between the old ones"),
    "longrope": (
        "longrope",
        lambda factor, shape: {
            "long_factor": torch.linspace(1, factor, (shape.rotary_dim or shape.head_dim) // 2).tolist()
        },
        "with divisors that rise evenly to the factor; a search finds those of a model",
    ),
}
"""Choices that are a scheme with options: its name, the options by factor and shape, and their description."""


@dataclass
class Choice:
    """A scheme of the page.

    Attributes:
        name: name on the page.
        number: the number of its style.
        scheme: the scheme; its name in the registry stands for the class with its defaults.
        summary: a one-line description.
        group: one of `GROUPS`, by what its mechanism does where it is first drawn; None: it is nowhere drawn.
        sentences: how it is drawn, each once.
        reason: why it is not drawn where it was refused last.
    """

    name: str
    number: int
    scheme: Scheme | str
    summary: str
    group: str | None = None
    sentences: dict[str, None] = dataclasses.field(default_factory=dict)
    reason: str = ""


def known_choices(requested: Scheme | None = None) -> list[Choice]:
    """Return a choice for `requested`, for every registered scheme, and for the variants, in the order of their styles.

    Args:
        requested: a scheme to draw with its own options, or None.

    Example:
        >>> [choice.name for choice in known_choices()][:4]
        ['rope', 'alibi', 'yarn', 'ntk']
    """
    schemes: dict[str, Scheme | str] = {} if requested is None else {label(requested): requested}
    for name in (*dict(SCHEMES.items()), *_VARIANTS):
        schemes[name] = _VARIANTS[name][0] if name in _VARIANTS else name
    numbers_of = distinct_numbers([scheme_number(name.partition(":")[0]) for name in schemes])
    choices = []
    for (name, scheme), number in zip(schemes.items(), numbers_of, strict=True):
        summary = SCHEMES.get(scheme).summary if isinstance(scheme, str) else str(scheme)
        choices.append(Choice(name, number, scheme, str(summary)))
        if name in _VARIANTS:
            choices[-1].sentences[f"{scheme}, {_VARIANTS[name][2]}."] = None
    return sorted(choices, key=lambda choice: choice.number)


def label(scheme: Scheme) -> str:
    """Return the name of a scheme on the page, with the options that are not its defaults.

    Example:
        >>> [label(make_scheme(text)) for text in ("yarn", "yarn:factor=4,beta_fast=16", "rope + alibi")]
        ['yarn', 'yarn:factor=4,beta_fast=16', 'rope + alibi']
    """
    if scheme.kind == "mixed":
        return str(scheme)
    values = {field.name: getattr(scheme, field.name) for field in dataclasses.fields(scheme)}
    defaults = {field.name: field.default for field in dataclasses.fields(scheme)}
    options = [
        f"{name}={value if isinstance(value, str) else brief(value)}"
        for name, value in values.items()
        if value != defaults[name]
    ]
    return f"{scheme.name}:{','.join(options)}" if options else scheme.name


def page_data(
    shapes: Sequence[Shape], requested: Scheme | None = None, length: int | None = None
) -> tuple[dict[str, object], list[Choice]]:
    """Return the data of the page's script, as JSON has it, and the choices.

    Args:
        shapes: the shapes to draw in.
        requested: a scheme to draw with its own options, or None.
        length: a further length of the text to draw, in tokens; None: none but `FACTORS`.

    Returns:
        `shapes`: each with its numbers and `steps`, which have for each choice its pictures, as an index into `pool`
        and a sentence, or why it is `refused`; and `pool`: the numbers of pictures, each once.
    """
    choices, pool = known_choices(requested), dict[str, int]()
    drawn_shapes = []
    for shape in shapes:
        geometry = shape.geometry
        window = geometry.original_length
        lengths = {round(window * factor): float(factor) for factor in FACTORS}
        if length is not None and length > window:
            lengths.setdefault(length, length / window)
        steps = []
        for tokens, factor in sorted(lengths.items()):
            with isolated():
                drawn = {choice.name: _drawn(choice, geometry, factor, pool) for choice in choices}
            steps.append({"factor": factor, "length": tokens, "drawn": drawn})
        facts = {"window": window, "heads": geometry.num_heads, "dim": geometry.head_dim, "base": geometry.base}
        drawn_shapes.append({"name": shape.name, **facts, "steps": steps})
    return {"shapes": drawn_shapes, "pool": [json.loads(text) for text in pool]}, choices


def _drawn(choice: Choice, geometry: Geometry, factor: float, pool: dict[str, int]) -> dict[str, object]:
    """Return a choice's label and pictures at one length, or why it is refused."""
    pictures = {}
    try:
        subject = _resolved(choice, geometry, factor)
        for takes, numbers_of in PICTURES:
            for name, (value, sentence) in numbers_of(subject).items() if takes(subject) else ():
                text = json.dumps(value, allow_nan=False, ensure_ascii=False)
                pictures[name] = [pool.setdefault(text, len(pool)), sentence]
        group = 1 if subject.splits else 0 if subject.rotates else 2 if subject.scheme.kind == "bias" else 3
        begins = numbers.as_it_begins(subject).strip(" ()")
    except Exception as error:  # arbitrary code of a registered scheme
        registered = choice.scheme if isinstance(choice.scheme, str) else choice.scheme.name
        unforeseen = "" if isinstance(error, PosswapError) else f"{type(error).__name__}: "
        choice.reason = f"{unforeseen}{error}".removeprefix(f"{registered}: ").removeprefix(f"{registered} ")
        return {"refused": choice.reason}
    choice.group = choice.group or GROUPS[group]
    if begins:
        choice.sentences[f"{begins.capitalize()}."] = None
    if getattr(subject.scheme, "length_dependent", False):
        choice.sentences["Its angles are those at the length after the swap."] = None
    return {"name": subject.name, "pictures": pictures}


def _resolved(choice: Choice, geometry: Geometry, factor: float) -> Shown:
    """Return the scheme in a shape: with its example options if it needs options there, or combines other schemes."""
    given = _VARIANTS[choice.name][1](factor, geometry) if choice.name in _VARIANTS else {}
    attempts = [given]
    if isinstance(choice.scheme, str) and (examples := SCHEMES.get(choice.scheme).stand_ins(geometry)):
        attempts.append(given | examples)
        if SCHEMES.get(choice.scheme).kind == "mixed":  # a combination of schemes is best shown by its example
            attempts.reverse()
    refused: PosswapError | None = None
    for options in attempts:
        try:
            scheme = make_scheme(choice.scheme, **options)
            subject = shown(scheme, geometry, factor=factor)
        except PosswapError as error:
            refused = refused or error
            continue
        if scheme.kind == "mixed" or refused is not None:
            mechanism = subject.scheme.mechanism(geometry) if subject.scheme.acts_inside else None
            layers = "" if mechanism is None or mechanism.for_layer(0) is mechanism else ", in the first layer"
            choice.sentences[f"Drawn as {scheme}{layers}."] = None
        return dataclasses.replace(subject, name=subject.name.replace(subject.scheme.name, choice.name, 1))
    assert refused is not None
    raise refused


_ROWS, _COLUMNS = 128, 128
"""Of a position table."""
_TURNS = 24
"""Positions at which a rotary pair is drawn."""
_FLOOR = -30.0
"""A bias at which a key has no weight."""
_LEVELS = 255
"""Colours of a map."""
_NOTHING = " "
"""A cell of a map without a number, as in the future."""
_FIRST_LEVEL = 0x100
"""The character of the lowest number of a map."""
Drawn = dict[str, tuple[object, str]]
"""Pictures by name: the numbers, and a sentence about them."""


def _plain(values: Tensor, digits: int = 5) -> list[float | None]:
    """Return numbers as JSON data, with `digits` significant digits: NaN and infinity become None."""
    rounded = [float(f"{value:z.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]
    return [int(value) if value is not None and value.is_integer() else value for value in rounded]


def _map(values: Tensor, low: float, high: float) -> dict[str, object]:
    """Return a map [N, M] as the browser draws it: a character for each cell, in `_LEVELS` steps from low to high."""
    share = (values.double() - low) / ((high - low) or 1.0)
    levels = (share.nan_to_num(0.0).clamp(0, 1) * (_LEVELS - 1)).round().long() + _FIRST_LEVEL
    codes = levels.masked_fill(values.isnan(), ord(_NOTHING))
    ends = _plain(torch.tensor([low, high], dtype=torch.float64), 6)
    cells = codes.to(torch.int32).numpy().astype("<u4").tobytes().decode("utf-32-le")
    return {"low": ends[0], "high": ends[1], "columns": values.shape[1], "cells": cells}


def _scores(subject: Shown) -> Drawn:
    ends = [0, min(subject.geometry.original_length, subject.length) - 1, subject.length - 1]
    distances = torch.cat((numbers.spread_distances(subject.length), torch.tensor(ends))).unique()
    scores = numbers.scores_by_distance(subject, distances)  # [H, N]
    value: dict[str, object] = {"distances": distances.tolist(), "mean": _plain(scores.mean(0))}
    if bool((scores.amax(0) > scores.amin(0)).any()):
        value |= {"low": _plain(scores.amin(0)), "high": _plain(scores.amax(0))}
    at = torch.searchsorted(distances, torch.tensor(ends))
    means = zip(scores.mean(0)[at].tolist(), ends, strict=True)
    return {"scores": (value, ", ".join(f"{mean:z.2f} at {end}" for mean, end in means))}


def _relative(subject: Shown) -> Drawn:
    places = numbers.places(subject.length)
    distances = numbers.apparent_distances(subject, places, places)
    farthest = float(distances.nan_to_num(0).max())
    value = _map(distances, 0.0, farthest) | {"last": subject.length - 1}
    return {"relative": (value, f"the farthest seems {farthest:,.0f} tokens away, of {subject.length - 1}")}


def _bias(subject: Shown) -> Drawn:
    places = numbers.places(subject.length)
    biases = numbers.scores(subject, places, places, query=torch.zeros(subject.geometry.head_dim))  # [H, N, N]
    heads = sorted({0, len(biases) // 2, len(biases) - 1})
    seen = biases[heads][~biases[heads].isnan()]
    least, most = float(seen.min()), float(seen.max())
    low = max(least, _FLOOR) - (least == most)  # a colour scale needs two different ends
    maps = [_map(biases[head], low, most) for head in heads]
    value = {"heads": heads, "maps": maps}
    return {"bias": (value, f"from {least:z.4g} to {most:z.4g} in the heads shown")}


def _rotation(subject: Shown) -> Drawn:
    scheme, geometry, window = subject.scheme, subject.geometry, subject.geometry.original_length
    assert isinstance(scheme, RotaryScheme)
    angles = scheme.angles(geometry, torch.tensor([subject.length]) if scheme.length_dependent else None)
    tokens = numbers.wavelengths(subject)
    never, still = (int((tokens > length).sum()) for length in (window, subject.length))
    drawn = []
    for pair in sorted({0, len(tokens) // 2, len(tokens) - 1}):
        positions = torch.arange(_TURNS) * (1 if pair == 0 else max(1, window // _TURNS))
        cos, sin = (each[0, 0, :, pair] for each in scheme.turns(positions[None], angles, geometry))
        points = [[round(x, 3), round(y, 3)] for x, y in zip(cos.tolist(), sin.tolist(), strict=True)]
        drawn.append({"pair": pair, "turn": _plain(tokens[[pair]])[0], "last": int(positions[-1]), "points": points})
    slowest = float(tokens[tokens.isfinite()][-1:].sum()) or math.inf
    turns = f"within the window the slowest pair that turns makes {window / slowest:.3g} of a turn"
    factor = angles.attention_factor
    if abs(factor - 1) > 1e-4:
        turns += f"; cos and sin are times {factor:.3g}"
    sentence = f"{never} of {len(tokens)} pairs complete no turn within {window} tokens"
    return {
        "wavelengths": (_plain(tokens), f"{sentence}, {still} none within {subject.length}"),
        "turning": (drawn, turns),
    }


def _table(subject: Shown) -> Drawn:
    window, length, table = subject.geometry.original_length, subject.length, subject.table
    ends = [window * k + by for k in range(1, min(FACTORS[-1], -(-length // window))) for by in (-1, 0, 1)]
    distances = torch.cat((numbers.spread_distances(length), torch.tensor(ends, dtype=torch.long))).unique()
    distances = distances[distances < length]
    rows = numbers.rows_at(subject, distances)
    cosines = torch.nn.functional.cosine_similarity(rows[:1], rows, dim=-1)
    alike = distances[(cosines > 0.5) & (distances > 0)].tolist()
    farthest = f"the farthest row that is more than half alike is {alike[-1]} away" if alike else ""
    value = {"distances": distances.tolist(), "values": _plain(cosines, 4)}
    drawn: Drawn = {"similarity": (value, farthest or "no other row is more than half alike")}
    if table is not None and not table.trainable:
        rows = numbers.rows_at(subject, torch.arange(min(_ROWS, length)))
        most = float(rows.abs().max())
        drawn["table"] = _map(rows[:, :_COLUMNS], -most, most), f"{rows.shape[1]} dimensions, up to {most:.3g}"
    return drawn


PICTURES: tuple[tuple[Callable[[Shown], bool], Callable[[Shown], Drawn]], ...] = (
    (lambda subject: subject.rotates and not subject.splits, _rotation),
    (lambda subject: subject.scheme.kind != "table", _scores),
    (lambda subject: subject.rotates, _relative),
    (lambda subject: subject.scheme.kind == "bias", _bias),
    (lambda subject: subject.table is not None, _table),
)
"""Groups of pictures: whether they apply to a scheme, and their numbers."""
