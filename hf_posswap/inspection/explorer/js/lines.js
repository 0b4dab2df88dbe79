"use strict";
// Pictures with lines and dots, in SVG of the width of their place: read by pointer, by finger and by arrow keys.
posswap.lines = (() => {
  const { svg, html, short } = posswap.elements;
  const { clamp, range } = posswap.numbers;
  const HEIGHT = 340, LEFT = 58, RIGHT = 14, TOP = 14, BOTTOM = 46;

  const log = { to: (v) => Math.log10(v), name: "log" };
  const plain = { to: (v) => v, name: "plain" };

  const ticks = (low, high, kind) => {
    if (kind.name === "log") {
      const all = range(Math.floor(high) - Math.ceil(low) + 1).map((k) => 10 ** (Math.ceil(low) + k));
      return all.filter((_, k) => all.length < 9 || k % 2 === 0);
    }
    const rough = (high - low) / 5 || 1;
    const size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * size).find((one) => one >= rough);
    return range(Math.floor(high / step) - Math.ceil(low / step) + 1).map((k) => (Math.ceil(low / step) + k) * step);
  };

  // A chart: { x, y: {label, kind, low, high}, series: [{style, name, points: [[x, y] ...]}], marks: [{value, text, way}] }
  const draw = (place, chart) => {
    const width = Math.max(place.clientWidth, 260);
    const [xs, ys] = [chart.x, chart.y].map((axis) => ({ ...axis, from: axis.kind.to(axis.low), till: axis.kind.to(axis.high) }));
    const px = (v) => LEFT + ((xs.kind.to(v) - xs.from) / (xs.till - xs.from || 1)) * (width - LEFT - RIGHT);
    const py = (v) => HEIGHT - BOTTOM - ((ys.kind.to(v) - ys.from) / (ys.till - ys.from || 1)) * (HEIGHT - TOP - BOTTOM);
    const drawing = svg("svg", { class: "plot", width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, tabindex: "0",
      role: "img", "aria-label": `${chart.title}. Arrow keys read its values.` });
    drawing.append(...grid(xs, ys, px, py, width));
    const inside = `inside-${place.id}`;
    drawing.append(svg("clipPath", { id: inside }, svg("rect", { x: LEFT, y: TOP - 6, width: width - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM + 12 })));
    for (const series of chart.series) drawing.append(one(series, px, py, inside));
    drawing.append(...marks(chart.marks, px, py, width)); // their words over the lines
    const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
    drawing.append(cursor);
    const says = html("p", { class: "reader", "aria-live": "polite" }, chart.hint);
    reading(drawing, cursor, says, chart, px);
    place.replaceChildren(drawing, says);
  };

  const grid = (xs, ys, px, py, width) => [
    ...ticks(ys.from, ys.till, ys.kind).flatMap((v) => [
      svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: py(v), y2: py(v) }),
      svg("text", { class: "tick", x: LEFT - 7, y: py(v) + 4, "text-anchor": "end" }, short(v)),
    ]),
    ...ticks(xs.from, xs.till, xs.kind).map((v) =>
      svg("text", { class: "tick", x: px(v), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, short(v)),
    ),
    svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
    svg("text", { class: "name", x: width - RIGHT, y: HEIGHT - 8, "text-anchor": "end" }, xs.label),
    svg("text", { class: "name", x: LEFT, y: TOP - 3 }, ys.label),
  ];

  const marks = (all, px, py, width) =>
    all.flatMap(({ value, text, way }, k) =>
      way === "up"
        ? [svg("line", { class: "window", x1: px(value), x2: px(value), y1: TOP, y2: HEIGHT - BOTTOM }),
           svg("text", { class: "window-name", x: px(value) - 5, y: TOP + 14 + 17 * k, "text-anchor": "end" }, text)]
        : [svg("line", { class: "window", x1: LEFT, x2: width - RIGHT, y1: py(value), y2: py(value) }),
           svg("text", { class: "window-name", x: LEFT + 6, y: py(value) - 5 }, text)],
    );

  const one = (series, px, py, inside) => {
    const shown = series.points.filter(([, y]) => y !== null);
    const path = shown.map(([x, y], k) => `${k ? "L" : "M"}${px(x).toFixed(1)},${py(y).toFixed(1)}`).join("");
    const group = svg("g", { class: series.style.look, "clip-path": `url(#${inside})` });
    if (series.band) {
      const edge = (side) => series.band.map(([x, low, high]) => [px(x), py(side ? high : low)]);
      const around = [...edge(0), ...edge(1).reverse()].map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`);
      group.append(svg("polygon", { class: "band", points: around.join(" ") }));
    }
    group.append(svg("path", { class: "stroke", d: path }));
    const step = Math.max(1, Math.ceil(shown.length / 9));
    for (const [x, y] of shown.filter((_, k) => k % step === Math.floor(step / 2))) {
      group.append(svg("path", { class: "dot", d: series.style.shape, transform: `translate(${px(x)} ${py(y)})` }));
    }
    return group;
  };

  const reading = (drawing, cursor, says, chart, px) => {
    const stops = posswap.numbers.unique(chart.series.flatMap((series) => series.points.map(([x]) => x))).sort((a, b) => a - b);
    let at = -1;
    const show = (place) => {
      if (!stops.length) return;
      at = clamp(place, 0, stops.length - 1);
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, px(stops[at]));
      const values = chart.series.map((series) => {
        const found = series.points.find(([x]) => x === stops[at]);
        return found && `${series.name} ${short(found[1])}`;
      });
      says.textContent = `${chart.tell(stops[at])}: ${values.filter(Boolean).join(", ")}`;
    };
    drawing.addEventListener("pointermove", (event) => {
      const x = event.clientX - drawing.getBoundingClientRect().left;
      const away = stops.map((stop) => Math.abs(px(stop) - x));
      show(away.indexOf(Math.min(...away)));
    });
    drawing.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      show(at + step);
    });
  };

  return { draw, log, plain };
})();
