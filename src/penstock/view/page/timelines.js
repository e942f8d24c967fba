// The base canvas of a panel: steps, messages, memory.

// --- colours and sizes -----------------------------------------------------------------------------

let colour = {};
const widths = new Map();

// Reads the colours of the theme from the style sheet.
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = "page ink soft line track blocked activation gradient memory peak accent on-box".split(" ");
  const valueOf = (name) => style.getPropertyValue(`--${name}`).trim();
  colour = Object.fromEntries([...names, ...data.kinds].map((name) => [name, valueOf(name)]));
  colour.font = style.getPropertyValue("--font");
  for (const panel of panels) panel.fills = new Map();
}

// Returns a step's colour; the later stages of a rank are lighter.
function fillOf(panel, step) {
  const kind = panel.steps.kind[step], stage = panel.steps.stage[step];
  const key = kind * 1e6 + stage;
  if (!panel.fills.has(key)) panel.fills.set(key, lighter(colour[data.kinds[kind]], chunkOf(panel, step)));
  return panel.fills.get(key);
}

// Returns how far along its rank's stages a step's stage is, from 0 to 1.
function chunkOf(panel, step) {
  const stages = panel.stages_of_rank[panel.rankOf[step]];
  return stages.length > 1 ? Math.max(0, stages.indexOf(panel.steps.stage[step])) / (stages.length - 1) : 0;
}

// Mixes a colour "#rrggbb" with up to two fifths of white.
function lighter(hex, share) {
  const mix = (at) => Math.round(parseInt(hex.slice(at, at + 2), 16) * (1 - 0.42 * share) + 255 * 0.42 * share);
  return hex.startsWith("#") ? `rgb(${mix(1)} ${mix(3)} ${mix(5)})` : hex;
}

// Returns the heights of a row for this number of ranks: marks, box, message lane, memory strip, space.
function sizesFor(ranks) {
  const choices = [[8, [4, 24, 5, 15, 8]], [64, [3, 13, 2, 7, 3]], [Infinity, [2, 7, 1, 4, 2]]];
  const [marks, box, lane, memory, space] = choices.find(([most]) => ranks <= most)[1];
  return { marks, box, lane, memory, pitch: marks + box + lane + memory + space };
}

// Returns the y of the parts of a rank's row.
function rowAt(panel, rank) {
  const { marks, box, lane, memory, pitch } = panel.sizes, top = rank * pitch + 2;
  const below = top + marks + box + 1;
  return { marks: top, box: top + marks, lane: below, memory: below + lane, bottom: below + lane + memory };
}

// Resizes a canvas to the screen resolution, within browser limits, and returns its context.
function prepare(canvas, width, height) {
  const ratio = Math.min(layout.ratio, 16000 / Math.max(width, height));
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// Returns the first and last visible rank, with a margin of half a screen.
function visibleRanks(panel) {
  const top = panel.plot.getBoundingClientRect().top, spare = innerHeight / 2;
  const first = Math.floor((-spare - top) / panel.sizes.pitch);
  const last = Math.ceil((innerHeight + spare - top) / panel.sizes.pitch);
  return [Math.max(0, first), Math.min(panel.ranks - 1, last)];
}

// Calls `visit(item)` for the visible items of a list that is sorted by start and by end.
function eachVisible(items, startOf, endOf, visit) {
  let index = firstWhere(items.length, (i) => endOf(items[i]) >= state.start);
  for (; index < items.length && startOf(items[index]) <= timeAt(layout.width); index++) visit(items[index]);
}

// --- drawing ---------------------------------------------------------------------------------------

const BUCKET = 5; // pixels of time that share a stack

// Returns whether steps are too narrow for boxes, so that shares of time are drawn instead.
function isDense(panel) {
  return panel.meanStep * ((layout.width - layout.gutter) / (state.end - state.start)) < 2.5;
}

// Draws everything of a panel that does not depend on the pointer.
function drawBase(panel) {
  const context = prepare(panel.base, layout.width, panel.height);
  const [first, last] = visibleRanks(panel);
  for (let rank = first; rank <= last; rank++) {
    drawTrack(context, panel, rank);
    if (isDense(panel)) drawShares(context, panel, rank);
    else {
      drawBoxes(context, panel, rank);
      drawMessages(context, panel, rank);
    }
    drawMarks(context, panel, rank);
    drawMemory(context, panel, rank);
    drawRankName(context, panel, rank);
  }
  drawEnd(context, panel);
}

// Draws the background, which is visible where a rank is idle.
function drawTrack(context, panel, rank) {
  const y = rowAt(panel, rank);
  const from = Math.max(layout.gutter, xOf(0)), to = Math.min(layout.width, xOf(panel.makespan));
  context.fillStyle = colour.track;
  if (to > from) context.fillRect(from, y.box, to - from, panel.sizes.box);
}

// Draws the name of the rank and its peak memory into the left margin.
function drawRankName(context, panel, rank) {
  const y = rowAt(panel, rank), wide = layout.gutter > 44;
  context.clearRect(0, y.marks - 1, layout.gutter, panel.sizes.pitch);
  context.fillStyle = colour.soft;
  context.font = `${Math.min(12, panel.sizes.box + 1)}px ${colour.font}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText(wide ? `rank ${rank}` : `${rank}`, layout.gutter - 8, y.box + panel.sizes.box / 2 + 0.5);
  if (panel.sizes.memory < 10 || !panel.memory[rank]?.peak) return;
  context.font = `10px ${colour.font}`;
  context.fillStyle = colour.peak;
  context.fillText(bytes(panel.memory[rank].peak), layout.gutter - 8, y.bottom - 5, layout.gutter - 10);
}

// Marks where the panel's makespan ends.
function drawEnd(context, panel) {
  const x = Math.round(xOf(panel.makespan)) + 0.5;
  if (x < layout.gutter || panel.makespan === 0) return;
  context.strokeStyle = colour.soft;
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(x, 0);
  context.lineTo(x, panel.height);
  context.stroke();
  context.setLineDash([]);
}

// Draws a box per step, and at most one per pixel.
function drawBoxes(context, panel, rank) {
  const { start, end } = panel.steps, row = panel.rows[rank], y = rowAt(panel, rank);
  for (const stream of [row.blocked, row.compute]) {
    let covered = -Infinity;
    eachVisible(stream, (s) => start[s], (s) => end[s], (step) => {
      if (xOf(end[step]) - covered < 1) return;
      covered = Math.max(xOf(end[step]), xOf(start[step]) + 1);
      drawBox(context, panel, step, y);
    });
  }
}

// Draws one step with its number, if that fits.
function drawBox(context, panel, step, y) {
  const x = Math.max(layout.gutter - 4, xOf(panel.steps.start[step]));
  const width = Math.min(layout.width + 4, xOf(panel.steps.end[step])) - x;
  const blocked = !COMPUTE.includes(panel.steps.kind[step]);
  context.fillStyle = blocked ? colour.blocked : fillOf(panel, step);
  const shown = Math.max(1, width > 4 ? width - 1 : width);
  if (blocked) context.fillRect(x, y.box + panel.sizes.box / 2 - 1, shown, 2);
  else context.fillRect(x, y.box, shown, panel.sizes.box);
  if (!blocked && width > 7 && panel.sizes.box > 9) drawLabel(context, panel, step, x, shown, y);
}

// Draws into a box the longest form of label that fits the whole panel, if it fits this box too.
function drawLabel(context, panel, step, x, width, y) {
  context.font = `${panel.sizes.box > 18 ? 11.5 : 9.5}px ${colour.font}`;
  const pair = Number(panel.pairOf.has(step)), room = xOf(panel.shortest[pair]) - xOf(0) - 3;
  const level = panel.longest[pair].findIndex((text) => widthOf(context, text) <= room);
  const label = labelsOf(panel, step).at(level);
  if (widthOf(context, label) + 2 > width) return;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = colour["on-box"];
  context.fillText(label, x + width / 2, y.box + panel.sizes.box / 2 + 0.5);
}

// Returns the width of a text, cached.
function widthOf(context, text) {
  const key = context.font + text;
  if (!widths.has(key)) widths.set(key, context.measureText(text).width);
  return widths.get(key);
}

// Draws the share of each kind per few pixels of time, as a stack.
function drawShares(context, panel, rank) {
  const { start, end, kind } = panel.steps, y = rowAt(panel, rank), width = timeAt(BUCKET) - timeAt(0);
  const spent = new Float64Array(data.kinds.length);
  let bucket = Math.floor(state.start / width);
  const from = bucket * width;
  const moveTo = (next) => {
    const left = bucket * width, right = Math.min(left + width, panel.makespan);
    if (next !== bucket) drawStack(context, spent, left, right - left, y.box, panel.sizes.box);
    bucket = next;
  };
  eachVisible(panel.rows[rank].compute, (s) => start[s], (s) => end[s], (step) => {
    for (let t = Math.max(start[step], from); t < end[step];) {
      const at = Math.floor(t / width + 1e-9), until = Math.min(end[step], (at + 1) * width);
      if (at > bucket) moveTo(at);
      spent[kind[step]] += until - t;
      if (until <= t) break;
      t = until;
    }
  });
  moveTo(-1);
}

// Draws one stack and clears it.
function drawStack(context, spent, from, width, top, height) {
  const x = xOf(from), right = xOf(from + width);
  let bottom = top + height;
  for (const kind of COMPUTE) {
    const part = (spent[kind] / width) * height;
    if (part > 0 && right > layout.gutter) {
      context.fillStyle = colour[data.kinds[kind]];
      context.fillRect(x, bottom - part, right - x + 0.3, part);
    }
    bottom -= part;
  }
  spent.fill(0);
}

// Draws the marks of collectives, offloads and reloads above the boxes, each in a line of its own.
function drawMarks(context, panel, rank) {
  const { start, end, kind } = panel.steps, { marks } = rowAt(panel, rank);
  const lists = ["collective", "offload", "reload"].map((track) => panel.rows[rank][track]);
  const lines = lists.filter((list) => list.length), height = (panel.sizes.marks - 1) / lines.length;
  lines.forEach((list, line) => {
    let covered = -Infinity;
    eachVisible(list, (s) => start[s], (s) => end[s], (step) => {
      const x = xOf(start[step]), width = Math.max(2, xOf(end[step]) - x);
      if (x + width - covered < 1) return;
      covered = x + width;
      context.fillStyle = colour[data.kinds[kind[step]]];
      context.fillRect(x, marks + line * height, width, height);
    });
  });
}

// Draws the messages that a rank receives as bars below its boxes, from begin to arrival.
function drawMessages(context, panel, rank) {
  const { begin, arrival, gradient } = panel.messages, lane = panel.lanes[rank], y = rowAt(panel, rank);
  let index = firstWhere(lane.length, (i) => begin[lane[i]] >= state.start - panel.longestMessage);
  let covered = -Infinity;
  for (; index < lane.length && begin[lane[index]] <= timeAt(layout.width); index++) {
    const x = xOf(begin[lane[index]]), width = Math.max(1, xOf(arrival[lane[index]]) - x);
    if (x + width - covered < 1) continue;
    covered = x + width;
    context.fillStyle = gradient[lane[index]] ? colour.gradient : colour.activation;
    context.fillRect(x, y.lane, width, Math.max(1, panel.sizes.lane - 2));
  }
}
