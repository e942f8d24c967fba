// The time axis, and the animation frames.

const axis = document.getElementById("axis");

// Returns a round distance between ticks that leaves room for their numbers.
function tickDistance() {
  const room = layout.width < 600 ? 70 : 90;
  const least = (timeAt(room) - timeAt(0)) * timeUnit()[1];
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find((factor) => factor * power >= least) ?? 10);
}

// Draws the shared time axis, and which part of it is visible.
function drawAxis(context = prepare(axis, layout.width, 34)) {
  const distance = tickDistance(), [unit, per] = timeUnit();
  const digits = Math.max(0, -Math.floor(Math.log10(distance) + 1e-9));
  context.font = `11.5px ${colour.font}`;
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (let n = Math.ceil(state.start * per / distance - 1e-9); n * distance <= state.end * per; n++) {
    const x = Math.round(xOf(n * distance / per)) + 0.5;
    context.fillStyle = colour.line;
    context.fillRect(x - 0.5, 24, 1, 6);
    context.fillStyle = colour.soft;
    const text = (n * distance).toFixed(digits), half = context.measureText(text).width / 2;
    const free = state.pointerTime === null || Math.abs(x - xOf(state.pointerTime)) > half + 34;
    if (free && x + half < layout.width) context.fillText(text, Math.max(x, layout.gutter + half - 4), 14);
  }
  context.textAlign = "right";
  context.fillStyle = colour.soft;
  context.fillText(layout.gutter > 44 ? `time, ${unit}` : unit, layout.gutter - 6, 14, layout.gutter - 8);
  drawVisiblePart(context);
  if (state.pointerTime !== null && state.pointerTime >= state.start) drawPointerTime(context);
}

// Draws the bar below the axis that shows the visible part.
function drawVisiblePart(context) {
  const width = layout.width - layout.gutter - 10, all = FIT.end - FIT.start;
  context.fillStyle = colour.line;
  context.fillRect(layout.gutter, 30, width, 2);
  context.fillStyle = colour.accent;
  const from = ((state.start - FIT.start) / all) * width, length = ((state.end - state.start) / all) * width;
  context.fillRect(layout.gutter + from, 30, Math.max(3, length), 2);
}

// Draws the pointer's time on the axis.
function drawPointerTime(context) {
  const per = timeUnit()[1], distance = (state.end - state.start) * per / 1000;
  const digits = Math.max(0, Math.min(12, -Math.floor(Math.log10(distance))));
  const text = `${(state.pointerTime * per).toFixed(digits)}`, half = context.measureText(text).width / 2;
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
  setSizes();
  redraw();
  showCard();
}
