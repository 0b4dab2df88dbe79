"use strict";
// Schemes that turn queries and keys by fixed angles: theta_i, radians a token, of the dim / 2 pairs of a head.
posswap.rotary = (() => {
  const { range, clamp, factor, target } = posswap.numbers;
  const FAST = 32, SLOW = 1; // turns within the window: pairs above are kept, pairs below interpolated
  const LOW = 1, HIGH = 4; // Llama 3's bounds of the same
  const SHARE = 0.75; // of the pairs that p-RoPE turns
  const GAMMA = 0.4, SCALE = 512; // of xPos

  const plain = (base, dim) => range(dim / 2).map((i) => 1 / base ** ((2 * i) / dim));
  const stretched = (s, growth) => {
    if (s.dim < 4) throw new posswap.Refused("needs at least 4 dimensions a head");
    return plain(s.base * growth ** (s.dim / (s.dim - 2)), s.dim);
  };

  // The index, a fraction, of the pair that turns so often within the window.
  const correction = (s, turns) => (s.dim * Math.log(s.window / (turns * 2 * Math.PI))) / (2 * Math.log(s.base));

  const byParts = (s) => {
    const low = Math.max(Math.floor(correction(s, FAST)), 0);
    let high = Math.min(Math.ceil(correction(s, SLOW)), s.dim - 1);
    if (low > high) throw new posswap.Refused("no pair turns between 1 and 32 times within the window");
    if (low === high) high += 0.001;
    return plain(s.base, s.dim).map((theta, i) => {
      const ramp = clamp((i - low) / (high - low), 0, 1);
      return (ramp * theta) / factor(s) + (1 - ramp) * theta;
    });
  };

  const llama3 = (s) =>
    plain(s.base, s.dim).map((theta) => {
      const kept = clamp(((s.window * theta) / (2 * Math.PI) - LOW) / (HIGH - LOW), 0, 1);
      return ((1 - kept) * theta) / factor(s) + kept * theta;
    });

  // Divisors that rise evenly from 1 to the factor stand for those that a search finds.
  const divided = (s) => {
    const pairs = s.dim / 2;
    return plain(s.base, s.dim).map((theta, i) => theta / (1 + ((factor(s) - 1) * i) / Math.max(1, pairs - 1)));
  };

  const shared = (s) => {
    const kept = Math.floor(SHARE * (s.dim / 2) + 1e-9);
    if (kept === 0) throw new posswap.Refused("p = 0.75 of the pairs is none");
    return plain(s.base, s.dim).map((theta, i) => (i < kept ? theta : 0));
  };

  const THETA = {
    rope: (s) => plain(s.base, s.dim),
    linear: (s) => plain(s.base, s.dim).map((theta) => theta / factor(s)),
    ntk: (s) => stretched(s, factor(s)),
    dynamic: (s) => stretched(s, 1 + (factor(s) * (target(s) - s.window)) / s.window),
    ntk_by_parts: byParts,
    yarn: byParts,
    llama3,
    longrope: divided,
    p_rope: shared,
    xpos: (s) => plain(s.base, s.dim),
  };

  const theta = (name, s) => THETA[name](s);

  // The factor on cos and sin.
  const attention = (name, s) => {
    const grown = factor(s);
    if (name === "yarn" && grown > 1) return 0.1 * Math.log(grown) + 1;
    return name === "longrope" ? Math.sqrt(1 + Math.log(grown) / Math.log(s.window)) : 1;
  };

  // What a pair's product keeps at distance d: 1, or xPos's decay.
  const decay = (name, s, i, d) => {
    if (name !== "xpos") return 1;
    return (((2 * i) / s.dim + GAMMA) / (1 + GAMMA)) ** (d / SCALE);
  };

  const wavelengths = (name, s) => theta(name, s).map((angle) => (angle > 0 ? (2 * Math.PI) / angle : null));

  // A vector along the first dimension of a pair, as it is at each of some positions.
  const turned = (name, s, pair, positions) => {
    const angle = theta(name, s)[pair];
    const size = attention(name, s);
    return positions.map((p) => [size * Math.cos(angle * p), size * Math.sin(angle * p)]);
  };

  return { NAMES: Object.keys(THETA), plain, theta, attention, decay, wavelengths, turned };
})();
