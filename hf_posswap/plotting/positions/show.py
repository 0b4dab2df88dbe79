"""The registry of pictures, and drawing all pictures that apply to given schemes."""

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
"""Label of the model's position table among others."""


@dataclass(frozen=True)
class Picture:
    """A kind of picture.

    Attributes:
        summary: what it shows.
        draws: draws schemes to a path, and returns a one-line summary per scheme.
        takes: whether it applies to a scheme.
    """

    summary: str
    draws: Callable[..., list[str]]
    takes: Callable[[Shown], bool]


@dataclass(frozen=True)
class Drawn:
    """A picture that was drawn.

    Attributes:
        name: its name in `PICTURES`.
        path: the .png file; the .svg is next to it.
        summary: what this kind of picture shows.
        said: what this picture shows, one line per scheme.
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


def _reaches(subject: Shown, position: int) -> bool:
    """Return whether it has a table row for `position`: only the model's own table is limited in length."""
    return _has_table(subject) and (subject.name != OWN_TABLE or subject.length > position)


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
    "table": Picture("the position table, one row per position", maps.draw_table, _has_table),
    "waves": Picture("single dimensions of the table along the positions", lines.draw_waves, _has_table),
    "similarity": Picture("the similarity of the rows of two positions", maps.draw_similarity, _has_table),
    "similarity-by-distance": Picture(
        "the similarity of positions by distance", lines.draw_similarity_by_distance, _has_table
    ),
    "token": Picture(
        "the effect of position on one token's vector",
        maps.draw_token,
        lambda subject: _reaches(subject, maps.PLACES[-1]) or _has_fixed_turns(subject),
    ),
}
"""Every kind of picture, by name."""


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
        schemes: the schemes to draw, on one sheet if they can be compared.
        out: the folder for NAME.png and NAME.svg of each picture.
        pictures: names in `PICTURES`; empty: all that apply to one of `schemes`.
        geometry: the model's geometry; None: 8 heads of 64 dimensions, 512 tokens, plain RoPE.
        factor: target length over original length.
        old: the model's position table, a tensor [P, E], from which new tables are initialized, and which is also
            drawn; None: random rows.
        dark: use colours for a dark page.

    Raises:
        UnknownNameError: no such picture or scheme.
        OptionError: there is nothing to draw, or a requested picture applies to none of the schemes.
        SchemeError: a scheme does not fit such a model.
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: a file cannot be written.

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
            names = ", ".join(subject.name for subject in subjects)
            raise OptionError(f"{names}: the picture {name!r} does not apply.")
    subjects_by_picture = {name: list(filter(PICTURES[name].takes, subjects)) for name in (pictures or PICTURES)}
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, drawable in subjects_by_picture.items():
        if drawable:
            path = out / f"{name}.png"
            summaries = PICTURES[name].draws(drawable, path, dark=dark)
            drawn.append(Drawn(name, path, PICTURES[name].summary, tuple(summaries)))
    return tuple(drawn)


def _subjects(schemes: Sequence[Scheme | str], shape: Geometry, factor: float, old: Tensor | None) -> list[Shown]:
    """Return the model's own table and the schemes in its shape, labelled by name, and by fields if names repeat."""
    resolved = [make_scheme(scheme) for scheme in schemes]
    labels = [_label(scheme, [other for other in resolved if other.name == scheme.name]) for scheme in resolved]
    if len(set(labels)) < len(labels):
        twice = next(name for name in labels if labels.count(name) > 1)
        raise OptionError(f"{twice} is given twice: give each scheme once.")
    own_table = [] if old is None else [Shown(OWN_TABLE, Learned().resolve(shape, None), shape, len(old), old)]
    return [
        *own_table,
        *(
            shown(scheme, shape, factor=factor, name=name, old=old)
            for scheme, name in zip(resolved, labels, strict=True)
        ),
    ]


def _label(scheme: Scheme, alike: Sequence[Scheme]) -> str:
    """Return the name of `scheme` with its values of the fields that differ among `alike`, all of the same name."""
    differing = [
        f"{field.name}={getattr(scheme, field.name)}"
        for field in dataclasses.fields(scheme)
        if getattr(scheme, field.name) is not None
        and any(getattr(other, field.name) != getattr(scheme, field.name) for other in alike)
    ]
    return ":".join([scheme.name, *([",".join(differing)] if differing else [])])
