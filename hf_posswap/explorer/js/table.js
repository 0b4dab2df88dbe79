"use strict";
// Position tables: sin and cos of position / base^(2i / width), one after the other; and learned ones made longer.
posswap.table = (() => {
  const { range, sum, target } = posswap.numbers;
  const width = (s) => s.heads * s.dim; // of all heads together

  const row = (position, s, columns) =>
    range(columns).map((c) => {
      const angle = position * s.base ** (-(c - (c % 2)) / width(s));
      return c % 2 ? Math.cos(angle) : Math.sin(angle);
    });

  // The first columns of the rows of some positions.
  const rows = (s, positions, columns) => positions.map((p) => row(p, s, columns));

  // Between the first old row and the second lie the new ones that have something of the first.
  const between = (s, d) => {
    const place = (d * s.window) / target(s);
    return place < 1 ? (1 - place) / Math.hypot(1 - place, place) : 0;
  };

  const LIKENESS = {
    sinusoidal: (s, d) => sum(range(width(s) / 2).map((i) => Math.cos(d * s.base ** ((-2 * i) / width(s))))) / (width(s) / 2),
    learned: (s, d) => (d % s.window === 0 ? 1 : 0),
    learned_interpolated: between,
  };

  // The cosine of the first row with the row d after it; rows of a learned table are alike to none but themselves.
  const likeness = (name, s, d) => LIKENESS[name](s, d);

  return { NAMES: Object.keys(LIKENESS), rows, likeness };
})();
