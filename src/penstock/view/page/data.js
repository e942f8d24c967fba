// The timelines of the page, indexed for drawing.
//
// All scripts of this folder are the body of one function, `drawTimelines(data, host)`, which `penstock.view.html`
// assembles. `host` is the page around it: {} for the HTML view, hooks of the playground otherwise (see page.js).
// LOOK has the kinds, words and shades that SVG and PNG pictures share.
//
//   panel    one timeline: a base canvas (steps, messages, memory) below an overlay (highlights)
//   step     an index into the columns of its panel: panel.steps.start[step]
//   target   { panel, step } or { panel, gap } or { panel, rank, time }: what is hovered or selected
//   t, x, y  seconds or units; pixels from the left and the top of a canvas

const KIND = Object.fromEntries(LOOK.kinds.map((name, number) => [name, number]));
const onTrack = (track) => LOOK.kinds.flatMap((name, number) => (LOOK.tracks[name] === track ? [number] : []));
const COMPUTE = onTrack("compute"), COLLECTIVE = onTrack("collective");
const MARKS = [...COLLECTIVE, ...onTrack("offload"), ...onTrack("reload")];

const LIMIT = host.memoryLimit ?? null; // bytes, or activations, per rank
const longest = Math.max(0, ...data.timelines.map((timeline) => timeline.makespan));
const maxMemory = Math.max(LIMIT ?? 0, ...data.timelines.flatMap((timeline) => timeline.memory.map((m) => m.peak)));

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
    ...record, number, count, rankOf, pairOf, onPath: new Set(record.path), fills: new Map(),
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
  panel.kinds = new Set(panel.pairs.kind.concat(panel.pairs.step.length ? [KIND.F] : []));
  for (let step = 0; step < panel.count; step++) {
    const kind = panel.steps.kind[step], row = panel.rows[panel.rankOf[step]];
    const track = LOOK.tracks[LOOK.kinds[kind]];
    if (track === undefined) throw new Error(`no style for actions of kind ${LOOK.kinds[kind]}`);
    row[track === "message" ? "blocked" : track].push(step);
    panel.kinds.add(kind);
    if (track === "compute") panel.work += panel.steps.end[step] - panel.steps.start[step];
  }
  panel.meanStep = panel.work / Math.max(1, panel.rows.reduce((sum, row) => sum + row.compute.length, 0));
  const { begin, arrival, consumer } = panel.messages;
  panel.lanes = groupBy(consumer.map((step) => panel.rankOf[step]), panel.ranks);
  for (const lane of panel.lanes) lane.sort((a, b) => begin[a] - begin[b]);
  panel.longestMessage = begin.reduce((most, from, m) => Math.max(most, arrival[m] - from), 0);
}

// Measures the shortest steps, and the longest label of each form, of single steps (0) and of pairs (1).
function measureLabels(panel) {
  panel.shortest = [Infinity, Infinity];
  panel.longest = [[], []];
  for (const step of panel.rows.flatMap((row) => row.compute)) {
    const pair = Number(panel.pairOf.has(step)), takes = panel.steps.end[step] - panel.steps.start[step];
    if (takes > panel.meanStep / 4) panel.shortest[pair] = Math.min(panel.shortest[pair], takes);
    labelsOf(panel, step).forEach((parts, form) => {
      const label = parts.join("");
      if (relativeWidth(label) > relativeWidth(panel.longest[pair][form] ?? "")) panel.longest[pair][form] = label;
    });
  }
}

// Returns the approximate width of a label, in digits.
function relativeWidth(label) {
  return label.length + 0.6 * (label.split("W").length - 1) - 0.5 * (label.split("I").length - 1);
}

// Returns the steps that a step needs, directly.
function inputsOf(panel, step) {
  const sent = panel.messagesIn[step].map((m) => panel.messages.producer[m]);
  return sent.concat(panel.needsIn[step].map((n) => panel.needs.producer[n]));
}

// Returns the steps that need a step, directly.
function usersOf(panel, step) {
  const sent = panel.messagesOut[step].flatMap((m) => [
    panel.messages.consumer[m], ...panel.furtherUses[m].map((use) => panel.further_uses.consumer[use]),
  ]);
  return sent.concat(panel.needsOut[step].map((n) => panel.needs.consumer[n]));
}

// Returns a step, its transitive inputs, and its direct users.
function chainOf(panel, step) {
  const chain = new Set([step]);
  for (const found of chain) for (const input of inputsOf(panel, found)) chain.add(input);
  for (const user of usersOf(panel, step)) chain.add(user);
  return chain;
}

// Returns all compute steps of a microbatch, on all ranks.
function stepsOfMicrobatch(panel, microbatch) {
  const found = new Set();
  for (const row of panel.rows) {
    for (const step of row.compute) {
      const pair = panel.pairOf.get(step);
      const second = pair === undefined ? -1 : panel.pairs.microbatch[pair];
      if (panel.steps.microbatch[step] === microbatch || second === microbatch) found.add(step);
    }
  }
  return found;
}
