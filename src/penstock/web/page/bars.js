// The bars of the model: one per equal part, dragged up to make it heavier; a slider for each with the keyboard.

import { h } from "./dom.js";

const MAX_WORK = 4;

// Creates the bars. `onChange(weights, done)` is called while and after they change.
export function makeBars(count, weights, onChange) {
  const values = Array.from({ length: count }, (_, i) => weights[i * weights.length / count | 0] ?? 1);
  const bars = values.map((_, i) => h("div", {
    class: "weight", role: "slider", tabIndex: 0, "aria-label": `Work of part ${i} of the model`,
    "aria-valuemin": 0.25, "aria-valuemax": MAX_WORK, "aria-orientation": "vertical", "data-keys": "own",
  }, h("span", { class: "fill" }), h("span", { class: "number" })));
  const box = h("div", { class: "weights" }, bars);
  const show = (i) => {
    bars[i].setAttribute("aria-valuenow", values[i]);
    bars[i].title = `part ${i}: ${values[i]} times the work`;
    bars[i].firstChild.style.height = `${(values[i] / MAX_WORK) * 100}%`;
    bars[i].lastChild.textContent = values[i] === 1 || count > 16 ? "" : values[i];
  };
  const set = (i, value, done) => {
    const rounded = Math.min(MAX_WORK, Math.max(0.25, Math.round(value * 4) / 4));
    if (rounded === values[i] && !done) return;
    values[i] = rounded;
    show(i);
    onChange(values.every((v) => v === 1) ? [] : [...values], done);
  };
  bars.forEach((bar, i) => {
    show(i);
    const move = (event) => {
      const { top, height } = bar.getBoundingClientRect();
      set(i, (1 - (event.clientY - top) / height) * MAX_WORK, false);
    };
    bar.addEventListener("pointerdown", (event) => {
      bar.focus(); // the bars are not made anew while one of them has the focus
      bar.setPointerCapture(event.pointerId);
      move(event);
    });
    bar.addEventListener("pointermove", (event) => { if (bar.hasPointerCapture(event.pointerId)) move(event); });
    bar.addEventListener("pointerup", () => set(i, values[i], true));
    bar.addEventListener("keydown", (event) => {
      const by = { ArrowUp: 0.25, ArrowRight: 0.25, ArrowDown: -0.25, ArrowLeft: -0.25, PageUp: 1, PageDown: -1 }[event.key];
      if (by === undefined && event.key !== "Home") return;
      event.preventDefault();
      set(i, event.key === "Home" ? 1 : values[i] + by, true);
    });
  });
  return box;
}
