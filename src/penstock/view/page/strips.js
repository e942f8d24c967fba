// What surrounds the boxes of a rank: its name, the idle background, marks, messages.

// Draws the background, which is visible where a rank is idle.
function drawTrack(context, panel, rank) {
  const y = rowAt(panel, rank);
  const from = Math.max(layout.gutter, xOf(0)), to = Math.min(layout.width, xOf(panel.makespan));
  context.fillStyle = colour.track;
  if (to > from) context.fillRect(from, y.box, to - from, panel.sizes.box);
}

// Draws the name of the rank and its peak memory into the left margin.
function drawRankName(context, panel, rank) {
  const y = rowAt(panel, rank), wide = layout.gutter > 44, { box, memory, pitch } = panel.sizes;
  context.fillStyle = colour.page;
  context.fillRect(0, y.marks - 1, layout.gutter, pitch);
  context.fillStyle = colour.soft;
  context.font = `${Math.min(12, box + 1)}px ${colour.font}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText(wide ? `rank ${rank}` : `${rank}`, layout.gutter - 8, y.box + box / 2 + 0.5);
  if (memory < 10 || !panel.memory[rank]?.peak) return;
  context.font = `10px ${colour.font}`;
  context.fillStyle = colour.peak;
  context.fillText(shortMemoryText(panel.memory[rank].peak), layout.gutter - 8, y.bottom - 5, layout.gutter - 10);
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
      context.fillStyle = colour[LOOK.kinds[kind[step]]];
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
