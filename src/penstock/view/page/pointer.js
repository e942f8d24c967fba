// Mouse and touch: hovering, selection, panning, zooming.

// Returns the target of a panel at window coordinates, or null.
function targetAt(panel, clientX, clientY) {
  const plot = panel.plot.getBoundingClientRect(), x = clientX - plot.left, y = clientY - plot.top;
  const rank = Math.floor((y - 2) / panel.sizes.pitch);
  if (x < layout.gutter || rank < 0 || rank >= panel.ranks) return null;
  const row = rowAt(panel, rank), time = timeAt(x);
  if (time < 0 || time > panel.makespan) return null;
  if (y >= row.memory) return panel.sizes.memory > 0 && panel.memory[rank] && y <= row.bottom ? { panel, rank, time } : null;
  const { collective, offload, reload } = panel.rows[rank], lists = [collective, offload, reload];
  const marks = y < row.box ? lists.map((list) => nearest(panel, list, time, 4)) : [];
  const mark = marks.find((step) => step !== undefined);
  const step = mark ?? nearest(panel, panel.rows[rank].compute, time, 0);
  if (step !== undefined) return { panel, step };
  const { start, end } = panel.gaps, gap = panel.gapsOf[rank].find((g) => start[g] <= time && time <= end[g]);
  return gap === undefined ? null : { panel, gap };
}

// Returns the step of a list at a time, within some pixels.
function nearest(panel, list, time, pixels) {
  const { start, end } = panel.steps, margin = timeAt(pixels) - timeAt(0);
  const after = firstWhere(list.length, (i) => start[list[i]] > time + margin);
  const step = list[after - 1];
  return step !== undefined && end[step] + margin >= time ? step : undefined;
}

// Returns whether two targets are equal.
function same(a, b) {
  if (a === null || b === null) return a === b;
  return ["panel", "step", "gap", "rank", "time"].every((key) => a[key] === b[key]);
}

// Updates what is under the pointer.
function hover(target, time) {
  const changed = !same(target, state.hover);
  state.hover = target;
  state.pointerTime = time;
  redrawOverlay();
  if (changed) showCard();
}

// Selects a step, or nothing.
function select(target) {
  state.selected = target?.step === undefined ? null : target;
  state.hover = null;
  redrawOverlay();
  showCard();
}

const pointers = new Map();
const drag = { moved: 0, distance: 0, middle: 0, taken: false };

// Returns the centre and the distance of the pressed pointers.
function spread() {
  const xs = [...pointers.values()].map((p) => p.x);
  return { middle: xs.reduce((sum, x) => sum + x, 0) / xs.length, distance: Math.max(...xs) - Math.min(...xs) };
}

// Starts a drag or a pinch.
function onPointerDown(event, panel) {
  if (event.button !== 0) return;
  if (pointers.size === 0) Object.assign(drag, { moved: 0, taken: host.onGrab?.(targetAt(panel, event.clientX, event.clientY), event) ?? false });
  pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  panel.plot.setPointerCapture(event.pointerId);
  Object.assign(drag, spread());
}

// Pans with one pressed pointer, zooms with two, and hovers with none.
function onPointerMove(event, panel) {
  const before = pointers.get(event.pointerId), time = Math.max(0, timeAt(insideX(event, panel)));
  if (before === undefined) return hover(targetAt(panel, event.clientX, event.clientY), time);
  pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  drag.moved += Math.abs(event.clientX - before.x) + Math.abs(event.clientY - before.y);
  if (drag.moved < 4) return;
  panel.plot.classList.add("dragging");
  hover(null, null);
  if (drag.taken) return host.onDrag(event, panel, tools);
  const { middle, distance } = spread();
  if (pointers.size > 1 && distance > 10 && drag.distance > 10) zoom(drag.distance / distance, timeAt(drag.middle - leftOf(panel)));
  pan((drag.middle - middle) / (layout.width - layout.gutter - 10));
  if (event.pointerType === "mouse") scrollBy(0, before.y - event.clientY);
  Object.assign(drag, { middle, distance });
}

// Ends a drag, or selects after a click.
function onPointerUp(event, panel) {
  if (!pointers.delete(event.pointerId)) return;
  panel.plot.classList.remove("dragging");
  if (pointers.size) return void Object.assign(drag, spread());
  const clicked = drag.moved < 4 && event.type === "pointerup";
  if (drag.taken && !clicked) return host.onDrop(event, panel, tools);
  if (!clicked) return;
  const target = targetAt(panel, event.clientX, event.clientY);
  select(target);
  host.onPick?.(target, tools, event);
}

// Returns the x of a panel's left edge in the window.
function leftOf(panel) {
  return panel.plot.getBoundingClientRect().left;
}

// Returns the x of an event from the left edge of a panel.
function insideX(event, panel) {
  return event.clientX - leftOf(panel);
}

// Zooms around the pointer, or pans horizontally; over the rank names the page scrolls.
function onWheel(event, panel) {
  if ((insideX(event, panel) < layout.gutter || host.scrolls) && !event.ctrlKey && !event.shiftKey) return;
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
  const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (sideways) pan(((event.deltaX || event.deltaY) * unit) / layout.width);
  else zoom(Math.exp(event.deltaY * unit * (event.ctrlKey ? 0.01 : 0.002)), timeAt(insideX(event, panel)));
}
