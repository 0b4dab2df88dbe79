"""Line charts as inline SVG, with linear and logarithmic axes and their ticks.

Each is drawn twice, wide and narrow; the style sheet shows the one that fits the screen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_posswap.comparison.report.looks import look, mark, shape
from hf_posswap.comparison.report.markup import Markup, join, tag
from hf_posswap.plotting.styles import SLIDING

_STEPS = (1.0, 2.0, 5.0, 10.0)
_LOG_STEPS = ((1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), (1.0, 2.0, 4.0, 6.0), (1.0, 2.0, 5.0), (1.0, 3.0))
_TOP, _RIGHT, _BOTTOM = 22, 14, 46


@dataclass(frozen=True)
class Scale:
    """Maps data from `low` to `high` to pixels from `start` to `stop`.

    Attributes:
        low: smallest value; above 0 if `log`.
        high: largest value, above `low`.
        start: pixel of `low`.
        stop: pixel of `high`.
        log: whether the scale is logarithmic.
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of `value`.

        Example:
            >>> Scale(1, 100, 0, 10)(1), Scale(1, 100, 0, 10, log=True)(10)
            (0.0, 5.0)
        """
        low, high, at = (map(math.log, (self.low, self.high, value))) if self.log else (self.low, self.high, value)
        return self.start + (self.stop - self.start) * (at - low) / (high - low)


def fit(values: Sequence[float], start: float, stop: float, *, log: bool = False, margin: float = 0.06) -> Scale:
    """Return a scale for `values` with a relative `margin` at both ends.

    Example:
        >>> fit([0.0, 10.0], 0, 100, margin=0.5)
        Scale(low=-5.0, high=15.0, start=0, stop=100, log=False)
    """
    low, high = min(values), max(values)
    if log:
        room = max((high / low) ** margin, 1.02)
        return Scale(low / room, high * room, start, stop, True)
    room = max((high - low) * margin, 1e-9 if high - low else 0.5)
    return Scale(low - room, high + room, start, stop)


def ticks(scale: Scale, wanted: int) -> list[float]:
    """Return about `wanted` round numbers within `scale`.

    Example:
        >>> ticks(Scale(0, 10, 0, 1), 5), ticks(Scale(3, 60, 0, 1, log=True), 5)
        ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [5.0, 10.0, 20.0, 50.0])
    """
    if scale.log and scale.high / scale.low > 2.5:
        for steps in _LOG_STEPS:
            inside = [m * 10.0**e for e in range(-9, 12) for m in steps if scale.low <= m * 10.0**e <= scale.high]
            if len(inside) <= wanted:
                return inside
        decades = [10.0**e for e in range(-9, 300) if scale.low <= 10.0**e <= scale.high]
        return decades[:: -(-len(decades) // wanted)]
    raw = (scale.high - scale.low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in _STEPS if m * power >= raw * 0.999)
    first = math.ceil(scale.low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(scale.high / step + 1e-9) + 1)]


def length_ticks(scale: Scale, wanted: int) -> list[float]:
    """Return at most `wanted` powers of two within the logarithmic `scale`.

    Example:
        >>> length_ticks(Scale(200, 3000, 0, 1, log=True), 8), length_ticks(Scale(200, 3000, 0, 1, log=True), 2)
        ([256.0, 512.0, 1024.0, 2048.0], [512.0, 2048.0])
    """
    inside = [2.0**k for k in range(40) if scale.low <= 2.0**k <= scale.high]
    while len(inside) > max(wanted, 1):
        inside = inside[::-2][::-1]
    return inside


def short_number(value: float) -> str:
    """Format `value` as a tick label.

    Example:
        >>> [short_number(v) for v in (0.25, 512, 8192, 131072, 1.5e6, -0.02, 20_000)]
        ['0.25', '512', '8k', '128k', '1.5M', '-0.02', '20k']
    """
    if value >= 1024 and value % 1024 == 0 and value < 2**20:
        return f"{value / 1024:g}k"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 10_000 and value % 1000 == 0:
        return f"{value / 1000:g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Dot:
    """One measured value.

    Attributes:
        x: position on the x axis, usually in tokens.
        y: the value.
        low: lower end of its interval, or None.
        high: upper end of its interval, or None.
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """The values of one model; `number` selects its colour, the same on all charts of a page."""

    name: str
    number: int
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class _Size:
    kind: str
    width: int
    height: int
    left: int
    ticks: int


@dataclass(frozen=True)
class Axes:
    """The axes and annotations of a chart.

    Attributes:
        x: name of the x axis.
        y: name of the y axis.
        log_y: whether the y axis is logarithmic.
        window: where to draw the original window, or None.
        edge: the label of the window.
        zero: whether y = 0 is included and marked by a line.
        log_x: whether the x axis is logarithmic to base 2.
        name_x: formats a value of x in tooltips.
        name_y: formats a value of y in tooltips.
        right: formats the ticks of y once more on the right, in another unit; None: no labels there.
        zero_name: the label of the line at zero, or None.
    """

    x: str
    y: str
    log_y: bool = False
    window: float | None = None
    edge: str = "original window"
    zero: bool = False
    log_x: bool = True
    name_x: Callable[[float], str] = lambda x: f"{x:,.0f} tokens"
    name_y: Callable[[float], str] = lambda y: f"{y:.4g}"
    right: Callable[[float], str] | None = None
    zero_name: str | None = None

    def margin(self, size: _Size) -> int:
        """Return the right margin in pixels."""
        return _RIGHT if self.right is None else size.left


_SIZES = (_Size("wide", 760, 380, 62, 7), _Size("narrow", 360, 300, 50, 5))


def line_chart(lines: Sequence[Line], axes: Axes) -> Markup:
    """Return the chart with its legend.

    Args:
        lines: at least one, each with at least one dot.
        axes: the axes and annotations.

    Example:
        >>> line = Line("<base>", 0, (Dot(512, 3.0, 2.9, 3.1), Dot(1024, 4.0)))
        >>> chart = line_chart([line], Axes("length", "perplexity", window=512))
        >>> chart.count('class="plot'), chart.count("<base>"), chart.count("original window")
        (2, 0, 2)
    """
    keys = [tag("button", mark(line.number), line.name, type="button", data_model=line.number) for line in lines]
    legend = tag("div", *keys, class_="legend")
    return tag("div", legend, *(_draw(lines, axes, size) for size in _SIZES), class_="chart")


def _draw(lines: Sequence[Line], axes: Axes, size: _Size) -> Markup:
    dots = [dot for line in lines for dot in line.dots]
    y_values = [v for dot in dots for v in (dot.y, dot.low, dot.high) if v is not None and (v > 0 or not axes.log_y)]
    x_values = [dot.x for dot in dots] + ([axes.window] if axes.window else [])
    x = fit(x_values, size.left, size.width - axes.margin(size), log=axes.log_x, margin=0.04)
    y = fit(y_values + ([0.0] if axes.zero else []), size.height - _BOTTOM, _TOP, log=axes.log_y)
    return tag(
        "svg",
        _frame(axes, size, x, y),
        *(_band(line, x, y) for line in lines if len(line.dots) > 1 and line.number != SLIDING),
        *(_line(line, x, y) for line in sorted(lines, key=lambda line: line.number != SLIDING)),
        _zero_label(axes, size, y),
        _strips(lines, axes, size, x),
        class_=f"plot {size.kind}",
        viewBox=f"0 0 {size.width} {size.height}",
        role="img",
        aria_label=f"{axes.y} by {axes.x}: {', '.join(line.name for line in lines)}",
    )


def _frame(axes: Axes, size: _Size, x: Scale, y: Scale) -> Markup:
    """Return grid, ticks, axis titles, and the original window."""
    bottom, right = size.height - _BOTTOM, size.width - axes.margin(size)
    elements: list[Markup] = []
    for value in ticks(y, size.ticks):
        css_class = "zero" if axes.zero and value == 0 else "grid"
        elements.append(tag("line", x1=size.left, x2=right, y1=_px(y(value)), y2=_px(y(value)), class_=css_class))
        label = short_number(value)
        elements.append(tag("text", label, x=size.left - 8, y=_px(y(value) + 4), class_="tick", text_anchor="end"))
        if axes.right is not None:
            elements.append(tag("text", axes.right(value), x=right + 8, y=_px(y(value) + 4), class_="tick"))
    for value in length_ticks(x, size.ticks + 2) if axes.log_x else ticks(x, size.ticks):
        elements.append(tag("line", x1=_px(x(value)), x2=_px(x(value)), y1=bottom, y2=bottom + 5, class_="axis"))
        label = short_number(value)
        elements.append(tag("text", label, x=_px(x(value)), y=bottom + 19, class_="tick", text_anchor="middle"))
    elements.append(tag("line", x1=size.left, x2=right, y1=bottom, y2=bottom, class_="axis"))
    middle = (size.left + right) / 2
    elements.append(tag("text", axes.x, x=middle, y=size.height - 8, class_="name", text_anchor="middle"))
    elements.append(tag("text", axes.y, x=4, y=12, class_="name"))
    if axes.window:
        at = x(axes.window)
        beyond = tag("rect", x=_px(at), y=_TOP, width=_px(right - at), height=bottom - _TOP, class_="beyond")
        edge = tag("line", x1=_px(at), x2=_px(at), y1=_TOP, y2=bottom, class_="window")
        fits = right - at > 110
        label = tag(
            "text",
            axes.edge,
            x=_px(at + 6 if fits else at - 6),
            y=bottom - 8,
            class_="window-name",
            text_anchor="start" if fits else "end",
        )
        elements.append(join(beyond, edge, label))
    return join(*elements)


def _zero_label(axes: Axes, size: _Size, y: Scale) -> Markup | None:
    """Return the name of the line at zero, which is legible over lines and bands."""
    if not (axes.zero and axes.zero_name):
        return None
    right = size.width - axes.margin(size)
    return tag("text", axes.zero_name, x=right - 6, y=_px(y(0.0) - 6), class_="zero-name", text_anchor="end")


def _band(line: Line, x: Scale, y: Scale) -> Markup | None:
    dots = [dot for dot in line.dots if dot.low is not None and dot.high is not None]
    if len(dots) < 2:
        return None
    floor = y.low
    upper = [(dot.x, dot.high) for dot in dots]
    lower = [(dot.x, max(dot.low or 0.0, floor) if y.log else dot.low) for dot in reversed(dots)]
    points = " ".join(f"{_px(x(at))},{_px(y(value))}" for at, value in upper + lower if value is not None)
    return tag("path", d=f"M{points}Z", class_=f"band {look(line.number)}", data_m=line.number)


def _line(line: Line, x: Scale, y: Scale) -> Markup:
    points = " ".join(f"{_px(x(dot.x))},{_px(y(dot.y))}" for dot in line.dots)
    marks = [
        tag(
            "path",
            d=shape(line.number),
            transform=f"translate({_px(x(dot.x))},{_px(y(dot.y))})",
            data_x=f"{dot.x:g}",
            class_="dot",
        )
        for dot in line.dots
    ]
    stroke = tag("path", d=f"M{points}", class_="stroke")
    return tag("g", stroke, _whisker(line, x, y), *marks, class_=f"line {look(line.number)}", data_m=line.number)


def _whisker(line: Line, x: Scale, y: Scale) -> Markup | None:
    """Return the interval of a line's only dot, which has no band."""
    dot = line.dots[0]
    if len(line.dots) > 1 or dot.low is None or dot.high is None:
        return None
    at, low = _px(x(dot.x)), max(dot.low, y.low) if y.log else dot.low
    return tag("path", d=f"M{at},{_px(y(low))} {at},{_px(y(dot.high))}", class_="whisker")


def _strips(lines: Sequence[Line], axes: Axes, size: _Size, x: Scale) -> Markup:
    """Return an invisible strip for each x, which carries the tooltip."""
    x_values = sorted({dot.x for line in lines for dot in line.dots})
    edges = [
        size.left,
        *((x(a) + x(b)) / 2 for a, b in zip(x_values, x_values[1:], strict=False)),
        size.width - axes.margin(size),
    ]
    strips = []
    for value, left, right in zip(x_values, edges, edges[1:], strict=False):
        rows = [[line.number, line.name, _value_text(d, axes)] for line in lines for d in line.dots if d.x == value]
        strips.append(
            tag(
                "rect",
                x=_px(left),
                y=_TOP,
                width=_px(right - left),
                height=size.height - _BOTTOM - _TOP,
                class_="strip",
                tabindex=0,
                data_x=f"{value:g}",
                data_at=_px(x(value)),
                data_tip=json.dumps([axes.name_x(value), rows]),
            )
        )
    return join(*strips)


def _value_text(dot: Dot, axes: Axes) -> str:
    if dot.low is None or dot.high is None:
        return axes.name_y(dot.y)
    return f"{axes.name_y(dot.y)} [{axes.name_y(dot.low)}, {axes.name_y(dot.high)}]"


def _px(value: float) -> str:
    return f"{value:.1f}"
