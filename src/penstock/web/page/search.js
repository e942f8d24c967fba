// Search: the incumbent and the bound while a search runs, and the best schedule with its certificate.

import { $, chartWidth, complain, h, svg } from "./dom.js";
import { Refused, ask, stream } from "./api.js";
import { draw } from "./drawing.js";
import { explainHooks, resetExplanation } from "./explain.js";
import { memory, percent, seconds, time, useUnits } from "./format.js";
import { freshName, store, update } from "./state.js";
import { showTable } from "./table.js";

const HEIGHT = 220, LEFT = 66, BOTTOM = 28, TOP = 14;
let catalogue = null, run = null, described = null, settings = { seconds: 10, objective: "makespan", placement: "any", fused: false };

export function start(offered) {
  catalogue = offered;
}

// Shows the form, and the result of the last search.
export function show(state) {
  $("below").replaceChildren();
  resetExplanation();
  panel(state);
  if (run?.result) showResult(run.result);
  else {
    showTable([]);
    draw({ kinds: [], tracks: {}, timelines: [] });
  }
}

// Stops a search when another mode is chosen.
export function leave() {
  run?.control.abort();
  if (run && !run.result) run = null;
}

function panel(state) {
  if ($("search-form")) {
    described = describe(state);
    return;
  }
  const number = (id, label, key, options) => [h("label", { for: id }, label), h("input", { type: "number", id, value: settings[key], ...options, onchange: (e) => { settings[key] = Number(e.target.value); } })];
  const choice = (id, label, key, values) => [h("label", { for: id }, label), h("select", { id, onchange: (e) => { settings[key] = e.target.value; } }, values.map((value) => h("option", { value, selected: value === settings[key] }, value)))];
  $("mode-panel").replaceChildren(h("div", { class: "card-box" }, h("h2", {}, "Search for the best schedule"), h("p", { class: "quiet", id: "search-question" }),
    h("div", { class: "row", id: "search-form" }, number("search-seconds", "Seconds", "seconds", { min: 1, max: 120 }),
      choice("search-objective", "Minimize", "objective", ["makespan", "span", "period"]), choice("search-placement", "Placement", "placement", ["any", "loop", "v"]),
      h("label", { class: "check" }, h("input", { type: "checkbox", id: "search-fused", onchange: (e) => { settings.fused = e.target.checked; } }), "Do not split backward")),
    h("div", { class: "row" }, h("button", { type: "button", class: "primary", id: "search-start", onclick: begin }, "Start"), h("button", { type: "button", id: "search-stop", onclick: stop, disabled: true }, "Stop and keep the best"),
      h("span", { id: "search-status", role: "status", class: "quiet" })),
    h("div", { id: "search-chart", class: "chart" }), h("div", { id: "search-result" })));
  described = describe(state);
  if (catalogue.read_only) {
    $("search-start").disabled = true;
    $("search-status").textContent = "This playground is read-only: it runs no searches.";
  }
}

// Describes the question in the units of its costs, which the server knows.
async function describe(state) {
  try {
    if (await ask("units", { costs: state.costs }) === null || !$("search-question")) return;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return complain(error.message);
  }
  complain(null);
  const limit = state.limit === null ? "without a memory limit" : `within ${memory(state.limit)} per rank`;
  $("search-question").textContent = `${state.ranks} ranks, ${state.stages ?? 1} ${(state.stages ?? 1) > 1 ? "stages" : "stage"} per rank, ${state.microbatches} microbatches, ${limit}, at the costs of the settings. No schedule is faster than the bound: when both meet, the result is proved optimal.`;
}

async function begin() {
  run?.control.abort();
  const state = store.state, control = new AbortController();
  const mine = run = { id: crypto.randomUUID?.() ?? String(Math.random()), control, points: [], result: null };
  const request = {
    id: mine.id, ranks: state.ranks, microbatches: state.microbatches, stages_per_rank: state.stages ?? 1, costs: state.costs, weights: state.weights,
    same_model: state.same, memory_limit: state.limit, ...settings,
  };
  buttons(true);
  $("search-result").replaceChildren();
  $("search-status").textContent = "Starting…";
  try {
    await described;
    await stream("search", request, (line) => { if (run === mine) take(mine, line); }, { signal: control.signal, shown: true });
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Refused)) throw error;
    complain(error.message);
  } finally {
    if (run === mine && $("search-start")) buttons(false);
  }
}

function buttons(running) {
  $("search-start").disabled = running;
  $("search-stop").disabled = !running;
}

async function stop() {
  $("search-status").textContent = "Stopping…";
  await ask("search", { stop: run.id }, "search-stop");
}

function take(mine, line) {
  if (line.error) {
    complain(line.error);
    $("search-status").textContent = "";
    return;
  }
  if (line.progress) {
    const { phase, best, bound, fraction } = line.progress;
    if (bound === undefined) {
      $("search-status").textContent = `${phase}…`;
      return;
    }
    mine.points.push(line.progress);
    const gap = best && bound ? `, gap ${percent(best / bound - 1)}` : "";
    $("search-status").textContent = `${phase}: best ${time(best)}, bound ${time(bound)}${gap}, ${percent(fraction ?? 0)} of the time`;
    return chart(mine.points);
  }
  mine.result = line.result;
  useUnits(line.result);
  mine.points.push({ seconds: line.result.seconds, best: line.result.value, bound: line.result.bound });
  complain(null);
  showResult(line.result);
}

// Draws best and bound over time.
function chart(points) {
  const known = points.filter((p) => p.best !== undefined);
  if (!known.length) return;
  const width = chartWidth(), first = known[0].seconds, last = Math.max(...points.map((p) => p.seconds), first + 1e-3), values = known.flatMap((p) => [p.best, p.bound ?? p.best]);
  const most = Math.max(...values), low = Math.min(...values, most * 0.98), high = most, room = (high - low || 1) * 0.12;
  const x = (t) => LEFT + ((t - first) / (last - first)) * (width - LEFT - 16), y = (v) => HEIGHT - BOTTOM - ((v - low + room) / (high - low + 2 * room)) * (HEIGHT - BOTTOM - TOP);
  const path = (key) => known.filter((p) => p[key] !== undefined).map((p, i) => (i ? `H${x(p.seconds)}V${y(p[key])}` : `M${x(p.seconds)} ${y(p[key])}`)).join("") + `H${x(last)}`;
  const end = known.at(-1), apart = Math.abs(y(end.best) - y(end.bound)) > 16;
  $("search-chart").replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `best ${time(end.best)}, bound ${time(end.bound)}` },
    svg("line", { x1: LEFT, x2: width - 16, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM, class: "grid" }),
    svg("path", { d: path("bound"), class: "bound" }), svg("path", { d: path("best"), class: "incumbent" }),
    svg("text", { x: LEFT - 8, y: y(end.best) + 4, class: "tick", "text-anchor": "end" }, time(end.best)),
    apart ? svg("text", { x: LEFT - 8, y: y(end.bound) + 4, class: "tick", "text-anchor": "end" }, time(end.bound)) : null,
    svg("text", { x: width - 20, y: y(end.best) - 7, class: "name best-name", "text-anchor": "end" }, apart ? "best so far" : "best = bound"),
    apart ? svg("text", { x: width - 20, y: y(end.bound) + 17, class: "name bound-name", "text-anchor": "end" }, "bound") : null,
    svg("text", { x: width - 16, y: HEIGHT - 8, class: "tick", "text-anchor": "end" }, `${seconds(last)} of search`)));
}

function showResult(result) {
  chart(run.points);
  $("search-status").textContent = result.interrupted ? "Stopped: this is the best so far." : `Done after ${seconds(result.seconds)}, ${result.runs.toLocaleString("en")} orders.`;
  $("search-result").replaceChildren(h("div", { class: `verdict ${result.proved ? "" : "open"}` }, h("p", { id: "certificate" }, result.certificate), h("p", { class: "quiet" }, `Found by ${result.found_by}; peak memory ${memory(result.peak_memory)}.`)),
    h("div", { class: "row" }, h("button", { type: "button", class: "primary", id: "search-keep", onclick: () => keep("compare") }, "Compare it"), h("button", { type: "button", id: "search-edit", onclick: () => keep("edit") }, "Edit it")),
    result.missing.length > 0 && h("p", { class: "quiet" }, `Not installed, so not used: ${result.missing.join(", ")}.`) || "");
  const families = Object.entries(result.families).sort((a, b) => a[1] - b[1]).slice(0, 8);
  $("table").replaceChildren(h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Families for comparison" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "schedule"), h("th", { scope: "col" }, result.objective), h("th", { scope: "col" }, "vs. result"))),
    h("tbody", {}, h("tr", {}, h("th", { scope: "row" }, "found"), h("td", { class: "best" }, time(result.value)), h("td", {}, result.proved ? h("span", { class: "proved" }, "optimal") : `gap ≤ ${percent(result.gap ?? 0)}`)),
      families.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, time(value)), h("td", {}, value > result.value ? `+${percent(value / result.value - 1)}` : "the same"))),
      Object.entries(result.too_large).slice(0, 4).map(([name, size]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, "over the limit"), h("td", {}, `needs ${memory(size)}`)))))));
  draw(result.data, { memoryLimit: store.state.limit, ...explainHooks() });
}

// Keeps the result as a schedule of one's own.
function keep(mode) {
  const { result } = run, name = freshName(store.state, "found");
  const rows = result.schedule, microbatches = result.data.timelines[0].microbatches;
  const own = { ...store.state.own, [name]: { stage_to_rank: result.stage_to_rank, microbatches, steps: rows } };
  update(mode === "edit" ? { mode, own, edit: name } : { mode, own, schedules: [...store.state.schedules, `@${name}`].slice(-8) });
}
