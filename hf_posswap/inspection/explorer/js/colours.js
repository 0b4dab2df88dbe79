"use strict";
// Colours of maps that any colour vision tells apart: cividis for amounts, blue to red around 0 for signed values.
posswap.colours = (() => {
  const AMOUNT = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
  const SIGNED = ["#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f"];

  const parts = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const mixed = (scale, share) => {
    const place = posswap.numbers.clamp(share, 0, 1) * (scale.length - 1);
    const low = Math.min(Math.floor(place), scale.length - 2);
    const [one, other] = [parts(scale[low]), parts(scale[low + 1])];
    return one.map((value, k) => Math.round(value + (place - low) * (other[k] - value)));
  };
  const css = (scale, steps = 20) =>
    posswap.numbers.range(steps + 1).map((k) => `rgb(${mixed(scale, k / steps).join(" ")})`).join(", ");

  return { AMOUNT, SIGNED, mixed, css };
})();
