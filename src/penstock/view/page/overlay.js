// The overlay canvas of a panel: highlighted steps, the critical path, the pointer's time.

// Draws the overlay of a panel: highlighted steps, the critical path, the frame of the target, the pointer's time.
function drawOverlay(panel, context = prepare(panel.overlay, layout.width, panel.height)) {
  context.save();
  context.beginPath();
  context.rect(layout.gutter - 3, 0, layout.width, panel.height);
  context.clip();
  const target = currentTarget();
  const mine = target !== null && target.panel === panel ? target : null;
  const highlighted = highlightedIn(panel);
  if (highlighted) drawHighlighted(context, panel, highlighted);
  else if (state.critical) drawHighlighted(context, panel, panel.onPath);
  if (state.critical) drawPath(context, panel);
  if (mine?.step !== undefined) frame(context, panel, mine.step, colour.accent, 2.5);
  if (mine?.gap !== undefined) drawGap(context, panel, mine.gap);
  host.decorate?.(context, panel, tools);
  if (state.pointerTime !== null) drawHairline(context, panel);
  context.restore();
}

// Returns the steps of a panel to highlight: the selected microbatch, else the inputs and users of the hovered step.
function highlightedIn(panel) {
  const { hover, selected } = state, target = selected ?? hover;
  if (target?.step === undefined || host.plain) return null;
  if (selected && !MARKS.includes(target.panel.steps.kind[target.step])) {
    return stepsOfMicrobatch(panel, target.panel.steps.microbatch[target.step]);
  }
  return target.panel === panel ? chainOf(panel, target.step) : null;
}

// Fades everything except some steps, and draws the messages between them.
function drawHighlighted(context, panel, highlighted) {
  context.globalAlpha = 0.72;
  context.fillStyle = colour.page;
  context.fillRect(layout.gutter, 0, layout.width, panel.height);
  context.globalAlpha = 1;
  const [first, last] = visibleRanks(panel), { start, end } = panel.steps;
  for (const step of highlighted) {
    const rank = panel.rankOf[step];
    if (rank < first || rank > last || end[step] < state.start || start[step] > state.end) continue;
    if (MARKS.includes(panel.steps.kind[step])) continue;
    drawBox(context, panel, step, rowAt(panel, rank));
  }
  if (highlighted !== panel.onPath) for (const step of highlighted) drawArrows(context, panel, step, highlighted);
}

// Draws an arrow for each message from a highlighted step to this one.
function drawArrows(context, panel, step, highlighted) {
  const { producer, begin, arrival, gradient } = panel.messages;
  const middleOf = (s) => rowAt(panel, panel.rankOf[s]).box + panel.sizes.box / 2;
  for (const m of panel.messagesIn[step]) {
    if (!highlighted.has(producer[m]) || arrival[m] < state.start || begin[m] > state.end) continue;
    const stroke = gradient[m] ? colour.gradient : colour.activation;
    drawArrow(context, xOf(begin[m]), middleOf(producer[m]), xOf(arrival[m]), middleOf(step), stroke);
  }
}

// Draws one arrow.
function drawArrow(context, x0, y0, x1, y1, stroke) {
  const angle = Math.atan2(y1 - y0, x1 - x0), head = 6;
  context.strokeStyle = context.fillStyle = stroke;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
  context.beginPath();
  context.moveTo(x1, y1);
  for (const side of [angle - 0.4, angle + 0.4]) context.lineTo(x1 - head * Math.cos(side), y1 - head * Math.sin(side));
  context.fill();
}

// Draws the critical path: a frame around each step that is wide enough, and a line from step to step.
function drawPath(context, panel) {
  const { start, end, kind } = panel.steps, half = panel.sizes.box / 2, dense = isDense(panel);
  context.strokeStyle = colour.ink;
  context.lineWidth = 1.5;
  context.beginPath();
  const path = panel.path.filter((step) => !MARKS.includes(kind[step]) || end[step] > start[step]);
  for (const step of path) {
    const y = rowAt(panel, panel.rankOf[step]).box + half;
    context.lineTo(clampX(xOf(start[step])), y);
    context[dense ? "lineTo" : "moveTo"](clampX(xOf(end[step])), y);
  }
  context.stroke();
  if (!dense) for (const step of path) frame(context, panel, step, colour.ink, 1.5);
}

// Clamps an x near the canvas, because canvases cannot draw very long lines.
function clampX(x) {
  return Math.max(layout.gutter - 20, Math.min(layout.width + 20, x));
}

// Draws a frame around a step.
function frame(context, panel, step, stroke, width) {
  const y = rowAt(panel, panel.rankOf[step]);
  const x = clampX(xOf(panel.steps.start[step])), right = clampX(xOf(panel.steps.end[step]));
  if (panel.steps.end[step] < state.start || panel.steps.start[step] > state.end) return;
  const mark = MARKS.includes(panel.steps.kind[step]);
  context.strokeStyle = stroke;
  context.lineWidth = width;
  const [top, height] = mark ? [y.marks - 1, panel.sizes.marks + 1] : [y.box, panel.sizes.box];
  context.strokeRect(x - 0.5, top, Math.max(2, right - x), height);
}

// Draws a frame around an idle gap.
function drawGap(context, panel, gap) {
  const { rank, start, end } = panel.gaps, y = rowAt(panel, rank[gap]);
  const x = clampX(xOf(start[gap])), right = clampX(xOf(end[gap]));
  context.strokeStyle = colour.peak;
  context.lineWidth = 1.5;
  context.setLineDash([4, 3]);
  context.strokeRect(x + 1, y.box + 1, Math.max(2, right - x - 2), panel.sizes.box - 2);
  context.setLineDash([]);
}

// Draws the pointer's time through all panels.
function drawHairline(context, panel) {
  const x = Math.round(xOf(state.pointerTime)) + 0.5;
  if (x < layout.gutter) return;
  context.globalAlpha = 0.45;
  context.fillStyle = colour.ink;
  context.fillRect(x - 0.5, 0, 1, panel.height);
  context.globalAlpha = 1;
}
