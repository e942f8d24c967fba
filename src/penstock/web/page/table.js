// The table of the comparison, with differences to the first row.

import { $, h } from "./dom.js";
import { bytes, difference, memory, percent, short, time } from "./format.js";

const COLUMNS = [
  ["makespan", "makespan", time, "from time 0 to the last end"], ["period", "period", time, "one more iteration in the steady state"],
  ["bubble", "bubble", percent, "share of the makespan without compute"], ["peak_memory", "peak memory", memory, "of any rank"],
  ["sent", "sent", bytes, "bytes between ranks"], ["gap", "gap to bound", percent, "0 is a proof that no order is faster"],
];
const BETTER_LESS = ["makespan", "period", "peak_memory"];

// Shows rows: { name, entry, row, before, error, quantiles }, with actions for each.
export function showTable(rows, { jitter = false, actions = () => [] } = {}) {
  if (!rows.length) return $("table").replaceChildren();
  const good = rows.filter((each) => each.row), base = good[0]?.row;
  const best = Object.fromEntries(BETTER_LESS.map((key) => [key, Math.min(...good.map((each) => each.row[key]))]));
  const cell = (each, [key, , show]) => {
    const value = each.row[key], past = each.before ?? (each.row === base ? null : base);
    const change = past && BETTER_LESS.includes(key) ? difference(value, past[key]) : null;
    const over = key === "peak_memory" && !each.row.fits;
    const proved = key === "gap" && value === 0;
    return h("td", { class: [good.length > 1 && value === best[key] ? "best" : "", over ? "over" : ""].join(" ").trim() },
      proved ? h("span", { class: "proved", title: `No order of the same steps is faster: ${each.row.bound_reason}` }, "0 %, proved") : show(value),
      change && h("small", { class: change.startsWith("+") ? "worse" : "better" }, change),
      over && h("small", { class: "worse" }, "over the limit"));
  };
  const head = h("tr", {}, h("th", { scope: "col" }, "schedule"),
    COLUMNS.map(([, name, , title]) => h("th", { scope: "col", title }, name)),
    jitter && h("th", { scope: "col", title: "95 % of the runs with jitter are not longer" }, "p95"), h("th", { scope: "col" }, h("span", { class: "sr" }, "actions")));
  const body = rows.map((each) => {
    const name = h("th", { scope: "row" }, each.name, each.row && h("small", {}, `p=${each.row.ranks} v=${short(each.row.stages / each.row.ranks)} m=${each.row.microbatches}`));
    if (!each.row) return h("tr", { class: "failed" }, name, h("td", { colSpan: COLUMNS.length + (jitter ? 1 : 0) }, each.error), h("td", {}, actions(each)));
    return h("tr", { title: `bound ${time(each.row.bound)}: ${each.row.bound_reason}` }, name, COLUMNS.map((column) => cell(each, column)),
      jitter && h("td", {}, each.quantiles ? time(each.quantiles.p95) : "…"), h("td", { class: "actions" }, actions(each)));
  });
  $("table").replaceChildren(h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Comparison of the schedules" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body))));
}
