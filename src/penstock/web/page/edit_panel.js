// The panel of the editor: buttons, ready steps, the verdict in words, and what changed.

import { $, h } from "./dom.js";
import { difference, memory, percent, time } from "./format.js";
import { store } from "./state.js";

let lastBase = null;

// Creates the buttons of the editor.
export function editPanel(catalogue, session, actions) {
  const own = store.state.own[session.name];
  const button = (label, title, act, { disabled = false, id } = {}) => h("button", { type: "button", id, title, onclick: act, disabled }, label);
  const from = h("select", { id: "edit-from", "aria-label": "Start from a family", onchange: () => from.value && actions.from(from.value) },
    h("option", { value: "" }, "Start from…"), catalogue.families.map(({ name }) => h("option", { value: name }, name)));
  const microbatch = h("input", { type: "number", id: "stamp-microbatch", min: 0, max: own.microbatches - 1, value: 0 });
  const interval = h("input", { type: "number", id: "stamp-interval", min: 0, step: "any", value: defaultInterval() });
  const none = !session.selected;
  $("mode-panel").replaceChildren(h("div", { class: "card-box editor" },
    h("div", { class: "title" }, h("h2", {}, `Edit ${session.name}`), button("Compare it", "Add it to the comparison", actions.compare, { id: "edit-compare" })),
    h("div", { class: "row" },
      button("Undo", "Undo (Ctrl+Z)", actions.undo, { disabled: !session.undo.length, id: "undo" }),
      button("Redo", "Redo (Ctrl+Y)", actions.redo, { disabled: !session.redo.length, id: "redo" }),
      h("span", { class: "divider" }),
      button("← Earlier", "Move the selected step earlier ([)", actions.earlier, { disabled: none, id: "earlier" }),
      button("Later →", "Move the selected step later (])", actions.later, { disabled: none, id: "later" }),
      button("Microbatch −", "Exchange it with the same step of the microbatch before ({)", actions.lower, { disabled: none }),
      button("Microbatch +", "Exchange it with the same step of the next microbatch (})", actions.higher, { disabled: none }),
      button("Remove", "Remove the selected step (Delete)", actions.remove, { disabled: none, id: "remove-step" }),
      h("span", { class: "divider" }), from, button("Empty", "Start with empty lists", actions.empty, { id: "edit-empty" })),
    h("details", { class: "more" }, h("summary", {}, "Stamp a building block"),
      h("p", { class: "quiet" }, "Takes the steps of one microbatch, at their times, and repeats them for all microbatches, one interval apart."),
      h("div", { class: "row" }, h("label", { for: "stamp-microbatch" }, "Microbatch"), microbatch, h("label", { for: "stamp-interval" }, "Interval"), interval,
        button("Stamp", "Repeat it for all microbatches", () => actions.stamp(Number(microbatch.value), Number(interval.value)), { id: "stamp" }))),
    h("div", { id: "verdict", class: "verdict", role: "status" }),
    h("div", { id: "ready", class: "ready" }),
    h("p", { class: "quiet" }, "Drag a step along its rank; hold Shift to swap; drag it off its rank to remove it.")));
  showReady(session, actions);
}

function defaultInterval() {
  const { costs } = store.state;
  const value = (key) => Number([costs[key] ?? 1].flat()[0]);
  return Number((value("forward_seconds") + value("backward_input_seconds") + value("backward_weight_seconds")).toPrecision(6));
}

function showReady(session, actions) {
  const ready = session.answer?.ready ?? [];
  session.showReady = () => showReady(session, actions);
  if (!ready.length) return $("ready").replaceChildren();
  $("ready").replaceChildren(h("span", { class: "quiet" }, "Could run next: "), ...ready.slice(0, 24).map((ghost) =>
    h("button", { type: "button", class: "small ghost", title: `Add it to rank ${ghost.rank}`, onclick: () => actions.add(ghost) }, ghost.text)));
}

// Shows the verdict in words, and the differences to the schedule as it was.
export function showVerdict(session, base = lastBase) {
  lastBase = base;
  const { answer } = session;
  if (!answer) return;
  const { verdict, row } = answer, box = $("verdict");
  const unfinished = !verdict.valid && verdict.violations.every(({ code }) => code.startsWith("missing"));
  box.classList.toggle("bad", !verdict.valid && !unfinished);
  box.classList.toggle("open", unfinished);
  if (verdict.valid) {
    const order = verdict.order?.families?.length ? ` Its order is that of ${verdict.order.families.map((name) => (name in verdict.order.groups ? `${name} group=${verdict.order.groups[name]}` : name)).join(", ")}.` : verdict.order?.nearest ? ` Nearest family: ${verdict.order.nearest} (${verdict.order.differing} actions differ).` : "";
    box.replaceChildren(h("p", {}, h("strong", {}, "Valid. "), `No deadlock under any send model.${order}`), h("p", { class: "deltas" }, ...deltas(row, base)));
  } else if (unfinished) {
    box.replaceChildren(h("p", {}, h("strong", {}, "Unfinished. "), `${verdict.violations.slice(0, 4).map(({ message }) => message).join("; ")}${verdict.count > 4 ? `; and ${verdict.count - 4} more` : ""}.`),
      h("p", { class: "quiet" }, "Click a dashed step, or a button below, to add it."));
  } else box.replaceChildren(...verdict.violations.slice(0, 3).map(violationText), verdict.count > 3 && h("p", { class: "quiet" }, `${verdict.count - 3} more`) || "");
  session.showReady?.();
}

function deltas(row, base) {
  const item = (name, value, past, show) => {
    const change = past === undefined || past === null ? null : difference(value, past);
    return h("span", { class: "delta" }, `${name} `, h("strong", {}, show(value)), change && h("em", { class: change.startsWith("+") ? "worse" : "better" }, ` ${change}`));
  };
  const points = base ? row.gap - base.gap : 0;
  return [
    item("makespan", row.makespan, base?.makespan, time), item("peak memory", row.peak_memory, base?.peak_memory, memory),
    h("span", { class: "delta" }, "gap ", h("strong", {}, percent(row.gap)), Math.abs(points) > 5e-4 && h("em", { class: points > 0 ? "worse" : "better" }, ` ${points > 0 ? "+" : "−"}${percent(Math.abs(points))}`)),
  ];
}

function violationText(violation) {
  const where = violation.rank === null ? "" : `Rank ${violation.rank}${violation.action ? `, ${violation.action}` : ""}: `;
  const cycle = violation.cycle.map((wait) => h("li", {}, `${wait.action} on rank ${wait.rank} waits for ${wait.waits_for.action} on rank ${wait.waits_for.rank}: ${wait.why}`));
  return h("div", {}, h("p", {}, h("strong", {}, violation.code === "deadlock" ? "Deadlock. " : "Not valid. "), `${where}${violation.message}.`),
    cycle.length > 0 && h("ul", {}, cycle), h("p", { class: "quiet" }, `Try: ${violation.suggestion}.`));
}
