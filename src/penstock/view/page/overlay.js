// The overlay canvas of a panel (highlights), the time axis, and the animation frames.

// --- highlights ------------------------------------------------------------------------------------

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

// Draws the overlay of a panel: highlighted steps, the critical path, the frame of the target, the pointer's time.
function drawOverlay(panel) {
  const context = prepare(panel.overlay, layout.width, panel.height);
  context.save();
  context.beginPath();
  context.rect(layout.gutter - 3, 0, layout.width, panel.height);
  context.clip();
  const target = currentTarget();
  const mine = target !== null && target.panel === panel ? target : null;
  if (mine?.step !== undefined && !host.plain) drawHighlighted(context, panel, chainOf(panel, mine.step));
  else if (state.critical) drawHighlighted(context, panel, panel.onPath);
  if (state.critical) drawPath(context, panel);
  if (mine?.step !== undefined) frame(context, panel, mine.step, colour.accent, 2.5);
  if (mine?.gap !== undefined) drawGap(context, panel, mine.gap);
  host.decorate?.(context, panel, tools);
  if (state.pointerTime !== null) drawHairline(context, panel);
  context.restore();
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

// --- axis and frames -------------------------------------------------------------------------------

// Returns a round distance between ticks that leaves room for their numbers.
function tickDistance() {
  const room = layout.width < 600 ? 70 : 90;
  const least = (timeAt(room) - timeAt(0)) * PER_SECOND;
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find((factor) => factor * power >= least) ?? 10);
}

// Draws the shared time axis, and which part of it is visible.
function drawAxis() {
  const context = prepare(axis, layout.width, 34), distance = tickDistance();
  const digits = Math.max(0, -Math.floor(Math.log10(distance) + 1e-9));
  context.font = `11.5px ${colour.font}`;
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (let n = Math.ceil(state.start * PER_SECOND / distance - 1e-9); n * distance <= state.end * PER_SECOND; n++) {
    const x = Math.round(xOf(n * distance / PER_SECOND)) + 0.5;
    context.fillStyle = colour.line;
    context.fillRect(x - 0.5, 24, 1, 6);
    context.fillStyle = colour.soft;
    const text = (n * distance).toFixed(digits), half = context.measureText(text).width / 2;
    const free = state.pointerTime === null || Math.abs(x - xOf(state.pointerTime)) > half + 34;
    if (free && x + half < layout.width) context.fillText(text, Math.max(x, layout.gutter + half - 4), 14);
  }
  context.textAlign = "right";
  context.fillStyle = colour.soft;
  context.fillText(layout.gutter > 44 ? `time, ${UNIT}` : UNIT, layout.gutter - 8, 14);
  drawVisiblePart(context);
  if (state.pointerTime !== null && state.pointerTime >= state.start) drawPointerTime(context);
}

// Draws the bar below the axis that shows the visible part.
function drawVisiblePart(context) {
  const width = layout.width - layout.gutter - 10, whole = FIT.end - FIT.start;
  context.fillStyle = colour.line;
  context.fillRect(layout.gutter, 30, width, 2);
  context.fillStyle = colour.accent;
  const from = ((state.start - FIT.start) / whole) * width, length = ((state.end - state.start) / whole) * width;
  context.fillRect(layout.gutter + from, 30, Math.max(3, length), 2);
}

// Draws the pointer's time on the axis.
function drawPointerTime(context) {
  const distance = (state.end - state.start) * PER_SECOND / 1000;
  const digits = Math.max(0, Math.min(12, -Math.floor(Math.log10(distance))));
  const text = `${(state.pointerTime * PER_SECOND).toFixed(digits)}`, half = context.measureText(text).width / 2;
  context.textAlign = "center";
  context.fillStyle = colour.ink;
  context.fillText(text, Math.min(layout.width - half - 2, Math.max(layout.gutter + half, xOf(state.pointerTime))), 14);
}

const pending = { base: false, overlay: false };

// Schedules everything to be drawn in the next frame.
function redraw() {
  pending.base = true;
  redrawOverlay();
}

// Schedules the overlay to be drawn in the next frame.
function redrawOverlay() {
  if (!pending.overlay) requestAnimationFrame(drawFrame);
  pending.overlay = true;
}

// Draws what is scheduled, in the visible panels.
function drawFrame() {
  const began = performance.now();
  for (const panel of panels) {
    const { top, bottom } = panel.plot.getBoundingClientRect();
    if (bottom < -innerHeight / 2 || top > innerHeight * 1.5) continue;
    if (pending.base) drawBase(panel);
    drawOverlay(panel);
  }
  drawAxis();
  pending.base = pending.overlay = false;
  state.frames += 1;
  state.lastDraw = performance.now() - began;
  state.firstDraw ??= performance.now();
}

// Measures the page again, and redraws.
function resize() {
  layout.width = document.getElementById("panels").clientWidth;
  layout.gutter = layout.width < 600 ? 34 : 72;
  layout.ratio = Math.max(1, devicePixelRatio || 1);
  redraw();
  showCard();
}
