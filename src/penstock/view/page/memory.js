// The memory strips of a panel: the area, the peak, the limit.

// Draws the memory of a rank over time as a stepped area, and its peak.
function drawMemory(context, panel, rank) {
  if (!panel.sizes.memory || !panel.memory[rank]) return;
  const { times, total, fixed, peak } = panel.memory[rank], y = rowAt(panel, rank);
  const yOf = (amount) => y.bottom - (amount / maxMemory) * (panel.sizes.memory - 1);
  const right = Math.min(layout.width, xOf(panel.makespan));
  const first = firstWhere(times.length, (i) => times[i] >= state.start);
  context.fillStyle = colour.memory;
  context.beginPath();
  context.moveTo(layout.gutter, y.bottom);
  const last = traceMemory(context, panel.memory[rank], first, right, yOf, first ? total[first - 1] : fixed);
  context.lineTo(right, yOf(last));
  context.lineTo(right, y.bottom);
  if (right > layout.gutter) context.fill();
  if (peak > 0) drawPeak(context, panel, rank, yOf(peak));
  if (LIMIT !== null) drawLimit(context, yOf(LIMIT), right, peak > LIMIT);
}

// Draws the memory limit, which is red where the peak is above it.
function drawLimit(context, y, right, exceeded) {
  context.strokeStyle = exceeded ? colour.peak : colour.soft;
  context.setLineDash([5, 3]);
  context.beginPath();
  context.moveTo(layout.gutter, Math.round(y) + 0.5);
  context.lineTo(right, Math.round(y) + 0.5);
  context.stroke();
  context.setLineDash([]);
}

// Traces the outline of the area; a pixel with many changes shows their maximum. Returns the last value.
function traceMemory(context, { times, total }, first, right, yOf, amountNow) {
  const stepTo = (x, amount) => {
    context.lineTo(x, yOf(amountNow));
    context.lineTo(x, yOf((amountNow = amount)));
  };
  stepTo(layout.gutter, amountNow);
  for (let i = first; i < times.length && xOf(times[i]) <= right; i++) {
    const x = xOf(times[i]);
    let most = total[i];
    while (i + 1 < times.length && xOf(times[i + 1]) - x < 1) most = Math.max(most, total[++i]);
    stepTo(x, most);
    if (total[i] !== most) stepTo(Math.min(x + 1, right), total[i]);
  }
  return amountNow;
}

// Marks the first peak of a rank.
function drawPeak(context, panel, rank, y) {
  const { times, total, peak } = panel.memory[rank];
  const x = xOf(times[total.indexOf(peak)] ?? 0);
  context.fillStyle = colour.peak;
  if (x >= layout.gutter && x <= layout.width) context.fillRect(x, y - 1, panel.sizes.memory > 10 ? 10 : 6, 2);
}
