// Below the timelines: what-if questions, critical paths compared, and the Pareto chart.

import { $, h } from "./dom.js";
import { drawn } from "./drawing.js";
import { percent, time } from "./format.js";
import { paretoBox } from "./pareto.js";
import { store, update } from "./state.js";

const KINDS = {
  "slow-rank": ["A slow rank", "Rank", 1.5], "slow-link": ["A slow link", "From stage", 2],
  "larger-microbatch": ["Larger microbatches", null, 2], memory: ["More memory", null, 2],
};

// Shows what belongs below the timelines of an answer.
export function showBelow(state, catalogue, answer) {
  const focused = document.activeElement?.id;
  $("below").replaceChildren(h("div", { class: "pair" }, whatIfBox(state, answer), pathsBox(answer)), paretoBox(state, catalogue));
  if (focused && $("below").contains($(focused))) $(focused).focus({ preventScroll: true });
}

// --- what-if ---------------------------------------------------------------------------------------

function whatIfBox(state, answer) {
  const [kind, index, factor] = state.whatif.split(":");
  const set = (k, i, f) => update({ whatif: k ? `${k}:${i || 0}:${f || KINDS[k][2]}` : "" });
  const choices = Object.entries(KINDS).map(([name, [label]]) => h("button", {
    type: "button", id: `whatif-${name}`, "aria-pressed": String(name === kind), onclick: () => set(name === kind ? "" : name, defaultIndex(name), KINDS[name][2]),
  }, label));
  const number = (id, label, value, options, act) => [h("label", { for: id }, label), h("input", { type: "number", id, value, ...options, onchange: (e) => act(e.target.value) })];
  const fields = kind ? [
    KINDS[kind]?.[1] && number("whatif-index", KINDS[kind][1], index, { min: 0, max: 63 }, (value) => set(kind, value, factor)),
    number("whatif-factor", "Factor", factor, { min: 0.1, max: 100, step: 0.1 }, (value) => set(kind, index, value)),
  ] : [];
  return h("section", { class: "card-box", "aria-label": "What if" }, h("h2", {}, "What if?"), h("div", { class: "row" }, choices),
    kind && h("div", { class: "row" }, fields.flat()),
    answer.what_if ? h("p", {}, `If ${answer.what_if}: ${effects(state, answer)}`) : h("p", { class: "quiet" }, "Change one thing, and see the difference in the table and the timelines."));
}

const defaultIndex = (kind) => (kind === "slow-rank" ? Math.floor(store.state.ranks / 2) : 0);

// Says what a change does to each schedule.
function effects(state, answer) {
  const good = answer.schedules.filter((each) => each.row && each.before);
  if (state.whatif.startsWith("memory")) {
    if (state.limit === null) return "set a memory limit first.";
    const fits = good.filter((each) => each.row.fits).sort((a, b) => a.row.makespan - b.row.makespan);
    const before = good.filter((each) => each.before.fits).sort((a, b) => a.before.makespan - b.before.makespan);
    const name = (list, key) => (list.length ? `${list[0].row.name} (${time(list[0][key].makespan)})` : "none of these");
    return `the fastest that fits is ${name(fits, "row")}; it was ${name(before, "before")}.`;
  }
  return `${good.map((each) => `${each.row.name} ${time(each.before.makespan)} → ${time(each.row.makespan)}`).join(", ")}.`;
}

// --- critical paths --------------------------------------------------------------------------------

// Returns the times of a critical path by kind; `waiting` is what no step of the path covers: messages.
function compositionOf(panel, kinds) {
  const found = {}, { start, end, kind } = panel.steps;
  let covered = 0;
  for (const step of panel.path) {
    const name = kinds[kind[step]], length = Math.max(0, end[step] - Math.max(start[step], covered));
    found[name] = (found[name] ?? 0) + length;
    covered = Math.max(covered, end[step]);
  }
  const busy = Object.values(found).reduce((sum, each) => sum + each, 0);
  if (panel.makespan - busy > panel.makespan * 1e-6) found.waiting = panel.makespan - busy;
  return found;
}

function pathsBox(answer) {
  const panels = drawn().panels, rows = panels.map((panel) => ({ panel, parts: compositionOf(panel, answer.data.kinds) }));
  const longest = Math.max(...panels.map((panel) => panel.makespan));
  const bars = rows.map(({ panel, parts }) => h("div", { class: "path" }, h("span", { class: "name" }, panel.name),
    h("div", { class: "stack" }, Object.entries(parts).map(([name, value]) => {
      const part = h("span", { class: `part ${name === "waiting" ? "waiting" : ""}`, title: `${name}: ${time(value)}` }, value / longest > 0.09 ? name : "");
      part.style.width = `${(value / longest) * 100}%`;
      if (name !== "waiting") part.style.background = `var(--${name})`;
      return part;
    }))));
  return h("section", { class: "card-box", "aria-label": "Critical paths" }, h("h2", {}, "Critical paths"), ...bars, ...pathText(rows));
}

// Says how the critical path of the second schedule differs from that of the first.
function pathText(rows) {
  if (rows.length < 2) return rows.map(({ panel, parts }) => h("p", { class: "quiet" }, `${panel.path.length} steps; ${shares(panel, parts)}.`));
  const [a, b] = rows, names = [...new Set([...Object.keys(a.parts), ...Object.keys(b.parts)])];
  const changes = names.map((name) => [name, (b.parts[name] ?? 0) - (a.parts[name] ?? 0)]).filter(([, by]) => Math.abs(by) > a.panel.makespan * 1e-6);
  const ranks = (panel) => new Set(panel.path.map((step) => panel.rankOf[step])).size;
  const text = changes.map(([name, by]) => `${time(Math.abs(by))} ${by < 0 ? "less" : "more"} ${name === "waiting" ? "waiting for messages" : name}`).join(", ");
  return [h("p", { class: "quiet" }, text ? `The path of ${b.panel.name} has ${text} than that of ${a.panel.name}${ranks(a.panel) === ranks(b.panel) ? "" : `; it visits ${ranks(b.panel)} instead of ${ranks(a.panel)} ranks`}.` : `Both paths consist of the same work.`)];
}

const shares = (panel, parts) => Object.entries(parts).map(([name, value]) => `${percent(value / panel.makespan)} ${name}`).join(", ");
