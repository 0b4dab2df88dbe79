"use strict";
// Making elements, and writing numbers for people.
posswap.elements = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  const filled = (element, attributes, content) => {
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...content);
    return element;
  };
  const html = (name, attributes = {}, ...content) => filled(document.createElement(name), attributes, content);
  const svg = (name, attributes = {}, ...content) => filled(document.createElementNS(SVG, name), attributes, content);

  const LETTERS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const short = (value) => {
    if (value === null || !Number.isFinite(value)) return "never";
    const found = LETTERS.find(([size]) => Math.abs(value) >= 10 * size);
    if (found) return `${Number((value / found[0]).toPrecision(3))}${found[1]}`;
    return `${Number(value.toPrecision(4))}`;
  };

  // The mark of a scheme, as the report has it.
  const mark = (style) =>
    svg("svg", { class: `mark ${style.look}`, viewBox: "-6 -6 12 12", "aria-hidden": "true" }, svg("path", { d: style.shape }));

  return { html, svg, short, mark };
})();
