"""The numbers behind the pictures of a mechanism: its effect on queries, keys and embeddings at each position.

They come from the scheme's own mechanism, as attention runs it. Shapes: Q queries, K keys, H heads, D head dim,
R rotary dim, E hidden size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from hf_posswap.compat.torch_dispatch import PrivateRandomness
from hf_posswap.errors import OptionError, SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import default_inv_freq
from hf_posswap.schemes import Learned, Scheme, Sum, TableScheme
from hf_posswap.schemes.mechanism import Mechanism, by_head
from hf_posswap.schemes.piecewise import Piecewise
from hf_posswap.schemes.rope import DEFAULT_BASE, RotaryScheme, own_rope, own_theta

_SPREAD = 0.02
"""Standard deviation of the learned table without a model: GPT-2's initialization."""
LARGEST_TABLE = 2**21
"""Numbers in the random table that stands for a learned one in `rows_at`: a wider one would take seconds to draw."""


@dataclass(frozen=True)
class Shown:
    """A scheme in the shape of one model.

    Attributes:
        name: the label in the picture.
        scheme: resolved.
        geometry: the model's geometry.
        length: maximum length of the swapped model, in tokens.
        old: the model's position table, [P, E], if it has one.
    """

    name: str
    scheme: Scheme
    geometry: Geometry
    length: int
    old: Tensor | None = None

    @property
    def rotates(self) -> bool:
        """Whether the scheme rotates queries and keys by its own angles."""
        return isinstance(self.scheme, RotaryScheme)

    @property
    def only_rotates(self) -> bool:
        """Whether the scheme's angles are all that it does to queries and keys."""
        return isinstance(self.scheme, RotaryScheme) and self.scheme.only_rotates

    @property
    def splits(self) -> bool:
        """Whether far keys get other distances than near ones: attention splits into regions."""
        return self.rotates and not self.only_rotates and self.scheme.mechanism(self.geometry).splits

    @property
    def table(self) -> TableScheme | None:
        """The scheme of its position table, or None without a table."""
        component = self.scheme.table_part
        return component if isinstance(component, TableScheme) else None


def sample_geometry(heads: int = 8, dim: int = 64, length: int = 512, base: float = DEFAULT_BASE) -> Geometry:
    """Return the shape of a causal model with plain RoPE, for pictures without a model.

    Args:
        heads: attention heads per layer, at most 1024.
        dim: head dimension D, even, at most 4096.
        length: original length of the model, in tokens, at most 2^24.
        base: theta of its RoPE, above 1.

    Raises:
        OptionError: a number is invalid.

    Example:
        >>> sample_geometry(dim=4).frequencies
        (1.0, 0.009999999776482582)
    """
    for name, value, least, most, unit in (
        ("heads", heads, 1, 1024, ""),
        ("dim", dim, 2, 4096, ""),
        ("length", length, 2, 2**24, " tokens, the original window"),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise OptionError(f"{name} is a whole number from {least} to {most:,}{unit}; got {value!r}.")
    if dim % 2:
        raise OptionError(f"dim must be even, because a rotary pair has two dimensions; got {dim}.")
    if isinstance(base, bool) or not isinstance(base, int | float) or not 1 < base < math.inf:
        raise OptionError(f"base (rope_theta) is a number above 1, got {base!r}.")
    return Geometry(
        hidden_size=heads * dim,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        num_layers=4,
        original_length=length,
        causal=True,
        rotary_dim=dim,
        layout="half",
        base=float(base),
        frequencies=tuple(default_inv_freq(base, dim).tolist()),
    )


def shown(
    scheme: Scheme, geometry: Geometry, *, factor: float = 4.0, name: str | None = None, old: Tensor | None = None
) -> Shown:
    """Return `scheme` in the shape `geometry`, resolved for `factor` times its length, or as far as it reaches.

    Args:
        scheme: resolved or not; its own `factor` is kept if set.
        geometry: the model's geometry.
        factor: target length over original length, at least 1.
        name: the label; None: the scheme's name.
        old: the model's position table, [P, E].

    Raises:
        OptionError: an invalid factor, or a scheme for images.
        SchemeError: the scheme does not fit such a model.

    Example:
        >>> from hf_posswap.schemes import Yarn
        >>> shown(Yarn(), sample_geometry(length=100)).scheme.factor
        4.0
    """
    if not (math.isfinite(factor) and factor >= 1):
        raise OptionError(f"factor is a number of at least 1, got {factor!r}.")
    if "text" not in scheme.inputs:
        raise OptionError(f"{scheme.name} is for images, but these pictures show positions in a text.")
    length = round(geometry.original_length * factor)
    whole = _with_native(scheme, geometry, old)
    try:
        resolved = whole.resolve(geometry, length)
    except SchemeError:
        with suppress(SchemeError):
            resolved = whole.resolve(geometry, None)
            if geometry.original_length <= (reach := resolved.reach(geometry) or 0) < length:
                return Shown(f"{name or whole.name}, to {reach} tokens", resolved, geometry, reach, old)
        raise
    return Shown(name or (str(scheme) if isinstance(scheme, Sum) else scheme.name), resolved, geometry, length, old)


def _with_native(scheme: Scheme, geometry: Geometry, old: Tensor | None) -> Scheme:
    """Return `scheme` with the rotation or the table of a model instead of `native`."""
    if not scheme.standalone:
        raise OptionError(
            f"{scheme.name} is not a scheme by itself, only a part of one: draw a sum, as rope + {scheme.name}."
        )
    if not isinstance(scheme, Sum) or not scheme.keeps_native:
        return scheme
    if geometry.base is None and old is None:
        raise OptionError(
            f"{scheme}: native stands for the rotation or the position table of a model, and none is given here: give "
            "one (--model), or name what it stands for, as in rope + alibi."
        )
    return scheme.with_native(Learned() if geometry.base is None else own_rope(scheme.name, geometry))


_NO_TURN = 1e15
"""Tokens: a pair that takes longer for a turn stands for one that does not rotate, as the last of CoPE."""


def wavelengths(subject: Shown) -> Tensor:
    """Return the tokens in which each rotary pair completes a turn, 2 pi / theta_i, [R/2]; inf if it does not rotate.

    Example:
        >>> from hf_posswap.schemes import Rope
        >>> wavelengths(shown(Rope(base=100.0), sample_geometry(dim=4))).round().tolist()
        [6.0, 63.0]
    """
    scheme = cast(RotaryScheme, subject.scheme)
    length = torch.tensor([subject.length]) if scheme.length_dependent else None
    tokens = 2 * math.pi / scheme.angles(subject.geometry, length).exact.flatten()
    return tokens.masked_fill(tokens > _NO_TURN, math.inf)


def scores(
    subject: Shown,
    queries: Tensor,
    keys: Tensor,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    layer: int = 0,
) -> Tensor:
    """Return the attention scores before the softmax, q k / sqrt(D) and the bias, [H, Q, K]; NaN in the future.

    Without `query` and `key` both are all ones, which gives the mean score of a query with an identical key over random
    tokens: it depends only on the positions.

    Args:
        subject: the scheme whose mechanism is applied.
        queries: positions, [Q].
        keys: positions, [K].
        query: the vector of every query before the mechanism, [D]; None: ones.
        key: the vector of every key before the mechanism, [D]; None: ones.
        layer: index of the layer, for schemes that differ by layer.

    Example:
        >>> from hf_posswap.schemes import Alibi
        >>> alibi = shown(Alibi(), sample_geometry(heads=1, dim=4))
        >>> scores(alibi, torch.tensor([2]), torch.arange(3)).tolist()
        [[[1.9921875, 1.99609375, 2.0]]]
    """
    geometry = subject.geometry
    ones = torch.ones(geometry.head_dim)
    rows = [
        (ones if vector is None else vector).expand(1, geometry.num_heads, len(positions), -1)
        for vector, positions in ((query, queries), (key, keys))
    ]
    result = _raw_scores(subject, queries[None], keys[None], rows[0], rows[1], layer)[0]
    result = result.expand(geometry.num_heads, -1, -1)
    return result.masked_fill(keys[None, :] > queries[:, None], math.nan) if geometry.causal else result


def _raw_scores(subject: Shown, queries: Tensor, keys: Tensor, query: Tensor, key: Tensor, layer: int) -> Tensor:
    """Compute scores as attention does, [1, H, Q, K]."""
    mechanism = _mechanism(subject, layer)
    size = subject.geometry.head_dim**-0.5
    if mechanism is None:
        return query @ key.mT * size
    length = torch.full((1, 1, 1, 1), subject.length)
    if mechanism.scales:
        query = query * by_head(mechanism.scale(queries))[..., None]
    if mechanism.rotates:
        key = mechanism.rotate_key(key, mechanism.prepare(keys, length))
        query = mechanism.rotate_query(query, mechanism.prepare(queries, length))
    products = _scores_by_region(mechanism, queries, keys, query, key) if mechanism.splits else query @ key.mT
    return products * size + mechanism.bias(queries, keys) if mechanism.biases else products * size


def _scores_by_region(mechanism: Mechanism, queries: Tensor, keys: Tensor, query: Tensor, key: Tensor) -> Tensor:
    result = torch.full((1, query.shape[1], queries.shape[1], keys.shape[1]), math.nan)
    for region in mechanism.pieces(queries, keys):
        region_scores = region.rotate_query(query, 0, queries.shape[1]) @ region.rotate_key(key, 0, keys.shape[1]).mT
        result = torch.where(region.pairs.holds(queries[:, :, None], keys[:, None, :])[:, None], region_scores, result)
    return result


def _mechanism(subject: Shown, layer: int) -> Mechanism | None:
    """Return the scheme's mechanism inside attention, or None."""
    if not subject.scheme.acts_inside:
        return None
    with PrivateRandomness(0):  # for randomly initialized learned biases
        mechanism = subject.scheme.mechanism(subject.geometry).for_layer(layer)
    return mechanism.requires_grad_(False)


def as_it_begins(subject: Shown) -> str:
    """Return a note that a learned scheme is drawn at initialization; "" for other schemes.

    Example:
        >>> from hf_posswap.schemes import Alibi, T5Bias
        >>> [as_it_begins(shown(scheme, sample_geometry())) for scheme in (Alibi(), T5Bias(), Learned())]
        ['', ' (learned: drawn at initialization)', ' (random rows, as before training)']
    """
    if isinstance(subject.table, Learned) and subject.old is None:
        return " (random rows, as before training)"
    mechanism = _mechanism(subject, 0)
    learned = mechanism is not None and any(True for _ in mechanism.parameters())
    return " (learned: drawn at initialization)" if learned else ""


def before_training(subjects: Sequence[Shown]) -> str:
    """Return a sentence that names the `subjects` drawn at initialization; "" without any.

    Example:
        >>> from hf_posswap.schemes import Alibi, T5Bias
        >>> before_training([shown(scheme, sample_geometry()) for scheme in (Alibi(), T5Bias(), Learned())])
        ' Drawn at initialization: t5, learned.'
    """
    names = [subject.name for subject in subjects if as_it_begins(subject)]
    return f" Drawn at initialization: {', '.join(names)}." if names else ""


def scores_by_distance(subject: Shown, distances: Tensor, layer: int = 0) -> Tensor:
    """Return the scores of the last query with the keys at `distances` [N] before it, [H, N]: see `scores`."""
    last = torch.tensor([int(distances.max())])
    return scores(subject, last, last - distances, layer=layer)[:, 0]


def spread_distances(length: int, points: int = 128) -> Tensor:
    """Return whole distances 0 ... length - 1, at most `points`, evenly spread in the logarithm of d + 1.

    Example:
        >>> spread_distances(1000, points=4).tolist()
        [0, 9, 99, 999]
    """
    return (torch.logspace(0, math.log2(length), points, base=2.0, dtype=torch.float64).round().long() - 1).unique()


def places(length: int, side: int = 96) -> Tensor:
    """Return positions 0 ... length - 1 at equal steps, at most `side`, and the last one.

    Example:
        >>> places(10, side=4).tolist()
        [0, 3, 6, 9]
    """
    return torch.tensor(sorted({*range(0, length, -(-length // side)), length - 1}))


def apparent_distances(subject: Shown, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the apparent distance of each query-key pair, [Q, K], float64; NaN in the future.

    It is the angle between query and key in the slowest rotating pair, divided by this pair's angle per token before
    the swap: i - j for the model's own RoPE, a quarter of it for linear scaling by 4, the merged or clipped positions
    of Self-Extend, ReRoPE and dual chunk attention. Of a scheme whose regions are not those of `Piecewise`, it is
    measured in the scores, and valid up to half a turn of that pair.

    Example:
        >>> from hf_posswap.schemes import Linear
        >>> pi = shown(Linear(factor=4), sample_geometry())
        >>> apparent_distances(pi, torch.tensor([8]), torch.tensor([0])).round(decimals=3).tolist()
        [[2.0]]
    """
    geometry, scheme = subject.geometry, cast(RotaryScheme, subject.scheme)
    lengths = wavelengths(subject)
    is_known = geometry.frequencies is not None and len(geometry.frequencies) == len(lengths)
    plain = default_inv_freq(geometry.base or DEFAULT_BASE, 2 * len(lengths), torch.float64)
    frequencies = own_theta(geometry, torch.float64) if is_known else plain
    turning = (lengths.isfinite() & (frequencies > 0)).nonzero().flatten()
    if not len(turning):
        return torch.zeros(len(queries), len(keys), dtype=torch.float64)
    pair = int(turning[-1])
    mechanism = _mechanism(subject, 0)
    if not isinstance(scheme, Piecewise) and (mechanism is None or mechanism.splits or not scheme.traits.relative):
        return _measured_angles(subject, queries, keys, pair) / frequencies[pair]
    distances = (queries[:, None] - keys[None, :]).double()
    if isinstance(scheme, Piecewise):
        for entry in scheme.region_positions():
            holds = entry.region.holds(queries[None, :, None], keys[None, None, :])[0]
            at_query, at_key = entry.query(queries[None])[0], (entry.key or scheme.cached_key)(keys[None])[0]
            distances = torch.where(holds, at_query.double()[:, None] - at_key.double()[None, :], distances)
    distances = distances * (2 * math.pi / lengths[pair] / frequencies[pair])
    return distances.masked_fill(keys[None, :] > queries[:, None], math.nan) if geometry.causal else distances


def _measured_angles(subject: Shown, queries: Tensor, keys: Tensor, pair: int) -> Tensor:
    """Return the angle between each query and key in a rotary pair, as attention turns them, radians, [Q, K]."""
    scheme = cast(RotaryScheme, subject.scheme)
    pairs = scheme.rotary_dim(subject.geometry) // 2
    first, second = (pair, pair + pairs) if scheme.layout == "half" else (2 * pair, 2 * pair + 1)
    along, across = torch.zeros(2, subject.geometry.head_dim)
    along[first], across[second] = 1.0, 1.0
    cosine = scores(subject, queries, keys, query=along, key=along)[0].double()
    sine = scores(subject, queries, keys, query=along, key=across)[0].double()
    return torch.atan2(sine, cosine)


def table_rows(subject: Shown, rows: int | None = None) -> Tensor:
    """Return the position table that the scheme inserts, [rows, E], float32.

    Without a model the old table has independent random rows, as in an untrained model.

    Args:
        subject: a scheme with a table.
        rows: number of positions; None: the subject's length.
    """
    scheme, geometry = subject.table, subject.geometry
    assert scheme is not None, "only schemes with a table have rows"
    old = subject.old
    if old is None:
        source = torch.Generator().manual_seed(0)
        old = torch.randn(geometry.original_length, geometry.row_width, generator=source) * _SPREAD
    count = rows or subject.length
    return scheme.fit(old, count, geometry).table(old, count, geometry).float()


def rows_at(subject: Shown, positions: Tensor) -> Tensor:
    """Return the rows at `positions` [N] of the position table that the scheme inserts, [N, E], float32.

    Without a model the old table has independent random rows; in a large shape they are narrower than E, so that the
    table has at most `LARGEST_TABLE` numbers, and so are rows that are trained.

    Example:
        >>> from hf_posswap.schemes import Sinusoidal
        >>> table = shown(Sinusoidal(scale=1.0), sample_geometry(heads=1, dim=2))
        >>> rows_at(table, torch.tensor([0, 1000])).round(decimals=3).tolist()
        [[0.0, 1.0], [0.8270000219345093, 0.5619999766349792]]
    """
    scheme, geometry, old = subject.table, subject.geometry, subject.old
    assert scheme is not None, "only schemes with a table have rows"
    if old is None:
        window, width = geometry.original_length, geometry.row_width
        old = _random_table(window, min(width, max(2, LARGEST_TABLE // window // 2 * 2)))
        if scheme.trainable:
            geometry = dataclasses.replace(geometry, table_width=old.shape[1])
    fitted = scheme.fit(old, subject.length, geometry)
    defined = next(name for cls in type(fitted).__mro__ for name in ("rows_at", "table") if name in vars(cls))
    if defined == "table":  # rows_at may be a parent's, of another table
        return fitted.table(old, subject.length, geometry)[positions].float()
    return fitted.rows_at(positions, old, subject.length, geometry).float()


@lru_cache(maxsize=1)
def _random_table(rows: int, width: int) -> Tensor:
    """Return the rows of `table_rows` without a model, kept for the next length of the same shape."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) * _SPREAD


def similarities(rows: Tensor) -> Tensor:
    """Return the cosine of each pair of rows [N, E], [N, N].

    Example:
        >>> similarities(torch.tensor([[1.0, 0.0], [0.0, 2.0]])).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    unit = torch.nn.functional.normalize(rows, dim=-1)
    return unit @ unit.mT


def strongest(values: Tensor, side: int) -> Tensor:
    """Reduce `values` [N, N] to at most `side` x `side` cells, each with its value farthest from 0.

    A picture has fewer pixels than a long table has rows: plain subsampling would lose most diagonals.

    Example:
        >>> strongest(torch.tensor([[1.0, 0.0, 0.2], [0.0, 1.0, 0.0], [0.2, -0.3, 1.0]]), 2).tolist()
        [[1.0, 0.20000000298023224], [-0.30000001192092896, 1.0]]
    """
    cell = -(-len(values) // side)
    missing = -len(values) % cell
    whole = torch.nn.functional.pad(values, (0, missing, 0, missing))
    cells = whole.unfold(0, cell, cell).unfold(1, cell, cell).flatten(2)  # [side, side, cell^2]
    return cells.gather(2, cells.abs().argmax(dim=2, keepdim=True))[..., 0]


def similarity_by_distance(rows: Tensor) -> Tensor:
    """Return the mean cosine of rows [N, E] that are 0, 1, ... N - 1 positions apart, [N]."""
    whole = similarities(rows)
    return torch.stack([whole.diagonal(offset).mean() for offset in range(len(rows))])


def turned(subject: Shown, vector: Tensor, positions: Tensor) -> Tensor:
    """Return the query `vector` [D] at each of `positions` [N], [N, D], rotated if the scheme rotates.

    Example:
        >>> from hf_posswap.schemes import Rope
        >>> turn = turned(shown(Rope(), sample_geometry(dim=2)), torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))
        >>> turn.norm(dim=-1).tolist()
        [1.0, 1.0]
    """
    mechanism = _mechanism(subject, 0)
    query = vector.expand(1, 1, len(positions), -1)
    if mechanism is None or not mechanism.rotates:
        return query[0, 0]
    rotated = mechanism.rotate_query(
        query, mechanism.prepare(positions[None], torch.full((1, 1, 1, 1), subject.length))
    )
    return rotated[0, 0]
