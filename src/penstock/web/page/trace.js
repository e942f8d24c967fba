// Traces: the measured step over the predicted one, and what they say about each other.

import { $, h } from "./dom.js";
import { draw } from "./drawing.js";
import { explainHooks, resetExplanation } from "./explain.js";
import { difference, percent, seconds } from "./format.js";
import { freshName, store, update } from "./state.js";

// Shows the answer for traces in place of the comparison, until the state changes.
export function showTrace(answer) {
  resetExplanation();
  $("below").replaceChildren();
  const change = difference(answer.predicted_makespan, answer.makespan) ?? "0.0 %";
  const steps = answer.steps.length > 1 ? `, the median of ${answer.steps.length} steps` : "";
  const idle = Object.entries(answer.idle_by_reason).slice(0, 4).map(([reason, value]) => `${seconds(value)} ${reason}`).join(", ");
  $("mode-panel").replaceChildren(h("div", { class: "card-box", id: "trace" },
    h("div", { class: "title" }, h("h2", {}, "Measured over predicted"), h("button", { type: "button", class: "icon small", "aria-label": "Close the trace", onclick: close }, "×")),
    h("p", {}, h("strong", {}, `Measured ${seconds(answer.makespan)}`), `${steps}; `, h("strong", {}, `predicted ${seconds(answer.predicted_makespan)}`), ` at the costs of the trace (${change}). Order: ${answer.order_text}.`),
    h("p", { class: "quiet" }, `Idle, all ranks together: ${idle || "nothing"}. ${clocksText(answer.clocks)}`),
    h("div", { class: "row" }, h("button", { type: "button", class: "primary", id: "trace-costs", onclick: () => adopt(answer) }, "Compare at these costs"))));
  $("table").replaceChildren(h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Predicted and measured" }, h("table", {},
    h("thead", {}, h("tr", {}, ["kind", "predicted", "measured", "error"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, answer.predicted.map((row) => h("tr", {}, h("th", { scope: "row" }, row.kind), h("td", {}, seconds(row.predicted)), h("td", {}, seconds(row.measured)), h("td", {}, percent(row.error ?? 0))))))));
  draw(answer.data, explainHooks());
}

function clocksText({ shared_clock: shared, residual }) {
  return shared ? "All ranks have one clock." : `The clocks of the hosts are aligned by their messages; ${seconds(residual)} of contradiction is left.`;
}

function close() {
  $("mode-panel").replaceChildren();
  update({ mode: "compare", edit: "", lesson: "" });
  dispatchEvent(new Event("penstock:refresh"));
}

// Returns costs with six digits each, and one number where all stages are alike.
function readable(costs) {
  const round = (value) => Number(value.toPrecision(6));
  const short = (value) => { const all = [value].flat().map(round); return all.every((each) => each === all[0]) ? all[0] : all; };
  return Object.fromEntries(Object.entries(costs).map(([key, value]) => [key, short(value)]));
}

// Compares the traced order with families, at the costs that were measured.
function adopt(answer) {
  const name = freshName(store.state, "traced"), { ranks, microbatches } = answer;
  const own = answer.schedule ? { ...store.state.own, [name]: { stage_to_rank: answer.stage_to_rank, microbatches, steps: answer.schedule } } : store.state.own;
  const perRank = answer.stages / ranks, families = perRank === 1 ? ["1f1b", "zb-h1"] : ["interleaved-1f1b", "interleaved-zero-bubble"];
  $("mode-panel").replaceChildren();
  update({
    mode: "compare", ranks, microbatches, stages: perRank === 1 ? null : Math.round(perRank), group: null, weights: [], same: false, costs: readable(answer.costs), own,
    schedules: [...(answer.schedule ? [`@${name}`] : []), ...families],
  });
}
