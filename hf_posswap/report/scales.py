"""Linear and logarithmic axes and their ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 5.0, 10.0)
_LOG_STEPS = ((1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), (1.0, 2.0, 4.0, 6.0), (1.0, 2.0, 5.0), (1.0, 3.0))


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
        return _log_ticks(scale, wanted)
    raw = (scale.high - scale.low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in _STEPS if m * power >= raw * 0.999)
    first = math.ceil(scale.low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(scale.high / step + 1e-9) + 1)]


def _log_ticks(scale: Scale, wanted: int) -> list[float]:
    for steps in _LOG_STEPS:
        inside = [m * 10.0**e for e in range(-9, 12) for m in steps if scale.low <= m * 10.0**e <= scale.high]
        if len(inside) <= wanted:
            return inside
    decades = [10.0**e for e in range(-9, 300) if scale.low <= 10.0**e <= scale.high]
    return decades[:: -(-len(decades) // wanted)]


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
