"""The registry of pictures, and drawing all pictures that apply to given schemes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_posswap.errors import DataError, OptionError, UnknownNameError
from hf_posswap.geometry import Geometry
from hf_posswap.plotting.positions import lines, maps
from hf_posswap.plotting.positions.numbers import Shown, sample_geometry, shown
from hf_posswap.schemes import Learned, Scheme, Sum, make_scheme
from hf_posswap.utils import html_tables
from hf_posswap.utils.atomic_io import writable_folder
from hf_posswap.utils.format import with_older_name
from hf_posswap.utils.printable import brief_repr, in_lines
from hf_posswap.utils.result_views import ResultView, short_repr
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SchemeLike = Scheme | str | Mapping[str, Any]
"""A scheme as `patch_model` takes it: an object, a name with or without fields, or a dict."""
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


@dataclass(frozen=True, repr=False)
class Drawn(ResultView):
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

    def __str__(self) -> str:
        return in_lines([f"{self.path}: {self.summary}", *(f"  {line}" for line in self.said)])

    def _repr_facts(self) -> dict[str, object]:
        return {"name": self.name, "path": str(self.path), "said": self.said}

    def _repr_html_(self) -> str:
        blocks = (html_tables.title(f"{self.name}: {self.summary}"), html_tables.picture(self.path))
        return html_tables.together([*blocks, html_tables.bullets(self.said)])

    def _repr_png_(self) -> bytes | None:
        try:
            return self.path.read_bytes()
        except OSError:  # it was moved or deleted
            return None


class Drawings(tuple[Drawn, ...]):
    """The pictures that `draw_positions` drew, a tuple of `Drawn`. A notebook shows them."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def __repr__(self) -> str:
        return short_repr(self, {"pictures": [drawn.name for drawn in self]})

    def _repr_html_(self) -> str:
        return html_tables.together(drawn._repr_html_() for drawn in self)


_TURNS, _HAS_TABLE = attrgetter("only_rotates"), attrgetter("table")
PICTURES: dict[str, Picture] = {
    "wavelengths": Picture("tokens in which each rotary pair completes a turn", lines.draw_wavelengths, _TURNS),
    "scores": Picture(
        "the attention score by distance", lines.draw_scores, lambda subject: subject.scheme.kind != "table"
    ),
    "relative": Picture(
        "the distance that attention sees between query and key", maps.draw_relative, attrgetter("rotates")
    ),
    "turning": Picture("rotary pairs in the plane, position by position", lines.draw_turning, _TURNS),
    "bias": Picture("bias matrices of three heads", maps.draw_bias, lambda subject: subject.scheme.kind == "bias"),
    "table": Picture("the position table, one row per position", maps.draw_table, _HAS_TABLE),
    "waves": Picture("single dimensions of the table along the positions", lines.draw_waves, _HAS_TABLE),
    "similarity": Picture("the similarity of the rows of two positions", maps.draw_similarity, _HAS_TABLE),
    "similarity-by-distance": Picture(
        "the similarity of positions by distance", lines.draw_similarity_by_distance, _HAS_TABLE
    ),
    "token": Picture(
        "the effect of position on one token's vector",
        maps.draw_token,
        lambda subject: (  # only the model's own table is limited in length
            subject.only_rotates
            or (subject.table is not None and (subject.name != OWN_TABLE or subject.length > maps.PLACES[-1]))
        ),
    ),
}
"""Every kind of picture, by name."""


def draw_positions(
    schemes: Sequence[SchemeLike] | SchemeLike,
    out: str | Path,
    *,
    pictures: Sequence[str] | str = (),
    model: PreTrainedModel | None = None,
    geometry: Geometry | None = None,
    heads: int | None = None,
    dim: int | None = None,
    window: int | None = None,
    factor: float = 4.0,
    old: Tensor | None = None,
    dark: bool = False,
    length: int | None = None,
) -> Drawings:
    """Draw position mechanisms themselves, without running a model. A notebook shows the pictures.

    Args:
        schemes: the schemes to draw, on one sheet if they can be compared: objects, names, dicts, or one of them.
        out: the folder for NAME.png and NAME.svg of each picture.
        pictures: names in `PICTURES`, or one of them; empty: all that apply to one of `schemes`.
        model: an unswapped transformers model, in whose geometry to draw, with its position table; None: a geometry.
        geometry: the geometry of a model; None: plain RoPE in `heads`, `dim` and `window`.
        heads: attention heads per layer; None: 8.
        dim: head dimension; None: 64.
        window: original window in tokens; None: 512.
        factor: target length over original length.
        old: the model's position table, a tensor [P, E], from which new tables are initialized, and which is also
            drawn; None: that of `model`, otherwise random rows.
        dark: use colours for a dark page.
        length: an older name of `window`.

    Returns:
        A tuple of the pictures in the order of `PICTURES`, each with its file and what it shows.

    Raises:
        UnknownNameError: no such picture or scheme.
        OptionError: there is nothing to draw, a requested picture applies to none of the schemes, `out` is not a path,
            or the geometry is given twice.
        DataError: the model carries a swap.
        UnsupportedSwapError, UnsupportedModelError: `model` is not a transformers model, or no family describes it.
        SchemeError: a scheme does not fit such a model.
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: a file cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     drawn = draw_positions(["rope", "yarn"], folder, pictures="wavelengths")
        >>> drawn[0].said[1]
        'yarn: 19 of 32 pairs complete no turn within 512 tokens, 16 none within 2048'
    """
    if not isinstance(out, str | Path):
        raise OptionError(f"out is the folder for the pictures, a path, got {brief_repr(out)}.")
    window = with_older_name(window=window, length=length)
    shape, old = _shape(model, geometry, {"heads": heads, "dim": dim, "window": window}, old)
    chosen = [schemes] if isinstance(schemes, Scheme | str | Mapping) else list(schemes)
    pictures = [pictures] if isinstance(pictures, str) else pictures
    if not chosen and old is None:
        raise OptionError("give at least one scheme to draw: posswap schemes lists them.")
    subjects = _subjects(chosen, shape, factor, old)
    for name in pictures:
        if name not in PICTURES:
            raise UnknownNameError("picture", name, PICTURES)
        if not any(map(PICTURES[name].takes, subjects)):
            names = ", ".join(subject.name for subject in subjects)
            raise OptionError(f"{names}: the picture {name!r} does not apply.")
    subjects_by_picture = {name: list(filter(PICTURES[name].takes, subjects)) for name in (pictures or PICTURES)}
    folder = writable_folder(expand_home(out))
    drawn = []
    for name, drawable in subjects_by_picture.items():
        if drawable:
            path = folder / f"{name}.png"
            summaries = PICTURES[name].draws(drawable, path, dark=dark)
            drawn.append(Drawn(name, path, PICTURES[name].summary, tuple(summaries)))
    return Drawings(drawn)


def _shape(
    model: PreTrainedModel | None, geometry: Geometry | None, numbers: Mapping[str, int | None], old: Tensor | None
) -> tuple[Geometry, Tensor | None]:
    """Return the geometry to draw in, and the position table of the model, or `old`.

    Raises:
        OptionError: two of `model`, `geometry` and `numbers` are given.
        DataError: the model carries a swap.
    """
    given = {name: value for name, value in numbers.items() if value is not None}
    sources = [name for name, value in (("model", model), ("geometry", geometry)) if value is not None]
    sources += [", ".join(given)] if given else []
    if len(sources) > 1:
        raise OptionError(f"{' and '.join(sources)} are given, and each says the geometry: give one of them.")
    if model is None:
        sizes = {"length" if name == "window" else name: number for name, number in given.items()}
        return geometry or sample_geometry(**sizes), old
    from hf_posswap.families.locating import locate
    from hf_posswap.families.sites import TokenTable
    from hf_posswap.patching.inspect.describe import describe_positions
    from hf_posswap.patching.plan.plan_swap import unwrap

    report, target = describe_positions(model), unwrap(model)
    if report.swapped is not None:
        raise DataError(
            f"this {report.model} carries a swap ({report.swapped}): unpatch_model(model) first, or give the "
            "checkpoint it was made from."
        )
    tables = [stack.table for stack in locate(target).stacks if isinstance(stack.table, TokenTable)]
    if old is None and tables:
        old = target.get_parameter(f"{tables[0].path}.weight").detach().float().cpu()[tables[0].offset :]
    return report.geometry, old


def _subjects(schemes: Sequence[SchemeLike], shape: Geometry, factor: float, old: Tensor | None) -> list[Shown]:
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
    """Return the name of `scheme` with its values of the fields that differ among `alike`, all of the same name.

    A sum is labelled by its parts.
    """
    if isinstance(scheme, Sum):
        return str(scheme)
    differing = [
        f"{field.name}={getattr(scheme, field.name)}"
        for field in dataclasses.fields(scheme)
        if getattr(scheme, field.name) is not None
        and any(getattr(other, field.name) != getattr(scheme, field.name) for other in alike)
    ]
    return ":".join([scheme.name, *([",".join(differing)] if differing else [])])
