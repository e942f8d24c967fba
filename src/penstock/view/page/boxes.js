// The base canvas of a panel: a box per step with its label, or shares of time where steps are too narrow.

const widths = new Map();

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

const BUCKET = 5; // pixels of time that share a stack

// Returns whether steps are too narrow for boxes, so that shares of time are drawn instead.
function isDense(panel) {
  return panel.meanStep * ((layout.width - layout.gutter) / (state.end - state.start)) < 2.5;
}

// Draws everything of a panel that does not depend on the pointer.
function drawBase(panel, context = prepare(panel.base, layout.width, panel.height)) {
  const [first, last] = visibleRanks(panel), dense = isDense(panel);
  panel.label = dense ? null : labelForm(context, panel);
  for (let rank = first; rank <= last; rank++) {
    drawTrack(context, panel, rank);
    if (dense) drawShares(context, panel, rank);
    else {
      drawBoxes(context, panel, rank);
      if (panel.sizes.lane) drawMessages(context, panel, rank);
    }
    drawMarks(context, panel, rank);
    drawMemory(context, panel, rank);
    drawRankName(context, panel, rank);
  }
  drawEnd(context, panel);
}

// Chooses one form and size of label for all steps of a panel: the first that fits its shortest steps, or null.
function labelForm(context, panel) {
  const box = panel.sizes.box, sizes = [11.5, 10, 9, 8].filter((size) => size <= box);
  for (const form of [0, 1]) {
    for (const size of form ? sizes : sizes.filter((each) => each >= 9)) {
      context.font = `${size}px ${colour.font}`;
      const fits = panel.longest.every((labels, pair) => {
        const room = (xOf(panel.shortest[pair]) - xOf(0)) * (pair && isTall(panel) ? 1.7 : 1);
        return !labels.length || widthOf(context, labels[form]) + (form ? 2 : 3) <= room;
      });
      if (fits) return { form, font: context.font, size };
    }
  }
  return null;
}

// Returns whether the two parts of a pair have room for a label each.
function isTall(panel) {
  return panel.sizes.box >= 20;
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

// Draws one step, an overlapped pair in two halves, with its label.
function drawBox(context, panel, step, y) {
  const { kind, stage, start, end } = panel.steps, rank = panel.rankOf[step], pair = panel.pairOf.get(step);
  const x = Math.max(layout.gutter - 4, xOf(start[step])), width = Math.min(layout.width + 4, xOf(end[step])) - x;
  const shown = Math.max(1, width > 4 ? width - 1 : width), { box } = panel.sizes;
  if (!COMPUTE.includes(kind[step])) {
    context.fillStyle = colour.blocked;
    return context.fillRect(x, y.box + box / 2 - 1, shown, 2);
  }
  const parts = [[pair === undefined ? kind[step] : KIND.F, stage[step]]];
  if (pair !== undefined) parts.push([panel.pairs.kind[pair], panel.pairs.stage[pair]]);
  const fills = parts.map(([each, of]) => fillOf(panel, each, of, rank)), height = box / parts.length;
  fills.forEach((fill, part) => {
    context.fillStyle = fill;
    context.fillRect(x, y.box + part * height, shown, height);
  });
  if (panel.label) drawLabel(context, panel, step, { x, top: y.box, width: shown, fills });
}

// Draws the label of a step if it fits: of a pair, one in each half, or both parts in one line.
function drawLabel(context, panel, step, { x, top, width, fills }) {
  const { form, font, size } = panel.label, parts = labelsOf(panel, step)[form];
  const lines = parts.length > 1 && !isTall(panel) ? [parts.join("")] : parts, height = panel.sizes.box / lines.length;
  context.font = lines.length > 1 ? `${Math.min(size, height - 1.5)}px ${colour.font}` : font;
  if (Math.max(...lines.map((line) => widthOf(context, line))) + 1 > width) return;
  context.textAlign = "center";
  context.textBaseline = "middle";
  lines.forEach((line, number) => {
    const middle = top + (number + 0.5) * height + 0.5, ink = textOn(fills[number]);
    if (lines.length < fills.length) drawOutline(context, line, x + width / 2, middle, ink);
    context.fillStyle = ink;
    context.fillText(line, x + width / 2, middle);
  });
}

// Draws an outline behind a text that is on two colours.
function drawOutline(context, text, x, y, ink) {
  context.strokeStyle = ink === "#ffffff" ? "#1a1a1a" : "#ffffff";
  context.lineWidth = 2.5;
  context.lineJoin = "round";
  context.strokeText(text, x, y);
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
  const spent = new Float64Array(LOOK.kinds.length);
  let bucket = Math.floor(state.start / width);
  const from = bucket * width;
  const moveTo = (next) => {
    const left = bucket * width, right = Math.min(left + width, panel.makespan);
    if (next !== bucket) drawStack(context, spent, left, right - left, y.box, panel.sizes.box);
    bucket = next;
  };
  eachVisible(panel.rows[rank].compute, (s) => start[s], (s) => end[s], (step) => {
    const pair = panel.pairOf.get(step), kinds = pair === undefined ? [kind[step]] : [KIND.F, panel.pairs.kind[pair]];
    for (let t = Math.max(start[step], from); t < end[step];) {
      const at = Math.floor(t / width + 1e-9), until = Math.min(end[step], (at + 1) * width);
      if (at > bucket) moveTo(at);
      for (const each of kinds) spent[each] += (until - t) / kinds.length;
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
      context.fillStyle = colour[LOOK.kinds[kind]];
      context.fillRect(x, bottom - part, right - x + 0.3, part);
    }
    bottom -= part;
  }
  spent.fill(0);
}
