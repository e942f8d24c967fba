// The settings: schedules, sizes, costs, limits. Each control changes the state; the state fills the controls.

import { $, h } from "./dom.js";
import { makeBars } from "./bars.js";
import { short, parseBytes } from "./format.js";
import { settingsOf, store, update } from "./state.js";

let catalogue = null;

// Creates the settings once; `fill` shows the state in them.
export function makeControls(offered) {
  catalogue = offered;
  $("controls").append(schedulesBox(), sizesBox(), costsBox(), limitsBox());
  if (matchMedia("(max-width: 900px)").matches) $("settings").open = false;
}

// --- schedules -------------------------------------------------------------------------------------

function schedulesBox() {
  const add = h("select", { id: "add", onchange: () => addSchedule(add) });
  return h("fieldset", {}, h("legend", {}, "Schedules"), h("ul", { id: "chosen", class: "chosen" }),
    h("label", { for: "add", class: "quiet" }, "Add a schedule"), add);
}

function addSchedule(select) {
  if (!select.value) return;
  const chosen = [...store.state.schedules, select.value];
  if (chosen.length <= 8) update({ schedules: chosen });
  select.value = "";
}

function chip(entry, index) {
  const { family, ...own } = settingsOf(entry);
  const label = [family.replace(/^@/, ""), ...Object.entries(own).map(([k, v]) => (v === "all" ? k : `${k} ${v}`))].join(", ");
  const remove = () => update({ schedules: store.state.schedules.filter((_, i) => i !== index) });
  const up = () => {
    const next = [...store.state.schedules];
    [next[index - 1], next[index]] = [next[index], next[index - 1]];
    update({ schedules: next });
  };
  return h("li", {}, h("span", {}, label),
    index > 0 && h("button", { type: "button", class: "icon", "aria-label": `Move ${label} up`, title: "Move up", onclick: up }, "↑"),
    h("button", { type: "button", class: "icon", "aria-label": `Remove ${label}`, title: "Remove", onclick: remove }, "×"));
}

// --- sizes -----------------------------------------------------------------------------------------

function numberField(name, label, { min, max, most, optional = false }) {
  const set = (text, replace) => {
    const value = text === "" ? null : Math.round(Number(text));
    if (value === null ? optional : value >= min && value <= most) update({ [name]: value }, { replace });
    else field.value = store.state[name];
  };
  const slider = h("input", {
    type: "range", id: `${name}-slider`, min, max, "aria-label": label, oninput: () => set(slider.value, true),
    onchange: () => set(slider.value, false),
  });
  const field = h("input", { type: "number", id: name, min, max: most, placeholder: optional ? "auto" : "", onchange: () => set(field.value, false) });
  return h("div", { class: "field" }, h("label", { for: name }, label), slider, field);
}

function sizesBox() {
  return h("fieldset", {}, h("legend", {}, "Sizes"),
    numberField("ranks", "Ranks", { min: 1, max: 32, most: 64 }),
    numberField("microbatches", "Microbatches", { min: 1, max: 64, most: 1024 }),
    numberField("stages", "Stages per rank", { min: 1, max: 8, most: 16, optional: true }),
    numberField("group", "Group", { min: 1, max: 64, most: 1024, optional: true }));
}

// --- costs -----------------------------------------------------------------------------------------

const SHOWN = [
  ["forward_seconds", "F forward", 1], ["backward_input_seconds", "I input grad.", 1],
  ["backward_weight_seconds", "W weight grad.", 1], ["latency_seconds", "Latency", 0],
  ["bandwidth_bytes_per_second", "Bandwidth", ""], ["activation_message_bytes", "Activation sent", 0],
  ["gradient_message_bytes", "Gradient sent", 0], ["activation_bytes", "Activation held", 1],
];
const MORE = [
  ["backward_seconds", "B full backward", ""], ["parameters_bytes", "Parameters", 0],
  ["gradients_bytes", "Gradients", 0], ["optimizer_state_bytes", "Optimizer state", 0],
  ["activation_freed_by_input_bytes", "Freed by I", 0], ["forward_all_to_all_seconds", "All-to-all of F", 0],
  ["backward_input_all_to_all_seconds", "All-to-all of I", 0], ["overlap_factor", "Overlap factor, 0 to 1", 1],
  ["launch_overhead_seconds", "Launch overhead", 0], ["checkpoint_bytes", "Checkpoint", 0],
  ["host_bandwidth_bytes_per_second", "Host link", ""], ["optimizer_step_seconds", "Optimizer step", 0],
];

function setCost(key, text) {
  const costs = { ...store.state.costs }, value = text.includes(",") ? text.split(",").map(Number) : Number(text);
  if (text.trim() === "") delete costs[key];
  else if ([value].flat().every((v) => Number.isFinite(v) && v >= 0)) costs[key] = value;
  update({ costs });
}

function costField([key, label, standard]) {
  const field = h("input", {
    id: key, inputMode: "decimal", placeholder: standard === "" ? "none" : String(standard), autocomplete: "off",
    title: "One number, or one for each stage, separated by commas", onchange: () => setCost(key, field.value),
  });
  return h("div", { class: "field plain" }, h("label", { for: key }, label), field);
}

function costsBox() {
  const presets = h("select", { id: "preset", onchange: () => choosePreset(presets) },
    h("option", { value: "" }, "Preset…"), h("option", { value: "unit" }, "Unit costs"),
    Object.keys(catalogue.presets).map((name) => h("option", { value: name }, name)));
  return h("fieldset", {}, h("legend", {}, "Costs"), h("label", { for: "preset", class: "quiet" }, "Start from"), presets,
    h("label", { class: "check" }, h("input", { type: "checkbox", id: "same", onchange: (e) => update({ same: e.target.checked }) }),
      "Same model for all: a rank's costs are divided over its stages"),
    h("p", { class: "quiet", id: "weights-label" }, "Work along the model: drag a bar"), h("div", { id: "weights", role: "group", "aria-labelledby": "weights-label" }),
    h("p", { class: "quiet" }, "Seconds and bytes; costs left at 1 are units and activations."), SHOWN.map(costField), h("details", { class: "more" }, h("summary", {}, "More costs"), MORE.map(costField)));
}

function choosePreset(select) {
  const costs = select.value === "unit" ? {} : catalogue.presets[select.value];
  if (costs) update({ costs: { ...costs }, same: select.value.startsWith("zbv") && !select.value.endsWith("whole") ? false : store.state.same });
  select.value = "";
}

// --- limits ----------------------------------------------------------------------------------------

function limitsBox() {
  const limit = h("input", { id: "limit", placeholder: "none, e.g. 80GB", autocomplete: "off", onchange: () => {
    const value = parseBytes(limit.value);
    limit.setCustomValidity(Number.isNaN(value) || value < 0 ? "A number of bytes, e.g. 8 or 80GB" : "");
    if (limit.reportValidity()) update({ limit: value });
  } });
  const jitter = h("input", { id: "jitter", type: "number", min: 0, max: 1, step: 0.01, placeholder: "0", onchange: () => {
    update({ jitter: jitter.value === "" || Number(jitter.value) === 0 ? null : Math.min(1, Math.max(0, Number(jitter.value))) });
  } });
  const send = h("select", { id: "send", onchange: () => update({ send: send.value }) },
    catalogue.send_models.map((name) => h("option", { value: name }, name)));
  return h("fieldset", {}, h("legend", {}, "Limits and messages"),
    h("div", { class: "field plain" }, h("label", { for: "limit" }, "Memory per rank"), limit),
    h("div", { class: "field plain" }, h("label", { for: "jitter" }, "Jitter, share"), jitter),
    h("div", { class: "field plain" }, h("label", { for: "send" }, "Send model"), send),
    h("label", { class: "check" }, h("input", { type: "checkbox", id: "lowered", onchange: (e) => update({ lowered: e.target.checked }) }),
      "Lowered: with messages, sharding and reduction"));
}

// --- the state in the controls ----------------------------------------------------------------------

let barsShown = "";

// Shows the state in the settings.
export function fill(state) {
  $("chosen").replaceChildren(...state.schedules.map(chip));
  const own = Object.keys(state.own).filter((name) => !state.schedules.includes(`@${name}`));
  $("add").replaceChildren(h("option", { value: "" }, "Choose…"),
    ...catalogue.families.map((family) => h("option", { value: family.name, title: family.summary }, family.name)),
    ...own.map((name) => h("option", { value: `@${name}` }, `${name} (own)`)));
  for (const name of ["ranks", "microbatches", "stages", "group"]) {
    $(name).value = state[name] ?? "";
    if (document.activeElement !== $(`${name}-slider`)) $(`${name}-slider`).value = state[name] ?? (name === "stages" ? 2 : state.ranks);
  }
  $("group-slider").max = Math.max(state.microbatches, 2);
  for (const [key] of [...SHOWN, ...MORE]) {
    const value = state.costs[key];
    if (document.activeElement !== $(key)) $(key).value = value === undefined ? "" : [value].flat().map((v) => short(v, 12)).join(",");
  }
  $("same").checked = state.same;
  $("lowered").checked = state.lowered;
  $("send").value = state.send;
  $("jitter").value = state.jitter ?? "";
  if (document.activeElement !== $("limit")) $("limit").value = state.limit === null ? "" : short(state.limit, 12);
  const bars = `${state.ranks} ${state.weights}`;
  if (bars !== barsShown) {
    if (!$("weights").contains(document.activeElement) || barsShown.split(" ")[0] !== String(state.ranks)) {
      $("weights").replaceChildren(makeBars(Math.min(state.ranks, 32), state.weights, (weights, done) => update({ weights }, { replace: !done })));
    }
    barsShown = bars;
  }
}
