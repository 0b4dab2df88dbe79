"use strict";
// Schemes that give near and far keys other distances, with the model's own angles: the distance that attention sees.
posswap.piecewise = (() => {
  const { target } = posswap.numbers;

  const near = (s) => Math.max(1, Math.floor(s.window / 4));

  const selfExtend = (s) => {
    const w = near(s);
    const group = Math.max(2, Math.ceil((target(s) - w) / (s.window - w)));
    const shift = w - Math.floor(w / group);
    return (i, j) => (i - j < w ? i - j : Math.floor(i / group) - Math.floor(j / group) + shift);
  };

  const leaky = (s) => {
    const w = near(s);
    const slowdown = Math.max(1, (target(s) - w) / (s.window - w));
    return (i, j) => (i - j < w ? i - j : (i - w) / slowdown + w - j / slowdown);
  };

  const dualChunk = (s) => {
    const chunk = Math.max(2, Math.floor((3 * s.window) / 4));
    const size = chunk - Math.max(1, Math.floor(s.window / 8));
    return (i, j) => {
      const apart = Math.floor(i / size) - Math.floor(j / size);
      const query = apart === 0 ? i % size : apart === 1 ? Math.min((i % size) + size, chunk) : Math.min(2 * size - 1, chunk);
      return query - (j % size);
    };
  };

  const DISTANCE = {
    self_extend: selfExtend,
    rerope: (s) => (i, j) => Math.min(i - j, near(s)),
    leaky_rerope: leaky,
    dual_chunk: dualChunk,
  };

  // A function of the positions of query i and key j <= i.
  const distance = (name, s) => DISTANCE[name](s);

  return { NAMES: Object.keys(DISTANCE), distance };
})();
