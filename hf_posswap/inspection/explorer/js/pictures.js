"use strict";
// Each picture: from its numbers to what is shown.
posswap.pictures = (() => {
  const { lines, maps, data } = posswap;
  const { html, short, mark } = posswap.elements;

  // The selected schemes that have this picture.
  const subjects = (kind, chosen, s) =>
    chosen.map((style) => ({ style, ...data.picture(kind, style.name, s) })).filter(({ found }) => found !== undefined);

  const wavelengths = (place, all, { window, length }) => {
    const series = all.map(({ style, name, found }) => ({ style, name, points: found.map((value, k) => [k, value]) }));
    const values = all.flatMap(({ found }) => found.filter((value) => value !== null));
    const ends = [{ value: window, text: `original window, ${window}`, way: "across" }];
    lines.draw(place, {
      title: "Tokens in which each rotary pair completes a turn",
      x: { label: "pair, from the fastest to the slowest", kind: lines.plain, low: 0, high: Math.max(1, ...all.map(({ found }) => found.length - 1)) },
      y: { label: "tokens a turn", kind: lines.log, low: 5, high: Math.max(...values, length) * 1.5 },
      series,
      marks: length === window ? ends : [...ends, { value: length, text: `target, ${length}`, way: "across" }],
      hint: "Point at the picture, or focus it and use the arrow keys, to read values.",
      tell: (pair) => `pair ${pair}`,
    });
  };

  // A line over distances 0, 1, ... of a text, on a log axis.
  const byDistance = (place, { window, length }, chart) =>
    lines.draw(place, {
      x: { label: "distance d + 1, tokens", kind: lines.log, low: 1, high: length },
      marks: length > window ? [{ value: window, text: "original window", way: "up" }] : [],
      tell: (d) => `distance ${d - 1}`,
      ...chart,
    });

  const scores = (place, all, shape) => {
    const whole = Math.sqrt(shape.dim); // the score of a query with itself
    byDistance(place, shape, {
      title: "Attention score by distance",
      y: { label: "score, before the softmax", kind: lines.plain, low: -1.5 * whole, high: 1.7 * whole },
      series: all.map(({ style, name, found: { distances, mean, low, high } }) => ({
        style,
        name,
        points: distances.map((d, k) => [d + 1, mean[k]]),
        band: low ? distances.map((d, k) => [d + 1, low[k], high[k]]) : null,
      })),
      hint: "The last query and the key d tokens before it, both of ones. Lines are means of heads, bands all heads.",
    });
  };

  const relative = (place, all, { window, length }) => {
    const most = Math.max(1, ...all.map(({ found }) => found.high));
    const made = all.map(({ style, name, found }) => {
      const picture = maps.canvas(data.rows(found), 0, most, maps.AMOUNT, `distances that ${name} shows`);
      return maps.figure(style, name, picture, "down: query; to the right: key", maps.border(window, length));
    });
    place.replaceChildren(html("div", { class: "maps" }, ...made), maps.bar("0", `${short(most)} tokens`, maps.AMOUNT));
  };

  // Each scheme has colours of its own: learned ones begin with numbers that beside ALiBi's would be one colour.
  const bias = (place, all) =>
    place.replaceChildren(
      ...all.flatMap(({ style, name, found }) => {
        const made = found.maps.map((map, k) => {
          const heading = `${name}, head ${found.heads[k]}`;
          const picture = maps.canvas(data.rows(map), map.low, map.high, maps.AMOUNT, heading);
          return maps.figure(style, heading, picture, "down: query; to the right: key", null);
        });
        return [html("div", { class: "maps" }, ...made), maps.bar(short(found.maps[0].low), short(found.maps[0].high), maps.AMOUNT)];
      }),
    );

  const turning = (place, all) => {
    const made = all.flatMap(({ style, name, found }) =>
      found.map((one) => {
        const heading = `${name}, pair ${one.pair}`;
        const words = one.turn === null ? "it does not turn" : `${short(one.turn)} tokens a turn`;
        return maps.figure(style, heading, maps.turning(style, heading, one), `${words}; positions 0 to ${one.last}`, null);
      }),
    );
    place.replaceChildren(html("div", { class: "maps small" }, ...made), maps.bar("first position", "last position", maps.AMOUNT));
  };

  const table = (place, all) =>
    place.replaceChildren(
      ...all.flatMap(({ style, name, found }) => {
        const rows = data.rows(found);
        const axes = `down: positions 0 to ${rows.length - 1}; to the right: dimensions 0 to ${found.columns - 1}`;
        const picture = maps.canvas(rows, found.low, found.high, maps.SIGNED, `the table of ${name}`);
        return [html("div", { class: "maps wide" }, maps.figure(style, name, picture, axes, null)), maps.bar(short(found.low), short(found.high), maps.SIGNED)];
      }),
    );

  const similarity = (place, all, shape) =>
    byDistance(place, shape, {
      title: "Similarity of the first position and others",
      y: { label: "cosine of two rows", kind: lines.plain, low: -0.4, high: 1.05 },
      series: all.map(({ style, name, found }) => ({ style, name, points: found.distances.map((d, k) => [d + 1, found.values[k]]) })),
      hint: "The row of the first position, and the one d after it.",
    });

  const DRAW = { wavelengths, scores, relative, bias, turning, table, similarity };

  // Draw every picture of the page for the selected schemes.
  const drawAll = (chosen, s) => {
    const shape = { ...data.shape(s), length: data.step(s).length };
    for (const [kind, draw] of Object.entries(DRAW)) {
      const section = document.getElementById(kind);
      const all = subjects(kind, chosen, s);
      section.hidden = !all.length;
      if (!all.length) continue;
      draw(section.querySelector(".place"), all, shape);
      const said = all.map(({ style, name, said }) => html("li", {}, mark(style), `${name}: ${said}`));
      section.querySelector(".said").replaceChildren(...said);
    }
    const about = chosen.filter((style) => style.words);
    document.getElementById("words").replaceChildren(...about.map((style) => html("li", {}, mark(style), `${style.name}: ${style.words}`)));
    const refused = data.refusals(chosen.map((style) => style.name), s);
    document.getElementById("refused").replaceChildren(...refused.map((text) => html("p", { class: "warning" }, text)));
  };

  return { drawAll };
})();
