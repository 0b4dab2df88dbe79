"""Which pictures there are, and drawing all that some schemes have something to say in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hf_posswap.errors import OptionError, UnknownNameError
from hf_posswap.geometry import Geometry
from hf_posswap.plotting.positions import lines, maps
from hf_posswap.plotting.positions.numbers import Shown, sample_geometry, shown
from hf_posswap.schemes import Learned, Scheme, make_scheme
from hf_posswap.schemes.rope import RotaryScheme

OWN_TABLE = "the model's own"
"""What its position table is called beside others."""


@dataclass(frozen=True)
class Picture:
    """A kind of picture.

    Attributes:
        summary: what is to be seen in it.
        draws: draws schemes on a path, and returns what is to be seen, a line a scheme.
        takes: whether a scheme has something to say in it.
    """

    summary: str
    draws: Callable[..., list[str]]
    takes: Callable[[Shown], bool]


@dataclass(frozen=True)
class Drawn:
    """A picture that was drawn.

    Attributes:
        name: of its kind.
        path: of the .png; the .svg lies beside it.
        summary: what is to be seen in such a picture.
        said: what is to be seen in this one, a line a scheme.
    """

    name: str
    path: Path
    summary: str
    said: tuple[str, ...]


def _rotates(subject: Shown) -> bool:
    return subject.rotates


def _has_fixed_turns(subject: Shown) -> bool:
    return isinstance(subject.scheme, RotaryScheme) and subject.scheme.only_rotates


def _has_table(subject: Shown) -> bool:
    return subject.table is not None


def _reaches(subject: Shown, place: int) -> bool:
    """Return whether it has a table with a row for `place`: the model's own ends, others are drawn as far as needed."""
    return _has_table(subject) and (subject.name != OWN_TABLE or subject.length > place)


def _has_scores(subject: Shown) -> bool:
    return subject.scheme.kind != "table"


def _has_bias(subject: Shown) -> bool:
    return subject.scheme.kind == "bias"


PICTURES: dict[str, Picture] = {
    "wavelengths": Picture(
        "tokens in which each rotary pair completes a turn", lines.draw_wavelengths, _has_fixed_turns
    ),
    "scores": Picture("the attention score by distance", lines.draw_scores, _has_scores),
    "relative": Picture("the distance that attention sees between query and key", maps.draw_relative, _rotates),
    "turning": Picture("rotary pairs in the plane, position by position", lines.draw_turning, _has_fixed_turns),
    "bias": Picture("bias matrices of three heads", maps.draw_bias, _has_bias),
    "table": Picture("the position table, a row a position", maps.draw_table, _has_table),
    "waves": Picture("single dimensions of the table along the positions", lines.draw_waves, _has_table),
    "similarity": Picture("how alike the rows of two positions are", maps.draw_similarity, _has_table),
    "similarity-by-distance": Picture(
        "how alike positions are by their distance", lines.draw_similarity_by_distance, _has_table
    ),
    "token": Picture(
        "what position does to one token's vector",
        maps.draw_token,
        lambda one: _reaches(one, maps.PLACES[-1]) or _has_fixed_turns(one),
    ),
}
"""Every kind of picture, by its name."""


def draw_positions(
    schemes: Sequence[Scheme | str],
    out: Path,
    *,
    pictures: Sequence[str] = (),
    geometry: Geometry | None = None,
    factor: float = 4.0,
    old: Tensor | None = None,
    dark: bool = False,
) -> tuple[Drawn, ...]:
    """Draw position mechanisms themselves, without running a model.

    Args:
        schemes: to draw, on one sheet where they can be compared.
        out: the folder for NAME.png and NAME.svg of each picture.
        pictures: names in `PICTURES`; empty: all in which one of `schemes` has something to say.
        geometry: of the model; None: 8 heads of 64 dimensions, 512 tokens, plain RoPE.
        factor: by which the swapped model is longer than the original.
        old: the model's position table, a tensor [P, E], which tables begin with, and which is drawn beside them; None:
            random rows.
        dark: for a dark page.

    Raises:
        UnknownNameError: no such picture or scheme.
        OptionError: nothing to draw, or no scheme has anything to say in a picture that was asked for.
        SchemeError: a scheme cannot be in such a model.
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     drawn = draw_positions(["rope", "yarn"], Path(folder), pictures=["wavelengths"])
        >>> drawn[0].said[1]
        'yarn: 19 of 32 pairs complete no turn within 512 tokens, 16 none within 2048'
    """
    if not schemes and old is None:
        raise OptionError("give at least one scheme to draw: posswap schemes lists them.")
    shape = geometry or sample_geometry()
    subjects = _subjects(schemes, shape, factor, old)
    for name in pictures:
        if name not in PICTURES:
            raise UnknownNameError("picture", name, PICTURES)
        if not any(map(PICTURES[name].takes, subjects)):
            raise OptionError(f"{', '.join(one.name for one in subjects)}: nothing to see in the picture {name!r}.")
    wanted = {name: [one for one in subjects if PICTURES[name].takes(one)] for name in (pictures or PICTURES)}
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, able in wanted.items():
        if able:
            path = out / f"{name}.png"
            said = PICTURES[name].draws(able, path, dark=dark)
            drawn.append(Drawn(name, path, PICTURES[name].summary, tuple(said)))
    return tuple(drawn)


def _subjects(schemes: Sequence[Scheme | str], shape: Geometry, factor: float, old: Tensor | None) -> list[Shown]:
    """Return the model's own table and the schemes in its shape; those of one name are told apart by their fields."""
    made = [make_scheme(scheme) for scheme in schemes]
    several = [_label(scheme, [one for one in made if one.name == scheme.name]) for scheme in made]
    if len(set(several)) < len(several):
        twice = next(name for name in several if several.count(name) > 1)
        raise OptionError(f"{twice} is given twice: give each scheme once.")
    own = [] if old is None else [Shown(OWN_TABLE, Learned().resolve(shape, None), shape, len(old), old)]
    return [
        *own,
        *(shown(scheme, shape, factor=factor, name=name, old=old) for scheme, name in zip(made, several, strict=True)),
    ]


def _label(scheme: Scheme, alike: Sequence[Scheme]) -> str:
    """Return the name of `scheme` with what it gives to the fields that differ among `alike`, all of its name."""
    given = [
        f"{field.name}={getattr(scheme, field.name)}"
        for field in dataclasses.fields(scheme)
        if getattr(scheme, field.name) is not None
        and any(getattr(one, field.name) != getattr(scheme, field.name) for one in alike)
    ]
    return ":".join([scheme.name, *([",".join(given)] if given else [])])
