// Edit: the lists of one schedule, changed by dragging, keys and buttons, with the verdict of the validator.

import { $, complain, h } from "./dom.js";
import { Refused, ask } from "./api.js";
import { draw, drawn } from "./drawing.js";
import { decorate, ghostAt, indexAt } from "./edit_drawing.js";
import { editPanel, showVerdict } from "./edit_panel.js";
import { explainHooks, resetExplanation } from "./explain.js";
import { freshName, question, store, update } from "./state.js";
import { acrossMicrobatches, added, moved, removed, swapped } from "./steps.js";
import { showTable } from "./table.js";

let catalogue = null;
const session = { name: "", base: null, undo: [], redo: [], selected: null, answer: null, drag: null };

export function start(offered) {
  catalogue = offered;
  document.addEventListener("keydown", onKey);
}

// Shows the editor; without a schedule to edit, it starts from the first of the comparison.
export async function show(state) {
  if (!Object.hasOwn(state.own, state.edit)) return begin(state, state.schedules[0] ?? "1f1b");
  if (session.name !== state.edit) open(state);
  $("below").replaceChildren();
  editPanel(catalogue, session, actions);
  await refresh(state);
}

// Forgets the session when another mode is chosen.
export function leave() {
  session.name = "";
  document.body.classList.remove("untimed");
}

function open(state) {
  Object.assign(session, { name: state.edit, base: state.own[state.edit], undo: [], redo: [], selected: null, answer: null });
}

// Starts from an entry of the comparison.
async function begin(state, entry) {
  try {
    const asked = { ...question(state, catalogue, [entry]), lowered: false, send_model: "buffered" };
    const answer = await ask("edit", asked, "draw");
    if (answer === null || store.state.mode !== "edit") return;
    if (!answer.steps) return complain("This schedule has too many steps to be edited here; choose fewer microbatches.");
    const name = entry.startsWith("@") ? entry.slice(1) : freshName(store.state, `my-${entry.split(";")[0]}`);
    startWith(name, { stage_to_rank: answer.stage_to_rank, microbatches: answer.microbatches, steps: answer.steps });
  } catch (error) {
    refused(error);
  }
}

function startWith(name, own) {
  session.name = "";
  update({ mode: "edit", edit: name, own: { ...store.state.own, [name]: own } });
}

function refused(error) {
  if (!(error instanceof Refused)) throw error;
  complain(error.message);
}

const own = () => store.state.own[session.name];

// Takes new rows, and remembers the old ones.
function commit(rows, selected = null) {
  if (rows === own().steps) return;
  session.undo.push(own().steps);
  session.redo = [];
  session.selected = selected;
  put(rows);
}

function put(rows) {
  update({ own: { ...store.state.own, [session.name]: { ...own(), steps: rows } } });
}

// Exchanges the current rows with the last of a list.
function travel(from, to) {
  if (!from.length) return;
  to.push(own().steps);
  session.selected = null;
  put(from.pop());
}

// --- drawing ---------------------------------------------------------------------------------------

function asked(state, schedule) {
  return { ...question(state, catalogue, []), schedules: [{ name: state.edit, ...schedule }], lowered: false, send_model: "buffered" };
}

async function refresh(state) {
  try {
    const [answer, base] = await Promise.all([ask("edit", asked(state, own()), "draw"), baseRow(state)]);
    if (answer === null || session.name !== state.edit) return;
    complain(null);
    session.answer = answer;
    document.body.classList.toggle("untimed", !answer.row);
    session.free = own().steps.flat().length === answer.data.timelines[0].steps.kind.length;
    showVerdict(session, base);
    showTable([
      base && { name: "as it was", row: base },
      answer.row ? { name: state.edit, row: answer.row } : { name: state.edit, error: "not valid, so it has no times" },
    ].filter(Boolean));
    redraw(answer, state);
  } catch (error) {
    refused(error);
  }
}

let baseKey = "", baseValue = null;

// Returns the row of the schedule as it was when the editor was opened.
async function baseRow(state) {
  const request = asked(state, session.base), key = JSON.stringify(request);
  if (key !== baseKey) {
    baseKey = key;
    baseValue = ask("edit", request, "base").then((answer) => answer?.row ?? null, () => null);
  }
  return baseValue;
}

function redraw(answer, state) {
  resetExplanation();
  const mean = meanStep(answer);
  const tools = draw(answer.data, {
    memoryLimit: state.limit, ...explainHooks(), plain: true, room: answer.ready.length ? 3 * mean : 0,
    decorate: (context, panel, t) => decorate(context, panel, t, session, mean),
    onGrab: (target) => session.free && target?.step !== undefined && grab(target),
    onDrag: (event, panel, t) => { session.drag.at = place(event, panel, t); t.redrawOverlay(); },
    onDrop: (event, panel, t) => drop(event, panel, t),
    onPick: (target, t, event) => pick(target, t, event, mean),
  });
  if (session.selected) {
    const panel = tools.panels[0], { rank, index } = session.selected;
    tools.select({ panel, step: panel.bounds[rank] + index });
    panel.plot.focus({ preventScroll: true });
  }
}

function meanStep(answer) {
  const { start, end } = answer.data.timelines[0].steps, total = end.reduce((sum, e, i) => sum + e - start[i], 0);
  return end.length ? total / end.length : Number(store.state.costs.forward_seconds ?? 1) || 1;
}

// --- pointer ---------------------------------------------------------------------------------------

function grab({ panel, step }) {
  const rank = panel.rankOf[step];
  session.drag = { panel, step, rank, from: step - panel.bounds[rank], at: null };
  return true;
}

// Returns where the dragged step would go: a place in its rank, a step to swap with, or out of the schedule.
function place(event, panel, tools) {
  const { drag } = session, box = panel.plot.getBoundingClientRect();
  const row = tools.rowAt(panel, drag.rank), y = event.clientY - box.top;
  if (y < row.box - 44 || y > row.bottom + 44) return { remove: true };
  return indexAt(panel, drag, tools.timeAt(event.clientX - box.left), event.shiftKey);
}

function drop(event, panel, tools) {
  const { drag } = session, at = place(event, panel, tools), rows = own().steps;
  session.drag = null;
  if (at.remove) commit(removed(rows, drag.rank, drag.from));
  else if (at.swap !== undefined && at.swap !== drag.from) commit(swapped(rows, drag.rank, drag.from, at.swap), { rank: drag.rank, index: at.swap });
  else if (at.index !== undefined && at.index !== drag.from) commit(moved(rows, drag.rank, drag.from, at.index), { rank: drag.rank, index: at.index });
  else tools.redrawOverlay();
}

function pick(target, tools, event, mean) {
  if (target?.step !== undefined) {
    const rank = target.panel.rankOf[target.step];
    session.selected = { rank, index: target.step - target.panel.bounds[rank] };
  } else session.selected = null;
  const ghost = target?.step === undefined && ghostAt(event, tools, session.answer.ready, mean);
  if (ghost) return add(ghost);
  if (session.answer.row) explainHooks().onPick(target);
  editPanel(catalogue, session, actions);
  showVerdict(session);
}

function add({ rank, text }) {
  commit(added(own().steps, rank, text));
}

// --- keys and buttons ------------------------------------------------------------------------------

// Returns the selected step as its rank and place, from the drawing, which keys change too.
function selected() {
  const target = drawn()?.state.selected;
  if (!target || target.step === undefined) return null;
  const rank = target.panel.rankOf[target.step];
  return { rank, index: target.step - target.panel.bounds[rank] };
}

function shift(by) {
  const at = selected();
  if (!at || !session.free) return;
  const to = at.index + by;
  if (to < 0 || to >= own().steps[at.rank].length) return;
  commit(moved(own().steps, at.rank, at.index, to), { rank: at.rank, index: to });
}

function across(by) {
  const at = selected();
  if (at && session.free) commit(acrossMicrobatches(own().steps, at.rank, at.index, by), at);
}

function removeSelected() {
  const at = selected();
  if (at && session.free) commit(removed(own().steps, at.rank, at.index));
}

// Changes the rows by the selected step: `act(rows, { rank, index })` returns new rows and the index to select, or null.
export function changeSelected(act) {
  const at = selected(), change = at && session.free ? act(own().steps, at) : null;
  if (change) commit(change.rows, { rank: at.rank, index: change.index });
  return Boolean(change);
}

async function stamp(microbatch, interval) {
  try {
    const answer = await ask("stamp", { ...asked(store.state, own()), microbatch, interval });
    if (answer) commit(answer.steps);
  } catch (error) {
    refused(error);
  }
}

// Starts with nothing: the sizes of the settings, empty lists.
function empty() {
  const { ranks, microbatches, stages } = store.state, total = ranks * (stages ?? 1);
  const stage_to_rank = Array.from({ length: total }, (_, s) => s % ranks);
  startWith(freshName(store.state, "mine"), { stage_to_rank, microbatches, steps: Array.from({ length: ranks }, () => []) });
}

const actions = {
  undo: () => travel(session.undo, session.redo), redo: () => travel(session.redo, session.undo),
  earlier: () => shift(-1), later: () => shift(1), lower: () => across(-1), higher: () => across(1), remove: removeSelected, add, stamp, empty,
  from: (entry) => begin(store.state, entry),
  compare: () => update({ mode: "compare", schedules: [...new Set([...store.state.schedules, `@${session.name}`])].slice(-8) }),
};

const KEYS = { "[": actions.earlier, "]": actions.later, "{": actions.lower, "}": actions.higher, Delete: actions.remove, Backspace: actions.remove };

function onKey(event) {
  if (store.state.mode !== "edit" || event.target.closest?.("input, select, textarea, dialog")) return;
  const key = event.key.toLowerCase();
  if ((event.ctrlKey || event.metaKey) && (key === "z" || key === "y")) {
    event.preventDefault();
    return key === "y" || event.shiftKey ? actions.redo() : actions.undo();
  }
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
}
