// Compare: several schedules on one time axis, and the table beside it.

import { $, complain, h } from "./dom.js";
import { Refused, ask } from "./api.js";
import { draw } from "./drawing.js";
import { explainHooks, resetExplanation } from "./explain.js";
import { freshName, question, store, update } from "./state.js";
import { showTable } from "./table.js";
import { openTake } from "./take.js";
import { showBelow } from "./understand.js";

let catalogue = null;

export function start(offered) {
  catalogue = offered;
}

// Returns the name of an entry in the table.
const nameOf = (entry) => entry.replace(/^@/, "").replaceAll(";", ", ").replaceAll("=", " ");

// Shows the comparison of the state.
export async function show(state) {
  if (!state.schedules.length) {
    draw({ kinds: [], tracks: {}, timelines: [] });
    return showTable([]);
  }
  const asked = question(state, catalogue);
  if (state.whatif) asked.what_if = parseWhatIf(state.whatif);
  let answer;
  try {
    answer = await ask("compare", asked, "draw");
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return complain(error.message);
  }
  if (answer === null || store.state.mode !== state.mode) return;
  complain(null);
  const rows = answer.schedules.map((each, i) => ({ ...each, entry: state.schedules[i], name: nameOf(state.schedules[i]) }));
  renderTable(state, rows);
  resetExplanation();
  draw(answer.data, { memoryLimit: answer.memory_limit, ...explainHooks() });
  showBelow(state, catalogue, answer);
  if (state.jitter) showJitter(state, asked, rows);
}

function renderTable(state, rows) {
  showTable(rows, { jitter: Boolean(state.jitter), actions: (each) => actionsOf(state, each) });
}

function actionsOf(state, each) {
  const index = state.schedules.indexOf(each.entry);
  return [
    each.steps && h("button", { type: "button", class: "small", onclick: () => edit(each) }, "Edit"),
    each.row && h("button", { type: "button", class: "small", onclick: () => openTake(catalogue, each.entry) }, "Export"),
    h("button", { type: "button", class: "small icon", "aria-label": `Remove ${each.name}`, onclick: () => update({ schedules: store.state.schedules.filter((_, i) => i !== index) }) }, "×"),
  ];
}

// Opens the editor with a copy of a schedule, without the actions of lowering.
function edit(each) {
  if (each.level === "lowered" && !each.entry.startsWith("@")) return update({ mode: "edit", edit: "", schedules: [each.entry, ...store.state.schedules.filter((other) => other !== each.entry)] });
  const name = each.entry.startsWith("@") ? each.entry.slice(1) : freshName(store.state, `my-${each.row.name}`);
  const own = { stage_to_rank: each.stage_to_rank, microbatches: each.row.microbatches, steps: each.steps };
  update({ mode: "edit", edit: name, own: { ...store.state.own, [name]: own } });
}

async function showJitter(state, asked, rows) {
  const { what_if: _, ...plain } = asked;
  try {
    const answer = await ask("robustness", { ...plain, jitter: state.jitter }, "jitter");
    if (answer === null) return;
    rows.forEach((row, i) => { row.quantiles = answer.quantiles[i]; });
    renderTable(state, rows);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    complain(error.message);
  }
}

// Reads slow-rank:1:1.5 (kind, rank or link, factor).
export function parseWhatIf(text) {
  const [kind, index, factor] = text.split(":");
  return { kind, index: Number(index) || 0, factor: Number(factor) || 1 };
}
