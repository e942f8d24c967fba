// What the editor draws over a timeline: where a step goes, what is blocked, the deadlock cycle, ready steps.

// Returns where a dragged step would go at a time: the index after it is taken out, or with `swap` the step there.
export function indexAt(panel, { rank, from }, time, swap) {
  const { start, end } = panel.steps, first = panel.bounds[rank], count = panel.bounds[rank + 1] - first;
  let index = 0, under;
  for (let i = 0; i < count; i++) {
    const step = first + i;
    if (start[step] <= time && time < end[step]) under = i;
    if (i !== from && (start[step] + end[step]) / 2 < time) index++;
  }
  return swap && under !== undefined ? { swap: under } : { index };
}

// Draws everything of the editor on the overlay of its panel.
export function decorate(context, panel, tools, session, mean) {
  const { answer, drag } = session;
  if (!answer) return;
  drawUnreached(context, panel, tools, answer);
  for (const { cycle } of answer.verdict.violations) if (cycle.length) drawCycle(context, panel, tools, cycle);
  for (const violation of answer.verdict.violations) drawMarked(context, panel, tools, violation);
  for (const box of ghostBoxes(panel, tools, answer.ready, mean)) drawGhost(context, tools, box);
  if (drag?.at) drawTarget(context, panel, tools, drag);
}

function boxOf(panel, tools, step) {
  const row = tools.rowAt(panel, panel.rankOf[step]), x = tools.xOf(panel.steps.start[step]);
  return { x, y: row.box, width: Math.max(3, tools.xOf(panel.steps.end[step]) - x), height: panel.sizes.box };
}

// Greys what is never reached, because its rank is stuck before it.
function drawUnreached(context, panel, tools, { unreached = [] }) {
  context.globalAlpha = 0.62;
  context.fillStyle = tools.colourOf("page");
  for (const step of unreached) {
    const { x, y, width, height } = boxOf(panel, tools, step);
    context.fillRect(x, y, width, height);
  }
  context.globalAlpha = 1;
}

function drawMarked(context, panel, tools, { rank, step }) {
  if (rank === null || step === null) return;
  const { x, y, width, height } = boxOf(panel, tools, panel.bounds[rank] + step);
  context.strokeStyle = tools.colourOf("peak");
  context.lineWidth = 2;
  context.strokeRect(x + 1, y + 1, width - 2, height - 2);
}

// Draws the waits of a deadlock: an arrow from each step to what it waits for, and along the list to the next wait.
function drawCycle(context, panel, tools, cycle) {
  const stroke = tools.colourOf("peak");
  const middle = ({ x, y, width, height }) => [x + width / 2, y + height / 2];
  const boxAt = (rank, step) => boxOf(panel, tools, panel.bounds[rank] + step);
  cycle.forEach((wait, i) => {
    const from = boxAt(wait.rank, wait.step), to = boxAt(wait.waits_for.rank, wait.waits_for.step);
    for (const { x, y, width, height } of [from, to]) {
      context.strokeStyle = stroke;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, width - 2, height - 2);
    }
    tools.drawArrow(context, ...middle(from), ...middle(to), stroke);
    const next = cycle[(i + 1) % cycle.length], [x0, y0] = middle(to), [x1, y1] = middle(boxAt(next.rank, next.step));
    context.setLineDash([4, 3]);
    if (next.rank === wait.waits_for.rank && x0 !== x1) tools.drawArrow(context, x0, y0 + 7, x1, y1 + 7, stroke);
    context.setLineDash([]);
  });
}

// Returns the boxes of ready steps: those of a rank one after the other, from its end.
function ghostBoxes(panel, tools, ready, mean) {
  const width = Math.max(26, tools.xOf(mean) - tools.xOf(0)), next = new Map();
  return ready.map((ghost) => {
    const row = tools.rowAt(panel, ghost.rank), x = Math.max(tools.xOf(ghost.start), next.get(ghost.rank) ?? 0);
    next.set(ghost.rank, x + width + 2);
    return { ...ghost, x, y: row.box, width, height: panel.sizes.box };
  });
}

function drawGhost(context, tools, { x, y, width, height, text }) {
  context.strokeStyle = context.fillStyle = tools.colourOf("accent");
  context.lineWidth = 1.2;
  context.setLineDash([3, 3]);
  context.strokeRect(x + 1, y + 1, width - 2, height - 2);
  context.setLineDash([]);
  context.font = `11px ${tools.colourOf("font")}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, x + width / 2, y + height / 2, width - 4);
}

// Returns the ready step at the place of a click, if any.
export function ghostAt(event, tools, ready, mean) {
  const panel = tools.panels[0], plot = panel.plot.getBoundingClientRect();
  const x = event.clientX - plot.left, y = event.clientY - plot.top;
  return ghostBoxes(panel, tools, ready, mean).find((box) => x >= box.x && x <= box.x + box.width && y >= box.y && y <= box.y + box.height);
}

// Shows where the dragged step would go.
function drawTarget(context, panel, tools, { step, rank, from, at }) {
  const own = boxOf(panel, tools, step);
  context.lineWidth = 2.5;
  context.strokeStyle = at.remove ? tools.colourOf("peak") : tools.colourOf("accent");
  context.strokeRect(own.x, own.y, own.width, own.height);
  if (at.remove) return;
  const first = panel.bounds[rank], last = panel.bounds[rank + 1] - 1;
  if (at.swap !== undefined) {
    const { x, y, width, height } = boxOf(panel, tools, first + at.swap);
    return context.strokeRect(x, y, width, height);
  }
  const index = at.index >= from ? at.index + 1 : at.index;
  const x = first + index > last ? tools.xOf(panel.steps.end[last]) : tools.xOf(panel.steps.start[first + index]);
  context.fillStyle = tools.colourOf("accent");
  context.fillRect(x - 1.5, own.y - 4, 3, own.height + 8);
}
