"use strict";
// Draws the timelines of `penstock.view.html` and answers mouse, touch and keys.
//
//   panel   one timeline: a base canvas (steps, messages, memory) below an overlay (what is lit)
//   step    an index into the columns of its panel: panel.steps.start[step]
//   spot    { panel, step } or { panel, gap } or { panel, rank, time }: what the pointer or the keys are at
//   t, x, y seconds; pixels from the left and the top of a canvas

// --- the data --------------------------------------------------------------------------------------

const data = JSON.parse(document.getElementById("data").textContent);
const KIND = Object.fromEntries(data.kinds.map((name, number) => [name, number]));
const COMPUTE = ["F", "I", "W", "B", "OVERLAP_F_B"].map((name) => KIND[name]);
const COLLECTIVE = ["UNSHARD", "RESHARD", "REDUCE_GRAD"].map((name) => KIND[name]);
const MEANING = {
  F: "forward", I: "backward for the input", W: "backward for the weights", B: "backward",
  OVERLAP_F_B: "forward and backward as one", UNSHARD: "gather the parameters",
  RESHARD: "let go of the gathered parameters", REDUCE_GRAD: "sum the gradients over replicas",
  SEND_F: "held up by sending an activation", RECV_F: "held up by receiving an activation",
  SEND_B: "held up by sending a gradient", RECV_B: "held up by receiving a gradient",
};
const WAITING = {
  "warm-up": "warm-up, until there is something to do",
  activation: "waits for an activation to be computed", gradient: "waits for a gradient to be computed",
  link: "waits for a message on its way", "blocked receive": "held up by a message in front of it",
  unshard: "waits for its parameters to be gathered", drain: "drain, nothing is left to do",
};
const LONGEST = Math.max(0, ...data.timelines.map((timeline) => timeline.makespan));
const MOST_HELD = Math.max(0, ...data.timelines.flatMap((timeline) => timeline.memory.map((m) => m.peak)));

// Gives one list per key of `length` keys, with the indices of `keys` in their order.
function groupBy(keys, length) {
  const groups = Array.from({ length }, () => []);
  keys.forEach((key, index) => { if (key >= 0) groups[key].push(index); });
  return groups;
}

// Gives the first index of a sorted `count` for which `isPast` holds.
function firstWhere(count, isPast) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isPast(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

// Makes a panel's record quick to ask: rows by rank, inputs and users by step.
function makePanel(record, number) {
  const count = record.steps.kind.length;
  const rankOf = new Int32Array(count);
  for (let r = 0; r < record.ranks; r++) rankOf.fill(r, record.bounds[r], record.bounds[r + 1]);
  const pairOf = new Map(record.pairs.step.map((step, index) => [step, index]));
  const panel = {
    ...record, number, count, rankOf, pairOf, onPath: new Set(record.path),
    rows: Array.from({ length: record.ranks }, () => ({ compute: [], collective: [], held: [] })),
    messagesIn: groupBy(record.messages.consumer, count), messagesOut: groupBy(record.messages.producer, count),
    needsIn: groupBy(record.needs.consumer, count), needsOut: groupBy(record.needs.producer, count),
    gapsOf: groupBy(record.gaps.rank, record.ranks),
    gapBefore: new Map(record.gaps.before.map((step, gap) => [step, gap])),
  };
  sortIntoRows(panel);
  measureLabels(panel);
  return panel;
}

// Puts each step into the list of its rank and stream, and each message into the lane of its receiver.
function sortIntoRows(panel) {
  panel.work = 0;
  for (let step = 0; step < panel.count; step++) {
    const kind = panel.steps.kind[step], row = panel.rows[panel.rankOf[step]];
    const stream = COMPUTE.includes(kind) ? "compute" : COLLECTIVE.includes(kind) ? "collective" : "held";
    row[stream].push(step);
    if (stream === "compute") panel.work += panel.steps.end[step] - panel.steps.start[step];
  }
  panel.meanStep = panel.work / Math.max(1, panel.rows.reduce((sum, row) => sum + row.compute.length, 0));
  const { begin, arrival, consumer } = panel.messages;
  panel.lanes = groupBy(consumer.map((step) => panel.rankOf[step]), panel.ranks);
  for (const lane of panel.lanes) lane.sort((a, b) => begin[a] - begin[b]);
  panel.longestMessage = begin.reduce((most, from, m) => Math.max(most, arrival[m] - from), 0);
}

// Notes how short steps are and how long their labels, for single ones (0) and for pairs (1).
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

// --- words -----------------------------------------------------------------------------------------

const [UNIT, PER_SECOND] = LONGEST >= 1 || LONGEST === 0 ? ["s", 1] : LONGEST >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];

// Writes a time with its unit, to seven digits.
function seconds(t) {
  return `${Number((t * PER_SECOND).toPrecision(7))} ${UNIT}`;
}

// Writes an amount of memory.
function bytes(amount) {
  const power = amount > 0 ? Math.min(4, Math.max(0, Math.floor(Math.log2(amount) / 10))) : 0;
  return `${Number((amount / 1024 ** power).toPrecision(4))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// Writes one part of a step as penstock does: 2F0, 1UNSHARD.
function partText(kind, stage, microbatch) {
  return `${stage}${data.kinds[kind]}${COLLECTIVE.includes(kind) ? "" : microbatch}`;
}

// Writes a step as penstock does: 2F0 or (0F7;7B3)OVERLAP_F_B.
function stepText(panel, step) {
  const { kind, stage, microbatch } = panel.steps, pair = panel.pairOf.get(step);
  if (pair === undefined) return partText(kind[step], stage[step], microbatch[step]);
  const first = partText(KIND.F, stage[step], microbatch[step]);
  const second = partText(panel.pairs.kind[pair], panel.pairs.stage[pair], panel.pairs.microbatch[pair]);
  return `(${first};${second})OVERLAP_F_B`;
}

// Gives what may stand in a step's box, the longest first: 2F0, 2·0, 0.
function labelsOf(panel, step) {
  const { kind, stage, microbatch } = panel.steps, pair = panel.pairOf.get(step);
  const k = `${microbatch[step]}`;
  if (pair !== undefined) {
    const second = partText(panel.pairs.kind[pair], panel.pairs.stage[pair], panel.pairs.microbatch[pair]);
    return [`${partText(KIND.F, stage[step], k)} ${second}`, `${k}+${panel.pairs.microbatch[pair]}`];
  }
  return panel.stages > panel.ranks ? [partText(kind[step], stage[step], k), `${stage[step]}·${k}`, k] : [k];
}

// Names a message: "activation of stage 1, microbatch 3".
function messageText(panel, m) {
  const { gradient, stage, microbatch } = panel.messages;
  return `${gradient[m] ? "gradient" : "activation"} of stage ${stage[m]}, microbatch ${microbatch[m]}`;
}

// Says why a rank idles, and for whom.
function gapText(panel, gap) {
  const { start, end, reason, blame, message } = panel.gaps;
  const text = `idle ${seconds(end[gap] - start[gap])}: ${WAITING[reason[gap]] ?? reason[gap]}`;
  if (blame[gap] < 0) return text;
  const culprit = `${stepText(panel, blame[gap])}, rank ${panel.rankOf[blame[gap]]}`;
  return `${text} (${message[gap] < 0 ? "" : `${messageText(panel, message[gap])}, made by `}${culprit})`;
}

// --- the state -------------------------------------------------------------------------------------

const FIT = Object.freeze({ start: 0, end: LONGEST > 0 ? LONGEST * 1.005 : 1 });
const state = {
  start: FIT.start, end: FIT.end,  // the visible range
  hover: null, selected: null,  // spots
  pointerTime: null, critical: false,
  frames: 0, firstDraw: null, lastDraw: null,  // for tests
};
const layout = { width: 0, gutter: 0, ratio: 1 };
const axis = document.getElementById("axis");
const card = document.getElementById("card");

// Gives the x of a time.
function xOf(t) {
  return layout.gutter + ((t - state.start) / (state.end - state.start)) * (layout.width - layout.gutter - 10);
}

// Gives the time at an x.
function timeAt(x) {
  return state.start + ((x - layout.gutter) / (layout.width - layout.gutter - 10)) * (state.end - state.start);
}

// Shows the range of time from `start`, `length` long, kept within what there is.
function show(start, length) {
  const whole = FIT.end - FIT.start;
  const kept = Math.min(whole, Math.max(whole * 1e-6, length));
  state.start = Math.min(FIT.end - kept, Math.max(FIT.start, start));
  state.end = state.start + kept;
  redraw();
}

// Zooms so that the time `t` stays where it is; a factor below 1 comes closer.
function zoom(factor, t = (state.start + state.end) / 2) {
  const length = state.end - state.start, whole = FIT.end - FIT.start;
  const wanted = Math.min(whole, Math.max(whole * 1e-6, length * factor));
  show(t - ((t - state.start) / length) * wanted, wanted);
}

// Moves by a share of what is visible.
function pan(share) {
  show(state.start + share * (state.end - state.start), state.end - state.start);
}

// Shows everything.
function fit() {
  show(FIT.start, FIT.end - FIT.start);
}
