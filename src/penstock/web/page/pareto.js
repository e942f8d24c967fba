// The Pareto chart: memory against time of every family; a click on a point draws its schedule.

import { chartWidth, h, svg } from "./dom.js";
import { Refused, stream } from "./api.js";
import { memory, time } from "./format.js";
import { question, store, update } from "./state.js";

const HEIGHT = 330, LEFT = 74, BOTTOM = 44, TOP = 16, RIGHT = 18;
let known = { key: "", answer: null, error: null, control: null, body: null };

// Creates the box of the chart, with the chart if it is asked for.
export function paretoBox(state, catalogue) {
  const body = h("div", { id: "pareto" });
  const toggle = h("button", { type: "button", id: "pareto-toggle", "aria-pressed": String(state.pareto), onclick: () => update({ pareto: !store.state.pareto }) },
    state.pareto ? "Hide" : "Show all families");
  if (state.pareto) load(state, catalogue, body);
  return h("section", { class: "card-box", "aria-label": "Memory against time" }, h("div", { class: "title" }, h("h2", {}, "Memory against time"), toggle),
    !state.pareto && h("p", { class: "quiet" }, "Every family at these sizes and costs, with and without recomputation: which are worth their memory?"), body);
}

// Draws the chart into `body`, again with every part of the answer; one that is under way goes on.
function load(state, catalogue, body) {
  const entry = state.schedules.find((each) => !each.startsWith("@")) ?? "1f1b";
  const asked = question(state, catalogue, [entry]), key = JSON.stringify(asked);
  if (known.key !== key) {
    known.control?.abort();
    known = { key, answer: null, error: null, control: new AbortController(), body };
    follow(known, asked);
  }
  known.body = body;
  render(known);
}

async function follow(mine, asked) {
  try {
    await stream("pareto", asked, (line) => {
      mine.error = line.error ?? null;
      mine.answer = line.progress ?? line.result ?? mine.answer;
      mine.complete = Boolean(line.result);
      render(mine);
    }, { signal: mine.control.signal });
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Refused)) throw error;
    mine.error = error.message;
    render(mine);
  }
  if (mine.error) mine.key = ""; // asked again the next time
}

function render({ answer, error, body, complete }) {
  const parts = answer ? [chart(merged(answer.points), store.state)] : [];
  const note = error ?? noteOf(answer, complete);
  body.replaceChildren(...parts, ...(note ? [h("p", { class: "quiet", id: "pareto-note", role: "status" }, note)] : []));
}

// Tells how far it is, or what is left out.
function noteOf(answer, complete) {
  if (!answer) return "Simulating all families…";
  if (!complete) return `Simulating all families: ${answer.tried} of ${answer.of}…`;
  if (!answer.left_out.length) return "";
  const named = answer.left_out.slice(0, 6).join("; ");
  return `${answer.tried} of ${answer.of} schedules are shown. The others take too long here: ${named}${answer.left_out.length > 6 ? "; …" : ""}. With fewer microbatches all are shown.`;
}

// Joins points at one place: several families can have the same order.
function merged(points) {
  const found = new Map();
  for (const point of points) {
    const key = `${point.makespan.toPrecision(9)} ${point.peak_memory.toPrecision(9)}`, there = found.get(key);
    if (there) there.others.push(point.name);
    else found.set(key, { ...point, others: [] });
  }
  return [...found.values()];
}

// Returns the entry of the state for a point.
function entryOf({ family, group, recompute }) {
  return [family, group && `group=${group}`, recompute && `recompute=${recompute}`].filter(Boolean).join(";");
}

function scaleOf(values, from, to) {
  const low = Math.min(...values), high = Math.max(...values), pad = (high - low || high || 1) * 0.06;
  return { low: low - pad, high: high + pad, at: (v) => from + ((v - low + pad) / (high - low + 2 * pad)) * (to - from) };
}

function chart(points, state) {
  const width = chartWidth();
  const limit = state.limit;
  const x = scaleOf([...points.map((p) => p.peak_memory), ...(limit ? [limit] : [])], LEFT, width - RIGHT);
  const y = scaleOf(points.map((p) => p.makespan), HEIGHT - BOTTOM, TOP);
  const label = h("p", { class: "quiet", id: "pareto-label", role: "status" }, "Point at a schedule for its name; click to compare it. The line joins those that no other one beats in both.");
  const frontier = points.filter((p) => p.optimal).sort((a, b) => a.peak_memory - b.peak_memory);
  const line = frontier.map((p, i) => (i ? `H${x.at(p.peak_memory)}V${y.at(p.makespan)}` : `M${x.at(p.peak_memory)} ${y.at(p.makespan)}`)).join("");
  const choose = (p) => update({ schedules: [...new Set([...store.state.schedules, entryOf(p.schedule)])].slice(-8) });
  const dots = [...points].sort((a, b) => Number(a.optimal) - Number(b.optimal)).map((p) => {
    const text = `${[p.name, ...p.others].join(", ")}: ${time(p.makespan)}, ${memory(p.peak_memory)}${p.fits ? "" : ", over the limit"}`;
    const tell = () => { label.textContent = text; };
    return svg("g", {
      class: `dot ${p.optimal ? "optimal" : ""} ${p.fits ? "" : "over"} ${state.schedules.includes(entryOf(p.schedule)) ? "chosen" : ""}`, role: "button", tabindex: 0, "aria-label": text,
      transform: `translate(${x.at(p.peak_memory)} ${y.at(p.makespan)})`, onclick: () => choose(p), onpointerenter: tell, onfocus: tell,
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(p); } }, "data-keys": "own",
    }, svg("circle", { r: 10, class: "touch" }), svg("circle", { r: p.optimal ? 6.5 : 4.5 }), svg("title", {}, text));
  });
  const names = placeNames(frontier, x, y, width);
  return h("div", { class: "chart" }, svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": "Peak memory against makespan of each family" },
    axes(x, y, width), svg("path", { d: line, class: "frontier" }),
    limit ? svg("line", { x1: x.at(limit), x2: x.at(limit), y1: TOP, y2: HEIGHT - BOTTOM, class: "limit" }) : null, names, dots), label);
}

// Names the points of the frontier where there is room.
function placeNames(frontier, x, y, width) {
  const taken = [];
  return frontier.map((p) => {
    const at = { x: x.at(p.peak_memory) + 10, y: y.at(p.makespan) - 8, width: p.name.length * 6.2 };
    if (at.x + at.width > width - 4) at.x -= at.width + 20;
    if (taken.some((other) => Math.abs(other.y - at.y) < 14 && at.x < other.x + other.width && other.x < at.x + at.width)) return null;
    taken.push(at);
    return svg("text", { x: at.x, y: at.y, class: "name" }, p.name);
  });
}

function ticks({ low, high }, most = 5) {
  const least = (high - low) / most, power = 10 ** Math.floor(Math.log10(least));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= least) ?? 10);
  return Array.from({ length: Math.floor(high / step) - Math.ceil(low / step) + 1 }, (_, i) => (Math.ceil(low / step) + i) * step).filter((v) => v >= 0);
}

function axes(x, y, width) {
  const across = ticks(x, width / 130).map((v) => svg("text", { x: x.at(v), y: HEIGHT - BOTTOM + 17, class: "tick", "text-anchor": "middle" }, memory(v)));
  const up = ticks(y).flatMap((v) => [svg("line", { x1: LEFT, x2: width - RIGHT, y1: y.at(v), y2: y.at(v), class: "grid" }), svg("text", { x: LEFT - 8, y: y.at(v) + 4, class: "tick", "text-anchor": "end" }, time(v))]);
  return [...up, ...across, svg("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 6, class: "tick", "text-anchor": "middle" }, "peak memory of any rank"),
    svg("text", { x: 14, y: HEIGHT / 2, class: "tick", "text-anchor": "middle", transform: `rotate(-90 14 ${HEIGHT / 2})` }, "makespan")];
}
