"use strict";
// The length and the shape to draw in, and schemes to select; what is selected stands in the address, too.
posswap.controls = (() => {
  const { styles, start, presets } = posswap.given;
  const { data } = posswap;
  const { nearest, apart } = posswap.numbers;
  const chosen = new Set(start.schemes);
  const s = { ...start.settings };
  const [slider, output] = ["slide-factor", "length"].map((id) => document.getElementById(id));

  const tokens = (count) => count.toLocaleString("en");
  const nearestStep = (factor) => nearest(data.shape(s).steps, (step) => apart(step.factor, factor));

  const write = () => {
    const { steps, heads, dim, window, base } = data.shape(s);
    const step = data.step(s);
    const words = `${step.factor === 1 ? "1 window" : `${Number(step.factor.toPrecision(4))} windows`}, ${tokens(step.length)} tokens`;
    slider.max = steps.length - 1;
    slider.value = steps.indexOf(step);
    slider.setAttribute("aria-valuetext", words);
    output.textContent = words;
    document.querySelectorAll("#schemes input").forEach((box) => (box.checked = chosen.has(box.value)));
    document.querySelectorAll("#shapes input").forEach((button) => (button.checked = button.value === s.shape));
    answered();
    const shape = `${s.shape}: ${heads} heads of ${dim}, window ${tokens(window)}${base === null ? "" : `, base ${tokens(base)}`}`;
    document.getElementById("state").textContent = `${[...chosen].join(", ")}; ${shape}; ${tokens(step.length)} tokens after the swap`;
  };

  let waiting = 0;
  const redraw = () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  };
  const draw = () => {
    posswap.pictures.drawAll(styles.filter((style) => chosen.has(style.name)), s);
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
  };

  // The answer to a question is shown as long as its schemes and its shape are.
  const answered = () => {
    const fits = ({ schemes, settings }) =>
      schemes.length === chosen.size && schemes.every((name) => chosen.has(name)) && (settings.shape ?? s.shape) === s.shape;
    const found = presets.findIndex(fits);
    document.getElementById("answer").textContent = found < 0 ? "" : presets[found].answer;
    document.querySelectorAll("#questions button").forEach((button, number) => button.setAttribute("aria-pressed", String(number === found)));
  };

  const choose = (schemes, settings) => {
    Object.assign(s, settings);
    s.factor = nearestStep(s.factor).factor;
    chosen.clear();
    schemes.forEach((name) => chosen.add(name));
    changed();
  };

  const changed = () => {
    write();
    const [listed, alone] = [false, true].map((comma) => [...chosen].filter((name) => name.includes(",") === comma));
    const said = new URLSearchParams({ schemes: listed.join(","), ...s });
    alone.forEach((name) => said.append("schemes", name)); // options of a scheme are separated by commas, too
    history.replaceState(null, "", `#${said}`);
    redraw();
  };

  // What an address does not say stays; numbers of a shape that is not here stand for the nearest one.
  const fromAddress = () => {
    const said = new URLSearchParams(location.hash.slice(1));
    const sizes = ["window", "heads", "dim", "base"].map((name) => [name, Number(said.get(name))]).filter(([, size]) => size > 0);
    const named = data.shapes().find((shape) => shape.name === said.get("shape"));
    const away = (shape) => sizes.reduce((sum, [name, size]) => sum + (shape[name] ? apart(size, shape[name]) : 0), 0);
    if (named || sizes.length) s.shape = (named ?? nearest(data.shapes(), away)).name;
    s.factor = nearestStep(Number(said.get("factor")) > 0 ? Number(said.get("factor")) : s.factor).factor;
    const known = (name) => styles.some((style) => style.name === name);
    const names = said.getAll("schemes").flatMap((text) => (known(text) ? [text] : text.split(",").filter(known)));
    if (!names.length) return;
    chosen.clear();
    names.forEach((name) => chosen.add(name));
  };

  const begin = async () => {
    try {
      await data.load();
    } catch (error) {
      const needed = "Pictures need a browser with DecompressionStream: Chrome or Edge 80, Firefox 113, Safari 16.4, or later.";
      document.getElementById("refused").textContent = "DecompressionStream" in window ? `The page's data cannot be read: ${error}` : needed;
      return;
    }
    slider.addEventListener("input", () => {
      s.factor = data.shape(s).steps[Number(slider.value)].factor;
      changed();
    });
    document.querySelectorAll("#shapes input").forEach((button) =>
      button.addEventListener("change", () => choose([...chosen], { shape: button.value })),
    );
    document.querySelectorAll("#schemes input").forEach((box) =>
      box.addEventListener("change", () => {
        chosen[box.checked ? "add" : "delete"](box.value);
        changed();
      }),
    );
    document.getElementById("reset").addEventListener("click", () => choose(start.schemes, start.settings));
    document.querySelectorAll("#questions button").forEach((button, number) =>
      button.addEventListener("click", () => choose(presets[number].schemes, presets[number].settings)),
    );
    addEventListener("resize", redraw);
    addEventListener("beforeprint", draw);
    addEventListener("hashchange", () => {
      fromAddress();
      write();
      redraw();
    });
    fromAddress();
    write();
    draw();
  };

  return { begin, settings: s, chosen };
})();
posswap.controls.begin();
