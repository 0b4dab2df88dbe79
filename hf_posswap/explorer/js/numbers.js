"use strict";
// Everything lives in one object. Settings s: base, factor, window (tokens of the model), heads, dim (of a head).
const posswap = { given: JSON.parse(document.getElementById("settings").textContent) };

posswap.numbers = (() => {
  const range = (count) => Array.from({ length: count }, (_, i) => i);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const unique = (values) => [...new Set(values)];

  // Half to even, as Python rounds.
  const round = (value) => {
    const whole = Math.floor(value);
    const rest = value - whole;
    return rest > 0.5 || (rest === 0.5 && whole % 2 !== 0) ? whole + 1 : whole;
  };

  // The length after the swap, in tokens, and the factor that it is of the window.
  const target = (s) => round(s.window * s.factor);
  const factor = (s) => target(s) / s.window;

  // Whole distances 0 ... length - 1, evenly spread in the logarithm of d + 1.
  const distances = (length, points = 160) =>
    unique(range(points).map((i) => Math.round(length ** (i / (points - 1))) - 1));

  // Whole positions 0 ... length - 1, evenly spread.
  const places = (length, side = 96) => {
    const count = Math.min(side, length);
    return count < 2 ? [0] : unique(range(count).map((i) => Math.round((i * (length - 1)) / (count - 1))));
  };

  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // float32 numbers, as Python packed them.
  const unpacked = (text) => new Float32Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);

  return { unpacked, range, clamp, unique, round, target, factor, distances, places, sum };
})();

// What the scheme's own code would refuse, too.
posswap.Refused = class extends Error {};
