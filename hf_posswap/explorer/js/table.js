"use strict";
// The sinusoidal table: sin and cos of position / base^(2i / width), one after the other.
posswap.table = (() => {
  const { range } = posswap.numbers;

  const row = (position, base, width, columns) =>
    range(columns).map((c) => {
      const angle = position * base ** (-(c - (c % 2)) / width);
      return c % 2 ? Math.cos(angle) : Math.sin(angle);
    });

  // The first columns of the rows of some positions; the width is that of all heads together.
  const rows = (s, positions, columns) => positions.map((p) => row(p, s.base, s.heads * s.dim, columns));

  return { rows };
})();
