"use strict";
// Pictures with colours, on canvas, with what their colours mean; and pairs that turn in the plane.
posswap.maps = (() => {
  const { html, svg } = posswap.elements;
  const { AMOUNT, SIGNED, mixed, css } = posswap.colours;

  // rows of numbers, null where there is nothing; low and high: of the colours.
  const canvas = (rows, low, high, scale, label) => {
    const made = html("canvas", { width: rows[0].length, height: rows.length, role: "img", "aria-label": label });
    const context = made.getContext("2d");
    const image = context.createImageData(rows[0].length, rows.length);
    rows.forEach((row, y) => row.forEach((value, x) => {
      if (value === null) return;
      const colour = mixed(scale, (value - low) / (high - low || 1));
      image.data.set([...colour, 255], 4 * (y * row.length + x));
    }));
    context.putImageData(image, 0, 0);
    return made;
  };

  // What the colours mean: words at both ends of a strip.
  const bar = (low, high, scale) =>
    html("p", { class: "bar" }, low, html("span", { style: `background: linear-gradient(to right, ${css(scale)})` }), high);

  // A map with its heading, its axes in words, and the line where the original window ends.
  const figure = (style, heading, picture, axes, line) => {
    const frame = html("div", { class: "frame" }, picture);
    if (line) frame.append(line);
    return html("figure", {}, html("figcaption", {}, ...(style ? [posswap.elements.mark(style)] : []), heading), frame, html("p", { class: "axes" }, axes));
  };

  // The pairs of positions that are a window apart: to its left below lie distances that the model never met.
  const border = (window, length) => {
    const at = (100 * window) / length;
    if (at >= 100) return null;
    return svg("svg", { class: "border", viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("line", { x1: 0, y1: at, x2: 100 - at, y2: 100 }));
  };

  const turning = (style, heading, found) => {
    const drawing = svg("svg", { class: `round ${style.look}`, viewBox: "-1.55 -1.55 3.1 3.1", role: "img", "aria-label": heading });
    drawing.append(svg("circle", { class: "ring", r: 1 }), svg("line", { class: "ring", x1: -1.5, x2: 1.5 }), svg("line", { class: "ring", y1: -1.5, y2: 1.5 }));
    found.points.forEach(([x, y], k) => {
      const share = k / (found.points.length - 1);
      drawing.append(svg("circle", { class: "place", r: 0.075, cx: x, cy: -y, fill: `rgb(${mixed(AMOUNT, share).join(" ")})` }));
    });
    return drawing;
  };

  return { canvas, bar, figure, border, turning, AMOUNT, SIGNED };
})();
