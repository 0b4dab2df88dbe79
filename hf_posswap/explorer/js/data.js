"use strict";
// The numbers of each picture: posswap.data(picture, scheme, settings). The page draws these and nothing else.
posswap.data = (() => {
  const { range, sum, unique, target, distances, places } = posswap.numbers;
  const { rotary, piecewise, bias, table } = posswap;
  const ROWS = 128, COLUMNS = 128, TURNS = 24;

  // Scores of the last query with the key d tokens before it, both of ones, for each head.
  const scores = (name, s) => {
    const at = distances(target(s));
    const size = Math.sqrt(s.dim);
    if (bias.NAMES.includes(name)) {
      return { distances: at, heads: bias.heads(name, s).map((add) => at.map((d) => size + add(target(s) - 1, d))) };
    }
    return { distances: at, heads: [at.map((d) => product(name, s, d))] };
  };

  const product = (name, s, d) => {
    if (name === "nope") return Math.sqrt(s.dim);
    const last = target(s) - 1;
    const parts = piecewise.NAMES.includes(name);
    const seen = parts ? piecewise.distance(name, s)(last, last - d) : d;
    const theta = parts ? rotary.plain(s.base, s.dim) : rotary.theta(name, s);
    const size = parts ? 1 : rotary.attention(name, s);
    const each = theta.map((angle, i) => 2 * Math.cos(angle * seen) * (parts ? 1 : rotary.decay(name, s, i, d)));
    return (size * size * sum(each)) / Math.sqrt(s.dim);
  };

  // The distance that each pair of query and key seems to have; null in the future.
  const relative = (name, s) => {
    const at = places(target(s));
    const seen = piecewise.NAMES.includes(name) ? piecewise.distance(name, s) : slowed(name, s);
    return { places: at, rows: at.map((i) => at.map((j) => (j > i ? null : seen(i, j)))) };
  };

  // Angles that are smaller by some share make distances seem smaller by it: told by the slowest pair that turns.
  const slowed = (name, s) => {
    const theta = rotary.theta(name, s);
    const last = theta.findLastIndex((angle) => angle > 0);
    const share = theta[last] / rotary.plain(s.base, s.dim)[last];
    return (i, j) => share * (i - j);
  };

  const biases = (name, s) => {
    const at = places(target(s));
    const chosen = unique([0, Math.floor(s.heads / 2), s.heads - 1]);
    const each = bias.heads(name, s);
    const matrix = (head) => at.map((i) => at.map((j) => (j > i ? null : each[head](i, i - j))));
    return { places: at, heads: chosen, matrices: chosen.map(matrix) };
  };

  const turning = (name, s) => {
    const pairs = s.dim / 2;
    const step = Math.max(1, Math.floor(s.window / TURNS));
    const chosen = unique([0, Math.floor(pairs / 2), pairs - 1]);
    const at = (pair) => range(TURNS).map((n) => n * (pair === 0 ? 1 : step));
    return chosen.map((pair) => ({ pair, positions: at(pair), points: rotary.turned(name, s, pair, at(pair)) }));
  };

  const waves = (name, s) => {
    const at = range(ROWS);
    return { places: at, rows: table.rows(s, at, Math.min(COLUMNS, s.heads * s.dim)) };
  };

  // The cosine of the first row with the row d after it; rows that are a window apart are among them.
  const similarity = (name, s) => {
    const ends = range(Math.floor((target(s) - 1) / s.window)).flatMap((k) => [-1, 0, 1].map((by) => (k + 1) * s.window + by));
    const at = unique([...distances(target(s)), ...ends.filter((d) => d < target(s))]).sort((a, b) => a - b);
    return { distances: at, values: at.map((d) => table.likeness(name, s, d)) };
  };

  const PICTURES = {
    wavelengths: (name, s) => rotary.wavelengths(name, s),
    scores,
    relative,
    bias: biases,
    turning,
    table: waves,
    similarity,
  };

  return (picture, name, s) => PICTURES[picture](name, s);
})();

// Which schemes have something to say in which picture.
posswap.takes = {
  wavelengths: posswap.rotary.NAMES,
  scores: [...posswap.rotary.NAMES, ...posswap.piecewise.NAMES, ...posswap.bias.NAMES, "nope"],
  relative: [...posswap.rotary.NAMES, ...posswap.piecewise.NAMES],
  bias: posswap.bias.NAMES,
  turning: posswap.rotary.NAMES,
  table: ["sinusoidal"],
  similarity: posswap.table.NAMES,
};
