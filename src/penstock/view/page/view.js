// The state of the page: the visible time range, what is selected, the sizes of rows.

const panels = data.timelines.map(makePanel);
const FIT = Object.freeze({ start: 0, end: (longest > 0 ? longest * 1.005 : 1) + (host.room ?? 0) });
const state = {
  start: FIT.start, end: FIT.end,  // the visible range
  hover: null, selected: null,  // targets
  pointerTime: null, critical: false, memory: true,
  exporting: false,  // whether all ranks are drawn, visible or not
  frames: 0, firstDraw: null, lastDraw: null,  // for tests
};
const layout = { width: 0, gutter: 0, ratio: 1 };

// Returns the x of a time.
function xOf(t) {
  return layout.gutter + ((t - state.start) / (state.end - state.start)) * (layout.width - layout.gutter - 10);
}

// Returns the time at an x.
function timeAt(x) {
  return state.start + ((x - layout.gutter) / (layout.width - layout.gutter - 10)) * (state.end - state.start);
}

// Shows the time range from `start` of this `length`, clamped to the data.
function show(start, length) {
  const all = FIT.end - FIT.start;
  const kept = Math.min(all, Math.max(all * 1e-6, length));
  state.start = Math.min(FIT.end - kept, Math.max(FIT.start, start));
  state.end = state.start + kept;
  redraw();
}

// Zooms around the time `t`; a factor below 1 zooms in.
function zoom(factor, t = (state.start + state.end) / 2) {
  const length = state.end - state.start, all = FIT.end - FIT.start;
  const wanted = Math.min(all, Math.max(all * 1e-6, length * factor));
  show(t - ((t - state.start) / length) * wanted, wanted);
}

// Pans by a share of the visible range.
function pan(share) {
  show(state.start + share * (state.end - state.start), state.end - state.start);
}

// Shows everything.
function fit() {
  show(FIT.start, FIT.end - FIT.start);
}

// --- rows ------------------------------------------------------------------------------------------

const ROW_HEIGHT = { least: 12, most: 58 };

// Sets the heights of all rows, so that the ranks of a panel fit the window where possible.
function setSizes() {
  if (!panels.length) return;
  const above = panels[0].plot.getBoundingClientRect().top + scrollY;
  const room = Math.max(240, innerHeight - above - 16) / Math.min(panels.length, 2);
  for (const panel of panels) {
    const pitch = Math.floor(Math.min(ROW_HEIGHT.most, Math.max(ROW_HEIGHT.least, room / panel.ranks)));
    panel.sizes = sizesFor(panel, pitch);
    panel.height = panel.ranks * panel.sizes.pitch + 4;
    panel.plot.style.height = `${panel.height}px`;
  }
}

// Returns the heights of the parts of a row: marks, box, message lane, memory strip, space; what is absent has none.
function sizesFor(panel, pitch) {
  const part = (share, least, shown) => (shown ? Math.max(least, Math.round(pitch * share)) : 0);
  const marks = part(0.08, 2, MARKS.some((kind) => panel.kinds.has(kind)));
  const lane = part(0.09, 2, panel.longestMessage > 0);
  const memory = part(0.27, 3, state.memory && maxMemory > 0);
  const space = Math.max(2, Math.round(pitch * 0.14));
  const box = Math.min(28, pitch - marks - lane - memory - space);
  return { marks, box, lane, memory, pitch: marks + box + lane + memory + space };
}

// Returns the y of the parts of a rank's row.
function rowAt(panel, rank) {
  const { marks, box, lane, memory, pitch } = panel.sizes, top = rank * pitch + 2;
  const below = top + marks + box + 1;
  return { marks: top, box: top + marks, lane: below, memory: below + lane, bottom: below + lane + memory };
}

// Returns the first and last visible rank, with a margin of half a screen.
function visibleRanks(panel) {
  if (state.exporting) return [0, panel.ranks - 1];
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
