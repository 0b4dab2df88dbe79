"use strict";
// Schemes that add a number to the score: for each head a function of the query's position and the distance.
posswap.bias = (() => {
  const { range, factor, sum, unpacked } = posswap.numbers;
  const { kerple: kerpleDraws, fire: fireDraws, t5: t5Draws, buckets } = posswap.given.beginnings;
  const LEAST = 0.01, HIGHEST = [2, 1]; // where KERPLE's r1 and r2 begin
  const WIDTH = 32, RATE = 0.1, THRESHOLD = 512, SHARE = 0.25, EPSILON = 1e-6; // FIRE's network, c, L and that of a short window

  const slopes = (heads) => {
    const power = 2 ** Math.floor(Math.log2(heads));
    const own = range(power).map((h) => 2 ** ((-8 * (h + 1)) / power));
    const finer = range(2 * power).map((h) => 2 ** ((-4 * (h + 1)) / power));
    return [...own, ...finer.filter((_, h) => h % 2 === 0).slice(0, heads - power)];
  };

  const kerple = (s) => {
    const draws = unpacked(kerpleDraws);
    const begun = (which, h) => LEAST + draws[which * s.heads + h] * (HIGHEST[which] - LEAST);
    return range(s.heads).map((h) => (_, d) => -begun(0, h) * Math.log1p(begun(1, h) * d));
  };

  // The network 1 -> WIDTH -> heads: its hidden weights, then the hidden biases, a row a head, and a number a head.
  const fire = (s) => {
    const draws = unpacked(fireDraws);
    const [rows, ends] = [2 * WIDTH, 2 * WIDTH + WIDTH * s.heads];
    const far = (length) => Math.log1p(RATE * length);
    const limit = Math.min(THRESHOLD, SHARE * s.window);
    const hidden = (x) => range(WIDTH).map((w) => Math.max(0, draws[w] * x + draws[WIDTH + w]));
    return range(s.heads).map((h) => (i, d) => {
      const out = hidden(far(d) / (far(Math.max(i, limit)) + EPSILON)).map((value, w) => value * draws[rows + WIDTH * h + w]);
      return (sum(out) + draws[ends + h]) / Math.sqrt(WIDTH);
    });
  };

  const t5 = (s) => {
    const draws = unpacked(t5Draws);
    return range(s.heads).map((h) => (_, d) => draws[buckets[Math.min(d, buckets.length - 1)] * s.heads + h]);
  };

  const BIAS = {
    alibi: (s) => slopes(s.heads).map((slope) => (_, d) => -slope * d),
    alibi_interpolated: (s) => slopes(s.heads).map((slope) => (_, d) => (-slope / factor(s)) * d),
    kerple,
    fire,
    t5: (s) => range(s.heads).map(() => () => 0),
    t5_random: t5,
  };

  const heads = (name, s) => BIAS[name](s);

  return { NAMES: Object.keys(BIAS), heads };
})();
