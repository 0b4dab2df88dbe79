"""Attention paid by distance: one line per model, one column per length, and optionally one row per layer."""

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
"""Maximum number of layers drawn: first, last, and evenly between."""
_EVEN = "all keys alike"
_LEAST = 1e-7
"""Smaller weights are drawn as no attention: they are below the float32 precision of a sum that is 1."""


@dataclass(frozen=True)
class AttentionLine:
    """The attention that one model pays by distance, at one length.

    Attributes:
        label: the model's label.
        number: the model's number, which selects its style.
        totals: attention paid at distances d = 0, ..., N - 2, summed over pairs, [layers, N - 1].
        pairs: the number of query-key pairs at each distance, [N - 1].
    """

    label: str
    number: int
    totals: Tensor
    pairs: Tensor

    @property
    def layers(self) -> int:
        """The number of attention layers."""
        return len(self.totals)

    def binned(self, layer: int | None = None) -> tuple[Tensor, Tensor]:
        """Return distances + 1, the geometric middle of each bin, and the mean attention weight there.

        Near distances have one bin each; farther ones share bins, two per octave. A bin without attention is NaN,
        because the axis is logarithmic.

        Args:
            layer: index of the layer; None: the mean of all layers.

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
    """Return the edges of bins of distance + 1, from 1 to `count` + 1, two per octave.

    Example:
        >>> bin_edges(20)
        [1, 2, 3, 4, 6, 8, 12, 16, 21]
    """
    powers = (2 ** (step / _PER_OCTAVE) for step in range(math.ceil(_PER_OCTAVE * math.log2(count + 1))))
    return [*sorted({math.ceil(edge - 1e-9) for edge in powers if edge <= count}), count + 1]


def even_attention(tokens: int, *, causal: bool) -> Tensor:
    """Return the mean weight of keys at distances 0, ..., tokens - 2 under uniform attention.

    As in `AttentionLine`, the first token does not count as a query or key, but it receives its share of attention.

    Example:
        >>> even_attention(4, causal=True).round(decimals=3).tolist()
        [0.361, 0.292, 0.25]
    """
    if not causal:
        return torch.full((tokens - 1,), 1 / tokens, dtype=torch.float64)
    each = 1 / torch.arange(2, tokens + 1, dtype=torch.float64)  # weights of queries 1, 2, ..., which see i + 1 keys
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
        lines: the lines by number of tokens read; each number is one column.
        window: the original window in tokens, drawn as a dashed line.
        path: the .png file; an .svg is written next to it.
        below: a caption under the picture that names the data.
        causal: whether tokens attend only to earlier tokens.
        by_layer: draw one row per layer, at most six; otherwise one row with the mean over layers.
        dark: use colours for a dark page.

    Raises:
        DataError: there are no lines.
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> line = AttentionLine("rope", 0, torch.rand(2, 63), torch.arange(63, 0, -1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_attention({64: [line]}, 64, Path(folder) / "a.png", below="on one text")
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['a.png', 'a.svg']
    """
    columns = {tokens: model_lines for tokens, model_lines in lines.items() if model_lines}
    if not columns:
        raise DataError("a picture of attention needs a line, got none.")
    deepest = max(line.layers for model_lines in columns.values() for line in model_lines)
    rows: list[int | None] = _rows(deepest) if by_layer else [None]
    height = 3.2 if len(rows) == 1 else 2.0
    with sheet(
        path, "Attention paid by distance", below, rows=len(rows), columns=len(columns), height=height, dark=dark
    ) as page:
        for row, layer in enumerate(rows):
            panels = page.panels[row * len(columns) : (row + 1) * len(columns)]
            for panel, (tokens, model_lines) in zip(panels, columns.items(), strict=True):
                _panel(page, panel, model_lines, tokens, window, layer, causal)
            limits = [panel.get_ylim() for panel in panels]
            for panel in panels:
                panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
                page.axes(panel, "distance d + 1, tokens" if layer == rows[-1] else "", "")
            panels[0].set_ylabel("mean attention weight", fontsize=8, color=page.colours["ink"])
        _legend(page)


def _rows(layers: int) -> list[int | None]:
    """Return the layers to draw: all, or `_ROWS` of them, evenly from the first to the last."""
    count = min(_ROWS, layers)
    return [round(index * (layers - 1) / max(1, count - 1)) for index in range(count)]


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
            distances, paid = line.binned(layer)
            panel.plot(distances.numpy(), paid.numpy(), label=line.label, **page.line(line.number))
    even = even_attention(tokens, causal=causal)
    distances = torch.arange(1, tokens)
    panel.plot(
        distances.numpy(), even.numpy(), label=_EVEN, color=page.colours["faint"], linewidth=1.0,
        linestyle=(0, (1, 2)), zorder=1,
    )  # fmt: skip
    page.length_axis(panel, tokens)
    panel.set_yscale("log")
    if window < tokens:  # labelled once
        page.mark(panel, window, "" if layer else "original window", vertical=True)
    page.name(panel, f"{tokens:,} tokens read" + ("" if layer is None else f", layer {layer}"))


def _legend(page: Sheet) -> None:
    """Draw one legend of all lines to the right of the sheet."""
    handle_by_label: dict[str, Any] = {}
    for panel in page.panels:
        handles, labels = panel.get_legend_handles_labels()
        handle_by_label |= {
            label: handle for handle, label in zip(handles, labels, strict=True) if label not in handle_by_label
        }
    handle_by_label[_EVEN] = handle_by_label.pop(_EVEN)  # last in the legend
    page.figure.legend(
        handle_by_label.values(), handle_by_label.keys(), loc="outside right upper", fontsize=8, frameon=False,
        labelcolor=page.colours["ink"],
    )  # fmt: skip
