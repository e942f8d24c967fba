"use strict";
// The data of the page, its texts, and the visible time range.
//
// All scripts of this folder are the body of one function, `drawTimelines(data, host)`, which `penstock.view.html`
// assembles. `host` is the page around it: {} for the HTML view, hooks of the playground otherwise (see page.js).
//
//   panel    one timeline: a base canvas (steps, messages, memory) below an overlay (highlights)
//   step     an index into the columns of its panel: panel.steps.start[step]
//   target   { panel, step } or { panel, gap } or { panel, rank, time }: what is hovered or selected
//   t, x, y  seconds; pixels from the left and the top of a canvas

// --- data ------------------------------------------------------------------------------------------

const KIND = Object.fromEntries(data.kinds.map((name, number) => [name, number]));
const onTrack = (track) => data.kinds.flatMap((name, number) => (data.tracks[name] === track ? [number] : []));
const COMPUTE = onTrack("compute"), COLLECTIVE = onTrack("collective");
const MARKS = [...COLLECTIVE, ...onTrack("offload"), ...onTrack("reload")];
const MEANING = {
  F: "forward", I: "input gradient", W: "weight gradient", B: "backward",
  OVERLAP_F_B: "overlapped forward and backward", UNSHARD: "gather the parameters",
  RESHARD: "free the gathered parameters", REDUCE_GRAD: "reduce the gradients over replicas",
  RECOMPUTE: "repeat the forward", OFFLOAD: "copy the activation to the host", RELOAD: "copy it back from the host",
  SEND_F: "blocked sending an activation", RECV_F: "blocked receiving an activation",
  SEND_B: "blocked sending a gradient", RECV_B: "blocked receiving a gradient",
};
const WAITING = {
  "warm-up": "warm-up, no input yet",
  activation: "waits for an activation to be computed", gradient: "waits for a gradient to be computed",
  link: "waits for a message in transit", "blocked receive": "blocked by an earlier receive",
  unshard: "waits for its parameters to be gathered", drain: "drain, no work left",
  reload: "waits for its activation to be reloaded", overhead: "nothing in the schedule explains it",
};
const LONGEST = Math.max(0, ...data.timelines.map((timeline) => timeline.makespan));
const LIMIT = host.memoryLimit ?? null; // bytes per rank
const MAX_MEMORY = Math.max(LIMIT ?? 0, ...data.timelines.flatMap((timeline) => timeline.memory.map((m) => m.peak)));

// Returns one list per key below `length`, with the indices of `keys` that have it.
function groupBy(keys, length) {
  const groups = Array.from({ length }, () => []);
  keys.forEach((key, index) => { if (key >= 0) groups[key].push(index); });
  return groups;
}

// Returns the first index below `count` for which the monotonic `isPast` is true.
function firstWhere(count, isPast) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isPast(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

// Indexes the record of a panel: steps by rank, inputs and users by step.
function makePanel(record, number) {
  const count = record.steps.kind.length;
  const rankOf = new Int32Array(count);
  for (let r = 0; r < record.ranks; r++) rankOf.fill(r, record.bounds[r], record.bounds[r + 1]);
  const pairOf = new Map(record.pairs.step.map((step, index) => [step, index]));
  const panel = {
    ...record, number, count, rankOf, pairOf, onPath: new Set(record.path),
    rows: Array.from({ length: record.ranks }, () => ({ compute: [], collective: [], offload: [], reload: [], blocked: [] })),
    messagesIn: groupBy(record.messages.consumer, count), messagesOut: groupBy(record.messages.producer, count),
    needsIn: groupBy(record.needs.consumer, count), needsOut: groupBy(record.needs.producer, count),
    gapsOf: groupBy(record.gaps.rank, record.ranks),
    gapBefore: new Map(record.gaps.before.map((step, gap) => [step, gap])),
  };
  record.further_uses.message.forEach((m, use) => panel.messagesIn[record.further_uses.consumer[use]].push(m));
  panel.furtherUses = groupBy(record.further_uses.message, record.messages.stage.length);
  sortIntoRows(panel);
  measureLabels(panel);
  return panel;
}

// Sorts each step into the list of its rank and track, and each message into the lane of its receiver.
function sortIntoRows(panel) {
  panel.work = 0;
  for (let step = 0; step < panel.count; step++) {
    const kind = panel.steps.kind[step], row = panel.rows[panel.rankOf[step]];
    const track = data.tracks[data.kinds[kind]];
    if (track === undefined) throw new Error(`no style for actions of kind ${data.kinds[kind]}`);
    row[track === "message" ? "blocked" : track].push(step);
    if (track === "compute") panel.work += panel.steps.end[step] - panel.steps.start[step];
  }
  panel.meanStep = panel.work / Math.max(1, panel.rows.reduce((sum, row) => sum + row.compute.length, 0));
  const { begin, arrival, consumer } = panel.messages;
  panel.lanes = groupBy(consumer.map((step) => panel.rankOf[step]), panel.ranks);
  for (const lane of panel.lanes) lane.sort((a, b) => begin[a] - begin[b]);
  panel.longestMessage = begin.reduce((most, from, m) => Math.max(most, arrival[m] - from), 0);
}

// Measures the shortest steps and the longest labels, of single steps (0) and of pairs (1).
function measureLabels(panel) {
  panel.shortest = [Infinity, Infinity];
  panel.longest = [[], []];
  for (const step of panel.rows.flatMap((row) => row.compute)) {
    const pair = Number(panel.pairOf.has(step)), takes = panel.steps.end[step] - panel.steps.start[step];
    if (takes > panel.meanStep / 2) panel.shortest[pair] = Math.min(panel.shortest[pair], takes);
    labelsOf(panel, step).forEach((label, level) => {
      if (label.length > (panel.longest[pair][level] ?? "").length) panel.longest[pair][level] = label;
    });
  }
}

const panels = data.timelines.map(makePanel);

// --- texts -----------------------------------------------------------------------------------------

const [UNIT, PER_SECOND] = LONGEST >= 1 || LONGEST === 0 ? ["s", 1] : LONGEST >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];

// Formats a time with its unit, to seven digits.
function seconds(t) {
  return `${Number((t * PER_SECOND).toPrecision(7))} ${UNIT}`;
}

// Formats an amount of memory.
function bytes(amount) {
  const power = amount > 0 ? Math.min(4, Math.max(0, Math.floor(Math.log2(amount) / 10))) : 0;
  return `${Number((amount / 1024 ** power).toPrecision(4))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// Formats one part of a step: 2F0, 1UNSHARD.
function partText(kind, stage, microbatch) {
  return `${stage}${data.kinds[kind]}${COLLECTIVE.includes(kind) ? "" : microbatch}`;
}

// Formats a step: 2F0 or (0F7;7B3)OVERLAP_F_B.
function stepText(panel, step) {
  const { kind, stage, microbatch } = panel.steps, pair = panel.pairOf.get(step);
  if (pair === undefined) return partText(kind[step], stage[step], microbatch[step]);
  const first = partText(KIND.F, stage[step], microbatch[step]);
  const second = partText(panel.pairs.kind[pair], panel.pairs.stage[pair], panel.pairs.microbatch[pair]);
  return `(${first};${second})OVERLAP_F_B`;
}

// Returns the possible labels of a box, the longest first: 2F0, 2·0, 0.
function labelsOf(panel, step) {
  const { kind, stage, microbatch } = panel.steps, pair = panel.pairOf.get(step);
  const k = `${microbatch[step]}`;
  if (pair !== undefined) {
    const second = partText(panel.pairs.kind[pair], panel.pairs.stage[pair], panel.pairs.microbatch[pair]);
    return [`${partText(KIND.F, stage[step], k)} ${second}`, `${k}+${panel.pairs.microbatch[pair]}`];
  }
  return panel.stages > panel.ranks ? [partText(kind[step], stage[step], k), `${stage[step]}·${k}`, k] : [k];
}

// Describes a message: "activation of stage 1, microbatch 3".
function messageText(panel, m) {
  const { gradient, stage, microbatch } = panel.messages;
  return `${gradient[m] ? "gradient" : "activation"} of stage ${stage[m]}, microbatch ${microbatch[m]}`;
}

// Describes why a rank is idle, and which step it waits for.
function gapText(panel, gap) {
  const { start, end, reason, blame, message } = panel.gaps;
  const text = `idle ${seconds(end[gap] - start[gap])}: ${WAITING[reason[gap]] ?? reason[gap]}`;
  if (blame[gap] < 0) return text;
  const culprit = `${stepText(panel, blame[gap])}, rank ${panel.rankOf[blame[gap]]}`;
  return `${text} (${message[gap] < 0 ? "" : `${messageText(panel, message[gap])}, computed by `}${culprit})`;
}

// --- the state -------------------------------------------------------------------------------------

const FIT = Object.freeze({ start: 0, end: (LONGEST > 0 ? LONGEST * 1.005 : 1) + (host.room ?? 0) });
const state = {
  start: FIT.start, end: FIT.end,  // the visible range
  hover: null, selected: null,  // targets
  pointerTime: null, critical: false,
  frames: 0, firstDraw: null, lastDraw: null,  // for tests
};
const layout = { width: 0, gutter: 0, ratio: 1 };
const axis = document.getElementById("axis");
const card = document.getElementById("card");

// Returns the x of a time.
function xOf(t) {
  return layout.gutter + ((t - state.start) / (state.end - state.start)) * (layout.width - layout.gutter - 10);
}

// Returns the time at an x.
function timeAt(x) {
  return state.start + ((x - layout.gutter) / (layout.width - layout.gutter - 10)) * (state.end - state.start);
}

// Shows the time range from `start` of this `length`, clamped to the data.
function show(start, length) {
  const whole = FIT.end - FIT.start;
  const kept = Math.min(whole, Math.max(whole * 1e-6, length));
  state.start = Math.min(FIT.end - kept, Math.max(FIT.start, start));
  state.end = state.start + kept;
  redraw();
}

// Zooms around the time `t`; a factor below 1 zooms in.
function zoom(factor, t = (state.start + state.end) / 2) {
  const length = state.end - state.start, whole = FIT.end - FIT.start;
  const wanted = Math.min(whole, Math.max(whole * 1e-6, length * factor));
  show(t - ((t - state.start) / length) * wanted, wanted);
}

// Pans by a share of the visible range.
function pan(share) {
  show(state.start + share * (state.end - state.start), state.end - state.start);
}

// Shows everything.
function fit() {
  show(FIT.start, FIT.end - FIT.start);
}
