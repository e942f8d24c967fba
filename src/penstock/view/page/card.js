// The tooltip card: what the hovered or selected step, gap or memory is.

const card = document.getElementById("card");

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

// Says what a kind of step is; sends and receives are steps only where they block their rank.
function meaningOf(kind) {
  const name = LOOK.kinds[kind];
  return `${LOOK.tracks[name] === "message" ? "blocked: " : ""}${LOOK.meaning[name]}`;
}

// Describes a step; the input that arrived last is marked.
function linesOfStep(panel, step) {
  const { start, end, kind } = panel.steps, { arrival } = panel.messages;
  const when = `${timeText(start[step])} to ${timeText(end[step])}, takes ${timeText(end[step] - start[step])}`;
  const lines = [headline(stepText(panel, step), meaningOf(kind[step]))];
  lines.push(element("p", `rank ${panel.rankOf[step]}, ${when}`));
  if (panel.steps.all_to_all[step]) lines.push(element("p", allToAllText(panel, step)));
  const last = (t) => (t === start[step] && t > 0 ? "last" : "");
  for (const m of panel.messagesIn[step]) lines.push(element("p", inputText(panel, m), last(arrival[m])));
  for (const n of panel.needsIn[step]) {
    const made = panel.needs.producer[n];
    const text = `needs ${stepText(panel, made)} of the same rank, completed at ${timeText(end[made])}`;
    lines.push(element("p", text, last(end[made])));
  }
  if (panel.gapBefore.has(step)) lines.push(element("p", gapText(panel, panel.gapBefore.get(step)), "why"));
  if (panel.onPath.has(step)) lines.push(element("p", "on the critical path"));
  return lines;
}

// Describes the all-to-all of a step: how long it takes, and how much of that no compute hides.
function allToAllText(panel, step) {
  const { all_to_all: takes, exposed } = panel.steps;
  return `all-to-all ${timeText(takes[step])}, ${timeText(exposed[step])} exposed`;
}

// Describes an input message: its value, its producer, its arrival.
function inputText(panel, m) {
  const { producer, arrival, size } = panel.messages;
  const from = `${stepText(panel, producer[m])}, rank ${panel.rankOf[producer[m]]}`;
  const amount = size[m] ? `, ${bytesText(size[m])}` : "";
  return `needs the ${messageText(panel, m)} from ${from}, arrives at ${timeText(arrival[m])}${amount}`;
}

// Describes an idle gap.
function linesOfGap(panel, gap) {
  const { rank, start, end, before } = panel.gaps;
  const where = before[gap] < 0 ? "after its last step" : `before ${stepText(panel, before[gap])}`;
  const when = `rank ${rank[gap]}, ${timeText(start[gap])} to ${timeText(end[gap])}`;
  return [headline("idle", where), element("p", when), element("p", gapText(panel, gap), "why")];
}

// Describes the memory of a rank at a time.
function linesOfMemory({ panel, rank, time }) {
  const { times, total, fixed, peak } = panel.memory[rank];
  const after = firstWhere(times.length, (i) => times[i] > time);
  const head = headline(memoryText(after ? total[after - 1] : fixed), `memory of rank ${rank} at ${timeText(time)}`);
  return [head, element("p", `peak ${memoryText(peak)} at ${timeText(times[total.indexOf(peak)] ?? 0)}`)];
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
