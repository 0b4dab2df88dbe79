"use strict";
// Sliders, numbers beside them, and schemes to choose; what is chosen stands in the address, too.
posswap.controls = (() => {
  const { styles, start, limits, presets } = posswap.given;
  const chosen = new Set(start.schemes);
  const s = { ...start.settings };
  const inputs = {};

  // A slider moves evenly in the logarithm; the number beside it is exact.
  const onSlider = ([low, high], value) => (1000 * Math.log(value / low)) / Math.log(high / low);
  const offSlider = ([low, high, step], place) => {
    const value = low * (high / low) ** (place / 1000);
    return Math.min(high, Math.max(low, Math.round(value / step) * step));
  };

  const known = (name, value) => {
    const [low, high, step] = limits[name];
    if (!Number.isFinite(value) || value < low || value > high) return false;
    return step === 0.25 || name === "base" || value % step === 0;
  };

  const set = (name, value) => {
    if (!known(name, value)) return false;
    s[name] = value;
    return true;
  };

  const write = () => {
    for (const [name, { slider, number }] of Object.entries(inputs)) {
      slider.value = onSlider(limits[name], s[name]);
      slider.setAttribute("aria-valuetext", String(s[name]));
      if (document.activeElement !== number) number.value = s[name];
    }
    document.querySelectorAll("#schemes input").forEach((box) => (box.checked = chosen.has(box.value)));
    answered();
    const told = Object.keys(limits).map((name) => `${name} ${s[name]}`);
    document.getElementById("state").textContent = `${[...chosen].join(", ")}; ${told.join(", ")}; ${posswap.numbers.target(s)} tokens after the swap`;
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

  // The answer to a question is shown as long as its schemes and numbers are.
  const answered = () => {
    const fits = ({ schemes, settings }) =>
      schemes.length === chosen.size &&
      schemes.every((name) => chosen.has(name)) &&
      Object.entries(settings).every(([name, value]) => name === "factor" || s[name] === value);
    const found = presets.findIndex(fits);
    document.getElementById("answer").textContent = found < 0 ? "" : presets[found].answer;
    document.querySelectorAll("#questions button").forEach((button, number) => button.setAttribute("aria-pressed", String(number === found)));
  };

  const choose = (schemes, settings) => {
    Object.assign(s, settings);
    chosen.clear();
    schemes.forEach((name) => chosen.add(name));
    changed();
  };

  const changed = () => {
    write();
    const said = new URLSearchParams({ schemes: [...chosen].join(","), ...s });
    history.replaceState(null, "", `#${said}`);
    redraw();
  };

  const fromAddress = () => {
    const said = new URLSearchParams(location.hash.slice(1));
    for (const name of Object.keys(limits)) if (said.has(name)) set(name, Number(said.get(name)));
    if (!said.has("schemes")) return;
    const names = said.get("schemes").split(",").filter((name) => styles.some((style) => style.name === name));
    if (names.length) {
      chosen.clear();
      names.forEach((name) => chosen.add(name));
    }
  };

  const begin = () => {
    for (const name of Object.keys(limits)) {
      const [slider, number] = ["slide", "number"].map((kind) => document.getElementById(`${kind}-${name}`));
      inputs[name] = { slider, number };
      slider.addEventListener("input", () => set(name, offSlider(limits[name], Number(slider.value))) && changed());
      number.addEventListener("input", () => {
        const good = number.value !== "" && set(name, Number(number.value));
        number.setAttribute("aria-invalid", String(!good));
        if (good) changed();
      });
      number.addEventListener("blur", () => {
        number.removeAttribute("aria-invalid");
        write();
      });
    }
    document.querySelectorAll("#schemes input").forEach((box) =>
      box.addEventListener("change", () => {
        chosen[box.checked ? "add" : "delete"](box.value);
        changed();
      }),
    );
    document.getElementById("reset").addEventListener("click", () => {
      choose(start.schemes, start.settings);
    });
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
