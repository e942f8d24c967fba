// The state of the page, which is its address: #schedules=1f1b,zbv&ranks=4&microbatches=8&latency_seconds=0.1
//
//   schedules   families, each with its own settings behind semicolons (interleaved-1f1b;group=8), or own names (@mine)
//   own         schedules that were edited, searched or dropped, as lists of steps
//   costs       keys of a cost file, one number each
//   weights     relative work of equal parts of the model

export const DEFAULTS = Object.freeze({
  mode: "compare", schedules: ["1f1b", "zb-h1", "zbv"], ranks: 4, microbatches: 8, stages: null, group: null,
  costs: {}, weights: [], limit: null, jitter: null, send: "buffered", lowered: false, same: true, whatif: "", own: {},
  edit: "", pareto: false, lesson: "",
});

const NUMBERS = ["ranks", "microbatches", "stages", "group", "limit", "jitter"];
const FLAGS = ["lowered", "same", "pareto"];
const TEXTS = ["mode", "send", "whatif", "edit", "lesson"];
const COST = /^[a-z_]+_(seconds|bytes|bytes_per_second)$|^overlap_factor$/;

// Writes a schedule of steps: ranks of its stages, microbatches, rows.
function ownText({ stage_to_rank, microbatches, steps }) {
  return `${stage_to_rank.join(".")}~${microbatches}~${steps.map((row) => row.join(".")).join("~")}`;
}

// Reads what `ownText` wrote; returns null if it is damaged.
function parseOwn(text) {
  const [ranks, microbatches, ...rows] = text.split("~");
  const stage_to_rank = ranks.split(".").map(Number);
  if (!rows.length || stage_to_rank.some((r) => !Number.isInteger(r)) || !(Number(microbatches) > 0)) return null;
  return { stage_to_rank, microbatches: Number(microbatches), steps: rows.map((row) => (row ? row.split(".") : [])) };
}

// Returns the address of a state; what has its default is left out.
export function format(state) {
  const parts = new URLSearchParams();
  if (state.schedules.join() !== DEFAULTS.schedules.join()) parts.set("schedules", state.schedules.join(","));
  for (const name of [...TEXTS, ...NUMBERS]) {
    if (state[name] !== DEFAULTS[name] && state[name] !== null) parts.set(name, state[name]);
  }
  for (const name of FLAGS) if (state[name] !== DEFAULTS[name]) parts.set(name, state[name] ? "1" : "0");
  for (const [key, value] of Object.entries(state.costs)) parts.set(key, Array.isArray(value) ? value.join(",") : value);
  if (state.weights.length) parts.set("weights", state.weights.join(","));
  for (const [name, own] of Object.entries(state.own)) parts.set(`own.${name}`, ownText(own));
  return `#${parts.toString().replaceAll("%2C", ",").replaceAll("%3B", ";").replaceAll("%40", "@").replaceAll("%7E", "~").replaceAll("%3A", ":")}`;
}

// Returns the state of an address; what it does not understand is left out.
export function parse(hash) {
  const state = structuredClone(DEFAULTS), parts = new URLSearchParams(hash.replace(/^#/, ""));
  for (const [key, text] of parts) {
    if (key === "schedules") state.schedules = text.split(",").filter(Boolean).slice(0, 8);
    else if (TEXTS.includes(key)) state[key] = text;
    else if (NUMBERS.includes(key)) { if (text !== "" && Number.isFinite(Number(text))) state[key] = Number(text); }
    else if (FLAGS.includes(key)) state[key] = text === "1";
    else if (key === "weights") state.weights = text.split(",").map(Number).filter((w) => w > 0);
    else if (key.startsWith("own.")) { const own = parseOwn(text); if (own && key !== "own.__proto__") state.own[key.slice(4)] = own; }
    else if (COST.test(key)) { const values = text.split(",").map(Number); state.costs[key] = values.length > 1 ? values : values[0]; }
  }
  return state;
}

const listeners = [];
export const store = { state: parse(location.hash) };

// Calls `listener(state, before)` after every change.
export function subscribe(listener) {
  listeners.push(listener);
}

// Changes the state; with `replace` the change is no new entry of the history (a slider that is dragged).
export function update(patch, { replace = false } = {}) {
  const before = store.state, next = { ...before, ...patch };
  const address = format(next);
  if (address === format(before)) return;
  store.state = next;
  history[replace ? "replaceState" : "pushState"](null, "", address === "#" ? location.pathname : address);
  for (const listener of listeners) listener(next, before);
}

// Takes the state from the address, after back, forward or an edited address.
function reread() {
  const before = store.state;
  if (format(parse(location.hash)) === format(before)) return;
  store.state = parse(location.hash);
  for (const listener of listeners) listener(store.state, before);
}

addEventListener("popstate", reread);
addEventListener("hashchange", reread);

// Returns a schedule of the state as its family and its own settings.
export function settingsOf(entry) {
  const [family, ...settings] = entry.split(";");
  return { family, ...Object.fromEntries(settings.map((each) => each.split("="))) };
}

// Returns the schedules of the state in the form of the API, and the rest of the question.
export function question(state, catalogue, entries = state.schedules) {
  return {
    schedules: entries.map((entry) => source(state, catalogue, entry)),
    costs: state.costs, weights: state.weights, same_model: state.same, send_model: state.send,
    lowered: state.lowered, memory_limit: state.limit,
  };
}

// Returns one schedule in the form of the API.
export function source(state, catalogue, entry) {
  if (entry.startsWith("@")) return { name: entry.slice(1), ...state.own[entry.slice(1)] };
  const { family, group, stages, recompute, offload } = settingsOf(entry);
  const known = catalogue.families.find((each) => each.name === family);
  const made = { family, ranks: state.ranks, microbatches: state.microbatches };
  const perRank = stages ? Number(stages) : known?.stages_per_rank === null ? state.stages : null;
  if (perRank) made.stages_per_rank = perRank;
  const grouped = group ? Number(group) : known?.group ? state.group : null;
  if (grouped) made.group = grouped;
  if (recompute) made.recompute = recompute;
  if (offload) made.offload = offload;
  return made;
}

// Returns a name for a schedule of one's own that is not used yet.
export function freshName(state, wanted) {
  const plain = wanted.replace(/[^A-Za-z0-9_-]+/g, "-").slice(0, 40) || "mine";
  let name = plain;
  for (let n = 2; name in state.own; n++) name = `${plain}-${n}`;
  return name;
}
