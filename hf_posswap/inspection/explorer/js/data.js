"use strict";
// What Python computed, unpacked once: the page looks it up and draws it, and computes nothing about positions.
posswap.data = (() => {
  const NOTHING = 32, FIRST = 0x100, LAST = 254; // characters of a map: an empty cell, the lowest number and the steps to the highest
  const { unique } = posswap.numbers;
  let all = null;

  const load = async () => {
    const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    all = JSON.parse(await new Response(stream).text());
  };

  const shapes = () => all.shapes;
  const shape = (s) => all.shapes.find((each) => each.name === s.shape);
  const step = (s) => shape(s).steps.find((each) => each.factor === s.factor);

  // A picture of a scheme: its name there, the numbers, and a sentence about them; null where it has none.
  const picture = (kind, name, s) => {
    const drawn = step(s).drawn[name];
    if (!drawn.pictures || !(kind in drawn.pictures)) return null;
    const [place, said] = drawn.pictures[kind];
    return { name: drawn.name, found: all.pool[place], said };
  };

  const refusals = (names, s) => {
    const told = names.map((name) => [name, step(s).drawn[name].refused]).filter(([, why]) => why !== undefined);
    return unique(told.map(([name, why]) => `${name}: ${why}`));
  };

  // The numbers of a map, row by row; null where it has none.
  const rows = ({ low, high, columns, cells }) => {
    const values = Array.from(cells, (_, k) => {
      const code = cells.charCodeAt(k);
      return code === NOTHING ? null : low + ((code - FIRST) / LAST) * (high - low);
    });
    return Array.from({ length: values.length / columns }, (_, y) => values.slice(y * columns, (y + 1) * columns));
  };

  return { load, shapes, shape, step, picture, refusals, rows };
})();
