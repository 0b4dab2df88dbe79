"use strict";
// Everything lives in one object. Settings s: shape, the name of one, and factor, the length of the text in windows.
const posswap = { given: JSON.parse(document.getElementById("settings").textContent) };

posswap.numbers = (() => {
  const range = (count) => Array.from({ length: count }, (_, i) => i);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const unique = (values) => [...new Set(values)];

  // The item whose distance is the least, the first of several.
  const nearest = (items, distance) => items.reduce((best, item) => (distance(item) < distance(best) ? item : best));

  // How far two numbers are apart, as a ratio.
  const apart = (one, other) => Math.abs(Math.log(one / other));

  return { range, clamp, unique, nearest, apart };
})();
