// The tooltip card, and mouse and touch input.

// --- card ------------------------------------------------------------------------------------------

// Returns the target of the card: what is hovered, else what is selected.
function currentTarget() {
  return state.hover ?? state.selected;
}

// Creates an element with text and a class.
function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Fills the card for the current target and places it next to it, or hides it.
function showCard() {
  const target = currentTarget();
  if (target === null || (host.plain && !state.hover)) return card.replaceChildren();
  if (target.step !== undefined) card.replaceChildren(...linesOfStep(target.panel, target.step));
  else if (target.gap !== undefined) card.replaceChildren(...linesOfGap(target.panel, target.gap));
  else card.replaceChildren(...linesOfMemory(target));
  placeCard(target);
}

// Creates the first line of the card: a name and its meaning.
function headline(name, meaning) {
  const head = element("div");
  head.append(element("strong", name), element("span", meaning, "what"));
  return head;
}

// Describes a step; the input that arrived last is marked.
function linesOfStep(panel, step) {
  const { start, end, kind } = panel.steps, { arrival } = panel.messages;
  const when = `${seconds(start[step])} to ${seconds(end[step])}, takes ${seconds(end[step] - start[step])}`;
  const lines = [headline(stepText(panel, step), MEANING[data.kinds[kind[step]]])];
  lines.push(element("p", `rank ${panel.rankOf[step]}, ${when}`));
  if (panel.steps.all_to_all[step]) lines.push(element("p", allToAllText(panel, step)));
  const last = (t) => (t === start[step] && t > 0 ? "last" : "");
  for (const m of panel.messagesIn[step]) lines.push(element("p", inputText(panel, m), last(arrival[m])));
  for (const n of panel.needsIn[step]) {
    const made = panel.needs.producer[n];
    const text = `needs ${stepText(panel, made)} of the same rank, completed at ${seconds(end[made])}`;
    lines.push(element("p", text, last(end[made])));
  }
  if (panel.gapBefore.has(step)) lines.push(element("p", gapText(panel, panel.gapBefore.get(step)), "why"));
  if (panel.onPath.has(step)) lines.push(element("p", "on the critical path"));
  return lines;
}

// Describes the all-to-all of a step: how long it takes, and how much of that no compute hides.
function allToAllText(panel, step) {
  const { all_to_all: takes, exposed } = panel.steps;
  return `all-to-all ${seconds(takes[step])}, ${seconds(exposed[step])} exposed`;
}

// Describes an input message: its value, its producer, its arrival.
function inputText(panel, m) {
  const { producer, arrival, size } = panel.messages;
  const from = `${stepText(panel, producer[m])}, rank ${panel.rankOf[producer[m]]}`;
  const amount = size[m] ? `, ${bytes(size[m])}` : "";
  return `needs the ${messageText(panel, m)} from ${from}, arrives at ${seconds(arrival[m])}${amount}`;
}

// Describes an idle gap.
function linesOfGap(panel, gap) {
  const { rank, start, end, before } = panel.gaps;
  const where = before[gap] < 0 ? "after its last step" : `before ${stepText(panel, before[gap])}`;
  const when = `rank ${rank[gap]}, ${seconds(start[gap])} to ${seconds(end[gap])}`;
  return [headline("idle", where), element("p", when), element("p", gapText(panel, gap), "why")];
}

// Describes the memory of a rank at a time.
function linesOfMemory({ panel, rank, time }) {
  const { times, total, fixed, peak } = panel.memory[rank];
  const after = firstWhere(times.length, (i) => times[i] > time);
  const head = headline(bytes(after ? total[after - 1] : fixed), `memory of rank ${rank} at ${seconds(time)}`);
  return [head, element("p", `peak ${bytes(peak)} at ${seconds(times[total.indexOf(peak)] ?? 0)}`)];
}

// Places the card below its target, or above if there is no room, inside the window.
function placeCard(target) {
  const box = placeOf(target), size = card.getBoundingClientRect();
  const x = Math.max(8, Math.min(document.documentElement.clientWidth - size.width - 8, box.left));
  const y = box.bottom + 14 + size.height < innerHeight ? box.bottom + 14 : Math.max(8, box.top - size.height - 14);
  card.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
}

// Returns the rectangle of a target in the window.
function placeOf({ panel, step, gap, rank, time }) {
  const plot = panel.plot.getBoundingClientRect(), index = step ?? gap;
  const { start, end } = step !== undefined ? panel.steps : panel.gaps;
  const row = rowAt(panel, step !== undefined ? panel.rankOf[step] : rank ?? panel.gaps.rank[gap]);
  return {
    left: plot.left + clampX(xOf(time ?? start[index])), right: plot.left + clampX(xOf(time ?? end[index])),
    top: plot.top + row.box, bottom: plot.top + (index === undefined ? row.bottom : row.lane),
  };
}

// --- mouse and touch -------------------------------------------------------------------------------

// Returns the target of a panel at window coordinates, or null.
function targetAt(panel, clientX, clientY) {
  const plot = panel.plot.getBoundingClientRect(), x = clientX - plot.left, y = clientY - plot.top;
  const rank = Math.floor((y - 2) / panel.sizes.pitch);
  if (x < layout.gutter || rank < 0 || rank >= panel.ranks) return null;
  const row = rowAt(panel, rank), time = timeAt(x);
  if (time < 0 || time > panel.makespan) return null;
  if (y >= row.memory) return MAX_MEMORY > 0 && panel.memory[rank] && y <= row.bottom ? { panel, rank, time } : null;
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
