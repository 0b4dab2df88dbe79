"""The browser's numbers are Python's to 1e-6: every picture, every scheme, many positions of the sliders."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_posswap.errors import SchemeError
from hf_posswap.explorer.choices import CHOICES, beginnings
from hf_posswap.explorer.page import write_page
from hf_posswap.plotting.positions import numbers
from hf_posswap.plotting.positions.numbers import Shown, sample_geometry, shown
from hf_posswap.schemes import SCHEMES, Fire, Kerple, Learned, Sinusoidal, T5Bias
from hf_posswap.schemes.learned_bias import FireMechanism, KerpleMechanism, T5Mechanism
from hf_posswap.schemes.piecewise import Piecewise
from hf_posswap.schemes.rope import RotaryScheme
from tests.explorer.conftest import Chromium

TOLERANCE = 1e-6
_AT_ONCE = 24
"""Questions that the browser is asked at a time: matrices of all at once would take it minutes to send."""
BASES, FACTORS, WINDOWS = (100, 10_000, 500_000), (1, 1.25, 4, 16), (16, 100, 512, 4096)
SHAPES = ((1, 2), (3, 4), (6, 64), (8, 128))
"""Heads, and dimensions of a head: two are too few for some schemes, which then refuse."""
SETTINGS = [
    {"base": base, "factor": factor, "window": window, "heads": heads, "dim": dim}
    for base, (factor, window), (heads, dim) in itertools.product(BASES, zip(FACTORS, WINDOWS, strict=True), SHAPES)
]
NAMES = [choice.name for choice in CHOICES]
GIVEN: dict[str, Callable[[float, int], dict[str, Any]]] = {
    "alibi_interpolated": lambda factor, _: {"interpolation": factor},
    "learned_interpolated": lambda *_: {"extend": "interpolate"},
    "longrope": lambda factor, pairs: {"long_factor": torch.linspace(1, factor, pairs, dtype=torch.float64).tolist()},
    "t5_random": lambda *_: {"init_std": 1.0},
}
"""Fields of what the page names after them, by the factor and the rotary pairs."""
_ASK = """
const [picture, asked] = arguments;
return asked.map(([name, s]) => {
  try { return posswap.data(picture, name, s); }
  catch (error) { if (error instanceof posswap.Refused) return {refused: error.message}; throw error; }
});
"""


def subject_of(name: str, s: dict[str, Any]) -> Shown:
    """Return the scheme as the package has it, in the shape of the settings; its angles are exact, not stock's own."""
    geometry = sample_geometry(s["heads"], s["dim"], s["window"])
    geometry = dataclasses.replace(geometry, base=None, frequencies=None, rotary_dim=None, layout=None)
    choice = next(choice for choice in CHOICES if choice.name == name)
    scheme = SCHEMES.get(choice.scheme)()
    if isinstance(scheme, RotaryScheme):
        scheme = dataclasses.replace(scheme, base=float(s["base"]))
    factor = round(s["window"] * s["factor"]) / s["window"]
    if name in GIVEN:
        scheme = dataclasses.replace(scheme, **GIVEN[name](factor, s["dim"] // 2))
    return shown(scheme, geometry, factor=s["factor"], name=name)


def asked(chromium: Chromium, place: Path, picture: str) -> list[tuple[str, dict[str, Any], Any]]:
    """Return for each scheme and each settings what the browser says of a picture."""
    write_page(place / "page.html")
    driver = chromium("desktop")
    driver.get((place / "page.html").as_uri())
    driver.set_script_timeout(300)
    takes = driver.execute_script("return posswap.takes[arguments[0]]", picture)
    every = list(itertools.product((name for name in NAMES if name in takes), SETTINGS))
    found = []
    for start in range(0, len(every), _AT_ONCE):
        found += driver.execute_script(_ASK, picture, [list(one) for one in every[start : start + _AT_ONCE]])
    return [(name, s, values) for (name, s), values in zip(every, found, strict=True)]


def checked(
    found: list[tuple[str, dict[str, Any], Any]], *, most: float = math.inf
) -> list[tuple[str, Shown, dict[str, Any], Any]]:
    """Return what was drawn, with the scheme; what the browser refused Python refuses, and nothing else.

    Args:
        found: by the browser.
        most: tokens after the swap: longer ones would take a test's memory.
    """
    drawn = []
    for name, s, values in found:
        if s["window"] * s["factor"] > most:
            continue
        refused = isinstance(values, dict) and "refused" in values
        try:
            subject = subject_of(name, s)
        except SchemeError:
            assert refused, (name, s)
            continue
        assert not refused, (name, s, values)
        drawn.append((name, subject, s, values))
    assert len(drawn) > len(SETTINGS) / 2
    return drawn


def near(made: Any, expected: Any) -> None:
    """Check numbers against numbers: to 1e-6, of themselves where they are larger than 1."""
    made = np.array(made, dtype=float)
    expected = np.asarray(expected, dtype=float)
    assert made.shape == expected.shape
    finite = np.isfinite(expected)
    assert (np.isfinite(made) == finite).all()
    assert (np.abs(made - expected)[finite] <= TOLERANCE * np.maximum(1.0, np.abs(expected[finite]))).all()


def test_wavelengths(chromium: Chromium, tmp_path: Path) -> None:
    for name, subject, _, values in checked(asked(chromium, tmp_path, "wavelengths")):
        expected = numbers.wavelengths(subject)
        if name == "dynamic":  # its angles at the length after the swap
            assert expected.shape == (len(values),)
        near(values, expected.masked_fill(expected.isinf(), math.nan))


@pytest.mark.slow
def test_scores(chromium: Chromium, tmp_path: Path) -> None:
    for _, subject, s, values in checked(asked(chromium, tmp_path, "scores")):
        distances = torch.tensor(values["distances"])
        assert distances[0] == 0
        assert distances[-1] == subject.length - 1
        last, ones = distances.max()[None], torch.ones(s["dim"], dtype=torch.float64)
        expected = numbers.scores(subject, last, last - distances, query=ones, key=ones)[:, 0]
        made = np.broadcast_to(np.array(values["heads"]), tuple(expected.shape))
        near(made, expected)


@pytest.mark.slow
def test_relative(chromium: Chromium, tmp_path: Path) -> None:
    for _, subject, s, values in checked(asked(chromium, tmp_path, "relative")):
        at = torch.tensor(values["places"])
        scheme = subject.scheme
        assert isinstance(scheme, RotaryScheme)
        query, key = at[None, :, None], at[None, None, :]  # [1, Q, 1] and [1, 1, K]
        expected = (query - key)[0].double()
        if isinstance(scheme, Piecewise):
            for part in scheme.region_positions():
                keys = (part.key or scheme.cached_key)(at[None])[0]
                seen = part.query(at[None])[0].double()[:, None] - keys.double()[None, :]
                expected = torch.where(part.region.holds(query, key)[0], seen, expected)
        else:
            length = torch.tensor([subject.length]) if scheme.length_dependent else None
            angles = scheme.angles(subject.geometry, length).exact.flatten()
            turning = int(angles.nonzero()[-1])
            expected = expected * angles[turning] * s["base"] ** (2 * turning / s["dim"])
        near(values["rows"], expected.masked_fill((key > query)[0], math.nan))


@pytest.mark.slow
def test_bias(chromium: Chromium, tmp_path: Path) -> None:
    for _, subject, s, values in checked(asked(chromium, tmp_path, "bias")):
        at = torch.tensor(values["places"])
        whole = numbers.scores(subject, at, at, query=torch.zeros(s["dim"]))
        near(values["matrices"], whole[values["heads"]])
        assert values["heads"][-1] == s["heads"] - 1


def test_turning(chromium: Chromium, tmp_path: Path) -> None:
    for _, subject, s, values in checked(asked(chromium, tmp_path, "turning")):
        scheme = subject.scheme
        assert isinstance(scheme, RotaryScheme)
        length = torch.tensor([subject.length]) if scheme.length_dependent else None
        angles = scheme.angles(subject.geometry, length)
        for found in values:
            turns = angles.exact.flatten()[found["pair"]] * torch.tensor(found["positions"], dtype=torch.float64)
            expected = torch.stack((turns.cos(), turns.sin()), dim=-1) * angles.attention_factor
            near(found["points"], expected)
            vector = torch.zeros(s["dim"], dtype=torch.float64)
            vector[found["pair"]] = 1.0
            if scheme.only_rotates:  # and as attention runs it
                turned = numbers.turned(subject, vector, torch.tensor(found["positions"]))
                near(found["points"], turned[:, [found["pair"], found["pair"] + s["dim"] // 2]])


def test_table(chromium: Chromium, tmp_path: Path) -> None:
    for _, _, s, values in checked(asked(chromium, tmp_path, "table")):
        width = s["heads"] * s["dim"]
        waves = Sinusoidal(base=float(s["base"]), scale=1.0).waves(len(values["places"]), width)
        near(values["rows"], waves[:, :128])


def test_similarity(chromium: Chromium, tmp_path: Path) -> None:
    for name, subject, s, values in checked(asked(chromium, tmp_path, "similarity"), most=2048):
        at, scheme = torch.tensor(values["distances"]), subject.scheme
        assert (at[0], at[-1]) == (0, subject.length - 1)
        if name == "sinusoidal":
            rows = Sinusoidal(base=float(s["base"]), scale=1.0).waves(subject.length, s["heads"] * s["dim"])
        else:  # rows that are alike to none but themselves
            assert isinstance(scheme, Learned)
            rows = scheme.table(torch.eye(s["window"]), subject.length, subject.geometry).double()
            if subject.length > s["window"]:
                assert (at % s["window"] == 0).sum() == -(-subject.length // s["window"])
        near(values["values"], torch.nn.functional.cosine_similarity(rows[0], rows[at], dim=-1))


@pytest.mark.parametrize("heads", [1, 12, 128])
def test_learned_biases_begin_as_their_mechanisms_do(heads: int) -> None:
    """The page has the draws of as many heads as it can show; those of fewer heads are their first."""
    found = beginnings(128)
    fire = FireMechanism(Fire(threshold=1.0), heads)
    read = {
        name: np.frombuffer(base64.b64decode(str(text)), "<f4") for name, text in found.items() if name != "buckets"
    }
    drawn = torch.cat([part.detach().flatten() for part in (fire.hidden_weight, fire.hidden_bias)])
    near(read["fire"][: len(drawn)], drawn)
    outer = (
        torch.cat([part.detach().flatten() for part in (fire.out_weight, fire.out_bias)]) * len(fire.hidden_bias) ** 0.5
    )
    near(read["fire"][len(drawn) :][: len(outer)], outer)
    kerple = KerpleMechanism(Kerple(), heads)
    near(0.01 + read["kerple"][:heads] * 1.99, kerple.r1().detach())
    near(0.01 + read["kerple"][heads : 2 * heads] * 0.99, kerple.r2().detach())
    t5 = T5Mechanism(T5Bias(init_std=1.0), sample_geometry(heads))
    near(read["t5"][: 32 * heads].reshape(32, heads), t5.table.detach())


def test_every_scheme_of_the_page_is_in_a_picture(chromium: Chromium, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html")
    driver = chromium("desktop")
    driver.get((tmp_path / "page.html").as_uri())
    takes = driver.execute_script("return posswap.takes")
    assert {name for names in takes.values() for name in names} == set(NAMES)
