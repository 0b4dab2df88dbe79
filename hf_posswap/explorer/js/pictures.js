"use strict";
// Each picture: from its numbers to what is shown, and what is to be seen in it, in words.
posswap.pictures = (() => {
  const { lines, maps, data, takes } = posswap;
  const { html, short, mark } = posswap.elements;
  const { target, sum } = posswap.numbers;
  const FLOOR = -30;

  // The chosen schemes that have something to say; what a scheme refuses is said, and not drawn.
  const subjects = (picture, chosen, s, refused) =>
    chosen.filter((style) => takes[picture].includes(style.name)).flatMap((style) => {
      try {
        return [{ style, name: style.title, found: data(picture, style.name, s) }];
      } catch (error) {
        if (!(error instanceof posswap.Refused)) throw error;
        refused.push(`${style.title}: ${error.message} with these settings.`);
        return [];
      }
    });

  const wavelengths = (place, all, s) => {
    const series = all.map(({ style, name, found }) => ({ style, name, points: found.map((value, k) => [k, value]) }));
    const values = all.flatMap(({ found }) => found.filter((value) => value !== null));
    const length = target(s);
    const window = [{ value: s.window, text: `original window, ${s.window}`, way: "across" }];
    lines.draw(place, {
      title: "Tokens in which each rotary pair completes a turn",
      x: { label: "pair, from the fastest to the slowest", kind: lines.plain, low: 0, high: s.dim / 2 - 1 || 1 },
      y: { label: "tokens a turn", kind: lines.log, low: 5, high: Math.max(...values, length) * 1.5 },
      series,
      marks: length === s.window ? window : [...window, { value: length, text: `target, ${length}`, way: "across" }],
      hint: "Point at the picture, or focus it and use the arrow keys, to read values.",
      tell: (pair) => `pair ${pair}`,
    });
    return all.map(({ name, found }) => {
      const never = (tokens) => found.filter((value) => value === null || value > tokens).length;
      return `${name}: ${never(s.window)} of ${found.length} pairs complete no turn within ${s.window} tokens, ${never(length)} none within ${length}`;
    });
  };

  const mean = (heads, k) => sum(heads.map((values) => values[k])) / heads.length;

  const scores = (place, all, s) => {
    const whole = Math.sqrt(s.dim);
    const series = all.map(({ style, name, found: { distances, heads } }) => ({
      style,
      name,
      points: distances.map((d, k) => [d + 1, mean(heads, k)]),
      band: heads.length > 1 ? distances.map((d, k) => [d + 1, Math.min(...heads.map((one) => one[k])), Math.max(...heads.map((one) => one[k]))]) : null,
    }));
    lines.draw(place, {
      title: "Attention score by distance",
      x: { label: "distance d + 1, tokens", kind: lines.log, low: 1, high: target(s) },
      y: { label: "score, before the softmax", kind: lines.plain, low: -1.5 * whole, high: 1.7 * whole },
      series,
      marks: target(s) > s.window ? [{ value: s.window, text: "original window", way: "up" }] : [],
      hint: "The last query and the key d tokens before it, both of ones. Lines are means of heads, bands all heads.",
      tell: (d) => `distance ${d - 1}`,
    });
    return all.map(({ name, found: { distances, heads } }) => {
      const at = [0, distances.findLastIndex((d) => d < s.window), distances.length - 1];
      return `${name}: ${at.map((k) => `${mean(heads, k).toFixed(2)} at ${distances[k]}`).join(", ")}`;
    });
  };

  const relative = (place, all, s) => {
    const flat = all.map(({ found }) => found.rows.flat().filter((value) => value !== null));
    const most = Math.max(1, ...flat.map((values) => values.reduce((high, value) => Math.max(high, value), 0)));
    const line = () => maps.border(s.window, target(s));
    const made = all.map(({ style, name, found }) =>
      maps.figure(style, name, maps.canvas(found.rows, 0, most, maps.AMOUNT, `distances that ${name} shows`), "down: query; to the right: key", line()),
    );
    place.replaceChildren(html("div", { class: "maps" }, ...made), maps.bar("0", `${short(most)} tokens`, maps.AMOUNT));
    return all.map(({ name }, k) => `${name}: the farthest seems ${short(flat[k].reduce((high, value) => Math.max(high, value), 0))} tokens away, of ${target(s) - 1}`);
  };

  const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

  // Each scheme has colours of its own: learned ones begin with numbers that beside ALiBi's would be one colour.
  const bias = (place, all, s) => {
    const ends = all.map(({ found }) => extent(found.matrices.flat(2).filter((value) => value !== null)));
    const drawn = all.flatMap(({ style, name, found }, k) => {
      const [low, high] = [Math.max(ends[k][0], FLOOR), ends[k][1]];
      const made = found.matrices.map((rows, at) => {
        const heading = `${name}, head ${found.heads[at]}`;
        return maps.figure(style, heading, maps.canvas(rows, low === high ? low - 1 : low, high, maps.AMOUNT, heading), "down: query; to the right: key", null);
      });
      return [html("div", { class: "maps" }, ...made), maps.bar(short(low), short(high), maps.AMOUNT)];
    });
    place.replaceChildren(...drawn);
    return all.map(({ name }, k) => `${name}: from ${ends[k].map(short).join(" to ")} in the heads shown`);
  };

  const turning = (place, all, s) => {
    const made = all.flatMap(({ style, name, found }) =>
      found.map((one) => {
        const turn = data("wavelengths", style.name, s)[one.pair];
        const words = turn === null ? "it does not turn" : `${short(turn)} tokens a turn`;
        return maps.figure(style, `${name}, pair ${one.pair}`, maps.turning(style, `${name}, pair ${one.pair}`, one), `${words}; positions 0 to ${one.positions.at(-1)}`, null);
      }),
    );
    place.replaceChildren(html("div", { class: "maps small" }, ...made), maps.bar("first position", "last position", maps.AMOUNT));
    return all.map(({ style, name }) => {
      const slowest = data("wavelengths", style.name, s).findLast((value) => value !== null);
      return `${name}: within the window the slowest pair that turns makes ${short(s.window / slowest)} of a turn`;
    });
  };

  const table = (place, all, s) => {
    const made = all.map(({ style, name, found }) =>
      maps.figure(style, name, maps.canvas(found.rows, -1, 1, maps.SIGNED, `the table of ${name}`), `down: positions 0 to ${found.places.at(-1)}; to the right: dimensions 0 to ${found.rows[0].length - 1}`, null),
    );
    place.replaceChildren(html("div", { class: "maps wide" }, ...made), maps.bar("-1", "1", maps.SIGNED));
    return all.map(({ name }) => `${name}: ${s.heads * s.dim} dimensions, the slowest wave is ${short(2 * Math.PI * s.base ** (1 - 2 / (s.heads * s.dim)))} tokens long`);
  };

  const similarity = (place, all, s) => {
    const series = all.map(({ style, name, found: { distances, values } }) => ({ style, name, points: distances.map((d, k) => [d + 1, values[k]]) }));
    lines.draw(place, {
      title: "Similarity of the first position and others",
      x: { label: "distance d + 1, tokens", kind: lines.log, low: 1, high: target(s) },
      y: { label: "cosine of two rows", kind: lines.plain, low: -0.4, high: 1.05 },
      series,
      marks: target(s) > s.window ? [{ value: s.window, text: "original window", way: "up" }] : [],
      hint: "The row of the first position, and the one d after it.",
      tell: (d) => `distance ${d - 1}`,
    });
    return all.map(({ name, found: { distances, values } }) => {
      const alike = distances.filter((d, k) => d > 0 && values[k] > 0.5);
      return `${name}: ${alike.length ? `the farthest row that is more than half alike is ${alike.at(-1)} away` : "no other row is more than half alike"}`;
    });
  };

  const DRAW = { wavelengths, scores, relative, bias, turning, table, similarity };

  // Draw every picture of the page for the chosen schemes.
  const drawAll = (chosen, s) => {
    const refused = [];
    for (const [picture, draw] of Object.entries(DRAW)) {
      const section = document.getElementById(picture);
      const all = subjects(picture, chosen, s, refused);
      section.hidden = !all.length;
      if (!all.length) continue;
      const said = draw(section.querySelector(".place"), all, s);
      section.querySelector(".said").replaceChildren(...said.map((text, k) => html("li", {}, mark(all[k].style), text)));
    }
    const about = chosen.filter((style) => style.words);
    document.getElementById("words").replaceChildren(...about.map((style) => html("li", {}, mark(style), `${style.title}: ${style.words}`)));
    const told = document.getElementById("refused");
    told.replaceChildren(...posswap.numbers.unique(refused).map((text) => html("p", { class: "warning" }, text)));
  };

  return { drawAll };
})();
