// Keyboard: moves of the selection, and the action of each key.

// Moves the selection along its rank; returns whether there was a step to move to.
function moveAlong(direction) {
  const { panel, step } = state.selected, next = step + direction;
  if (next < 0 || next >= panel.count || panel.rankOf[next] !== panel.rankOf[step]) return false;
  select({ panel, step: next });
  reveal();
  return true;
}

// Moves the selection to the next rank that has steps, also in the next panel.
function moveAcross(direction) {
  let { panel, step } = state.selected, rank = panel.rankOf[step];
  const time = (panel.steps.start[step] + panel.steps.end[step]) / 2;
  do {
    rank += direction;
    if (rank < 0 || rank >= panel.ranks) {
      panel = panels[panel.number + direction];
      if (panel === undefined) return;
      rank = direction > 0 ? 0 : panel.ranks - 1;
    }
  } while (!panel.rows[rank]?.compute.length);
  select({ panel, step: stepNear(panel, rank, time) });
  reveal();
}

// Returns the compute step of a rank closest to a time.
function stepNear(panel, rank, time) {
  const { start, end } = panel.steps, list = panel.rows[rank].compute;
  const after = firstWhere(list.length, (i) => end[list[i]] >= time);
  const away = (step) => Math.max(start[step] - time, time - end[step], 0);
  return list.slice(Math.max(0, after - 1), after + 1).reduce((a, b) => (away(b) < away(a) ? b : a));
}

// Selects the first visible step of a panel.
function selectFirst(panel) {
  const rank = panel.rows.findIndex((row) => row.compute.length);
  if (rank < 0) return;
  const list = panel.rows[rank].compute;
  const first = firstWhere(list.length, (i) => panel.steps.start[list[i]] >= state.start);
  select({ panel, step: list[Math.min(first, list.length - 1)] });
  reveal();
}

// Scrolls the selected step into view, in time and on the page, and focuses its panel.
function reveal() {
  const { panel, step } = state.selected, start = panel.steps.start[step], end = panel.steps.end[step];
  const length = state.end - state.start;
  if (start < state.start) show(start - length * 0.1, length);
  else if (end > state.end) show(Math.min(start, end - length * 0.9), length);
  panel.plot.focus({ preventScroll: true });
  const { top, bottom } = placeOf(state.selected);
  if (top < 60) scrollBy(0, top - 60);
  else if (bottom > innerHeight - 40) scrollBy(0, bottom - innerHeight + 40);
  showCard();
}

// The action of each key; `false` leaves the key to the browser.
const KEYS = {
  "0": fit,
  "+": () => zoom(0.7),
  "=": () => zoom(0.7),
  "-": () => zoom(1 / 0.7),
  c: toggleCritical,
  m: toggleMemory,
  d: toggleTheme,
  "?": openKeys,
  Escape: () => select(null),
  ArrowLeft: (event) => (state.selected && !event.shiftKey ? void moveAlong(-1) : pan(-0.1)),
  ArrowRight: (event) => (state.selected && !event.shiftKey ? void moveAlong(1) : pan(0.1)),
  ArrowUp: () => (state.selected ? moveAcross(-1) : false),
  ArrowDown: () => (state.selected ? moveAcross(1) : false),
  Tab: (event) => (state.selected && onPanel() ? moveAlong(event.shiftKey ? -1 : 1) : false),
  Enter: () => (onPanel() && !state.selected ? selectFirst(onPanel()) : false),
};

// Returns the panel that has the focus, if any.
function onPanel() {
  return panels.find((panel) => panel.plot === document.activeElement);
}

// Handles a key.
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest?.("input, select, textarea, [role=slider], [data-keys=own]")) return;
  const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (act && act(event) !== false) event.preventDefault();
}
