"""Attention paid by distance: one line a model, a column a length, and a row a layer where that is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.errors import DataError
from hf_posswap.plotting.positions.sheet import Sheet, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PER_OCTAVE = 2
_ROWS = 6
"""Layers that are drawn at most: first, last, and evenly between."""
_EVEN = "all keys alike"
_LEAST = 1e-7
"""What is drawn as no attention: less than float32 tells from 0 beside 1."""


@dataclass(frozen=True)
class AttentionLine:
    """What one model paid, at one length.

    Attributes:
        label: of the model.
        number: of the model, which chooses its look.
        totals: attention paid at distances d = 0, ..., N - 2, summed over pairs, [layers, N - 1].
        pairs: how many pairs of a query and a key have that distance, [N - 1].
    """

    label: str
    number: int
    totals: Tensor
    pairs: Tensor

    @property
    def layers(self) -> int:
        """Layers that attend."""
        return len(self.totals)

    def binned(self, layer: int | None = None) -> tuple[Tensor, Tensor]:
        """Return distances + 1, the geometric middle of each bin, and the mean attention weight there.

        Near distances are bins of their own, farther ones share them, two an octave. A bin without any attention is
        NaN, as a logarithm has no place for it.

        Args:
            layer: of the model; None: the mean of all.

        Example:
            >>> line = AttentionLine("a", 0, torch.tensor([[4.0, 1.0, 0.5, 0.25, 0.25]]), torch.ones(5))
            >>> [[round(value, 3) for value in row.tolist()] for row in line.binned()]
            [[1.0, 2.0, 3.0, 4.472], [4.0, 1.0, 0.5, 0.25]]
        """
        totals = self.totals.mean(dim=0) if layer is None else self.totals[layer]
        edges = bin_edges(len(totals))
        middle = torch.tensor([math.sqrt(low * (high - 1)) for low, high in zip(edges, edges[1:], strict=False)])
        paid = torch.tensor(
            [
                float(totals[low - 1 : high - 1].sum() / self.pairs[low - 1 : high - 1].sum())
                for low, high in zip(edges, edges[1:], strict=False)
            ]
        )
        return middle, paid.masked_fill(paid < _LEAST, torch.nan)


def bin_edges(count: int) -> list[int]:
    """Return the edges of bins of distance + 1, from 1 to `count` + 1, two an octave.

    Example:
        >>> bin_edges(20)
        [1, 2, 3, 4, 6, 8, 12, 16, 21]
    """
    powers = (2 ** (step / _PER_OCTAVE) for step in range(math.ceil(_PER_OCTAVE * math.log2(count + 1))))
    return [*sorted({math.ceil(edge - 1e-9) for edge in powers if edge <= count}), count + 1]


def even_attention(tokens: int, *, causal: bool) -> Tensor:
    """Return what each key at a distance of 0, ..., tokens - 2 gets where every query attends to all of its keys alike.

    The first token is no query and no key of these means, as in `AttentionLine`, yet gets its part.

    Example:
        >>> even_attention(4, causal=True).round(decimals=3).tolist()
        [0.361, 0.292, 0.25]
    """
    if not causal:
        return torch.full((tokens - 1,), 1 / tokens, dtype=torch.float64)
    each = 1 / torch.arange(2, tokens + 1, dtype=torch.float64)  # of queries 1, 2, ...: i + 1 keys
    return each.flip(0).cumsum(0).flip(0) / torch.arange(tokens - 1, 0, -1)


def draw_attention(
    lines: Mapping[int, Sequence[AttentionLine]],
    window: int,
    path: Path,
    *,
    below: str,
    causal: bool = True,
    by_layer: bool = False,
    dark: bool = False,
) -> None:
    """Draw the mean attention weight by the distance of the key, both on log axes, and write it to `path` (PNG).

    Args:
        lines: by the tokens that were read, N: a column each.
        window: the original window, in tokens: a dashed line.
        path: of the picture, a .png; an .svg is drawn beside it.
        below: a line under the picture: on what it was measured.
        causal: whether tokens see only what comes before them.
        by_layer: a row for each layer, for six of them at most; otherwise one row, the mean of layers.
        dark: for a dark page.

    Raises:
        DataError: no line.
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.

    Example:
        >>> import tempfile
        >>> line = AttentionLine("rope", 0, torch.rand(2, 63), torch.arange(63, 0, -1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_attention({64: [line]}, 64, Path(folder) / "a.png", below="on one text")
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['a.png', 'a.svg']
    """
    columns = {tokens: some for tokens, some in lines.items() if some}
    if not columns:
        raise DataError("a picture of attention needs a line, got none.")
    deepest = max(line.layers for some in columns.values() for line in some)
    rows: list[int | None] = _rows(deepest) if by_layer else [None]
    height = 3.2 if len(rows) == 1 else 2.0
    with sheet(
        path, "Attention paid by distance", below, rows=len(rows), columns=len(columns), height=height, dark=dark
    ) as page:
        for place, layer in enumerate(rows):
            panels = page.panels[place * len(columns) : (place + 1) * len(columns)]
            for panel, (tokens, some) in zip(panels, columns.items(), strict=True):
                _panel(page, panel, some, tokens, window, layer, causal)
            limits = [panel.get_ylim() for panel in panels]
            for panel in panels:
                panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
                page.axes(panel, "distance d + 1, tokens" if layer == rows[-1] else "", "")
            panels[0].set_ylabel("mean attention weight", fontsize=8, color=page.colours["ink"])
        _legend(page)


def _rows(layers: int) -> list[int | None]:
    """Return the layers to draw: all, or `_ROWS` of them, evenly from the first to the last."""
    count = min(_ROWS, layers)
    return [round(place * (layers - 1) / max(1, count - 1)) for place in range(count)]


def _panel(
    page: Sheet,
    panel: Axes,
    lines: Sequence[AttentionLine],
    tokens: int,
    window: int,
    layer: int | None,
    causal: bool,
) -> None:
    page.ruled(panel)
    for line in lines:
        if layer is None or layer < line.layers:
            places, paid = line.binned(layer)
            panel.plot(places.numpy(), paid.numpy(), label=line.label, **page.line(line.number))
    even = even_attention(tokens, causal=causal)
    places = torch.arange(1, tokens)
    panel.plot(
        places.numpy(), even.numpy(), label=_EVEN, color=page.colours["faint"], linewidth=1.0,
        linestyle=(0, (1, 2)), zorder=1,
    )  # fmt: skip
    page.length_axis(panel, tokens)
    panel.set_yscale("log")
    if window < tokens:  # named where there is room, once
        page.mark(panel, window, "" if layer else "original window", vertical=True)
    page.name(panel, f"{tokens:,} tokens read" + ("" if layer is None else f", layer {layer}"))


def _legend(page: Sheet) -> None:
    """Name every line of the sheet once, beside it."""
    named: dict[str, Any] = {}
    for panel in page.panels:
        handles, labels = panel.get_legend_handles_labels()
        named |= {label: handle for handle, label in zip(handles, labels, strict=True) if label not in named}
    named[_EVEN] = named.pop(_EVEN)  # it comes last
    page.figure.legend(
        named.values(), named.keys(), loc="outside right upper", fontsize=8, frameon=False,
        labelcolor=page.colours["ink"],
    )  # fmt: skip
