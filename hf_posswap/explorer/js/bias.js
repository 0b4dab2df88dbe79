"use strict";
// Schemes that add a number to the score, by head and distance.
posswap.bias = (() => {
  const { range, factor } = posswap.numbers;
  const RATE = 1, SLOPE = 0.5; // KERPLE's r1 and r2 are learned: here one of each stands for all heads

  const slopes = (heads) => {
    const power = 2 ** Math.floor(Math.log2(heads));
    const own = range(power).map((h) => 2 ** ((-8 * (h + 1)) / power));
    const finer = range(2 * power).map((h) => 2 ** ((-4 * (h + 1)) / power));
    return [...own, ...finer.filter((_, h) => h % 2 === 0).slice(0, heads - power)];
  };

  const BIAS = {
    alibi: (s) => slopes(s.heads).map((slope) => (d) => -slope * d),
    alibi_interpolated: (s) => slopes(s.heads).map((slope) => (d) => (-slope / factor(s)) * d),
    kerple: (s) => range(s.heads).map(() => (d) => -RATE * Math.log1p(SLOPE * d)),
  };

  // For each head a function of the distance.
  const heads = (name, s) => BIAS[name](s);

  return { NAMES: Object.keys(BIAS), heads, slopes, KERPLE: [RATE, SLOPE] };
})();
