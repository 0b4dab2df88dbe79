"use strict";
(() => {
  const tip = document.getElementById("tip");

  const show = (mark, x, y) => {
    const [title, rows] = JSON.parse(mark.dataset.tip);
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: title }));
    for (const [number, name, value] of rows) {
      if (number !== null && off.has(String(number))) continue;
      const row = document.createElement("div");
      const mark = number !== null && document.querySelector(`[data-model="${number}"] .mark`);
      if (mark) row.append(mark.cloneNode(true));
      for (const text of [name, value].filter(Boolean)) {
        row.append(Object.assign(document.createElement("span"), { textContent: text }));
      }
      tip.append(row);
    }
    tip.hidden = false;
    const room = tip.getBoundingClientRect();
    const right = document.documentElement.clientWidth;
    const left = x + 16 + room.width < right ? x + 16 : x - 16 - room.width;
    tip.style.left = `${Math.min(Math.max(left, 6), Math.max(right - room.width - 6, 6))}px`;
    tip.style.top = `${Math.max(y + 16 + room.height < innerHeight ? y + 16 : y - 16 - room.height, 6)}px`;
    mark.closest("svg")?.querySelectorAll(".dot").forEach((d) => d.classList.toggle("on", d.dataset.x === mark.dataset.x));
  };
  const hide = () => {
    tip.hidden = true;
    document.querySelectorAll(".dot.on").forEach((dot) => dot.classList.remove("on"));
  };

  document.querySelectorAll("[data-tip]").forEach((mark) => {
    mark.addEventListener("pointermove", (event) => show(mark, event.clientX, event.clientY));
    mark.addEventListener("pointerdown", (event) => show(mark, event.clientX, event.clientY));
    mark.addEventListener("focus", () => {
      const box = mark.getBoundingClientRect();
      show(mark, box.left + box.width / 2, box.top + box.height / 3);
    });
    for (const end of ["pointerleave", "blur"]) mark.addEventListener(end, hide);
  });
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", (event) => event.key === "Escape" && hide());

  const off = new Set();
  document.querySelectorAll("[data-model]").forEach((button) => {
    button.addEventListener("click", () => {
      const number = button.dataset.model;
      const hidden = !off.has(number);
      off[hidden ? "add" : "delete"](number);
      document.querySelectorAll(`[data-m="${number}"]`).forEach((part) => part.classList.toggle("off", hidden));
      document.querySelectorAll(`[data-model="${number}"]`).forEach((key) => key.setAttribute("aria-pressed", hidden));
    });
  });

  document.querySelectorAll("table.sortable").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.firstElementChild.addEventListener("click", () => {
        const way = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", way);
        const order = (row) => parseFloat(row.cells[column].dataset.order ?? "NaN");
        const sign = way === "ascending" ? 1 : -1;
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const [x, y] = [order(a), order(b)];
          return Number.isNaN(x) || Number.isNaN(y) ? Number.isNaN(x) - Number.isNaN(y) : sign * (x - y);
        });
        table.tBodies[0].append(...rows);
      });
    });
  });

  document.getElementById("save").addEventListener("click", (event) => {
    const text = JSON.stringify(JSON.parse(document.getElementById("results").textContent), null, 2);
    event.currentTarget.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  });
})();
