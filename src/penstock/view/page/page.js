// Keyboard, buttons, and the assembly of the page.

// --- keys ------------------------------------------------------------------------------------------

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
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("keys").open) return;
  const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (act && act(event) !== false) event.preventDefault();
}

// --- buttons ---------------------------------------------------------------------------------------

// Toggles the highlight of the critical path.
function toggleCritical() {
  state.critical = !state.critical;
  document.getElementById("critical").setAttribute("aria-pressed", state.critical);
  redrawOverlay();
}

// Shows the list of keys.
function openKeys() {
  document.getElementById("keys").showModal();
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;

// Returns the chosen theme, else the one the system prefers.
function theme() {
  return chosenTheme ?? (prefersDark.matches ? "dark" : "light");
}

// Toggles between dark and light.
function toggleTheme() {
  chosenTheme = theme() === "dark" ? "light" : "dark";
  applyTheme();
}

// Applies the theme to the page.
function applyTheme() {
  document.documentElement.dataset.theme = theme();
  document.getElementById("theme").setAttribute("aria-pressed", theme() === "dark");
  readColours();
  redraw();
}

// --- page ------------------------------------------------------------------------------------------

// Returns the metrics of a panel's header, each with its name.
function metricsOf(panel) {
  const peak = Math.max(0, ...panel.memory.map((m) => m.peak));
  const where = panel.memory.findIndex((m) => m.peak === peak);
  return [
    ["makespan", seconds(panel.makespan)], ["span", seconds(panel.span)], ["period", panel.period === null ? "–" : seconds(panel.period)],
    ["bubble", `${(panel.bubble * 100).toFixed(1)} %`],
    ["peak memory", panel.ranks > 1 && peak > 0 ? `${bytes(peak)} (rank ${where})` : bytes(peak)],
  ];
}

// Returns the difference of a panel's makespan to that of the first, if both do the same amount of work.
function comparison(panel) {
  const { makespan: base, work } = panels[0];
  if (panel.number === 0 || panel.makespan === base || Math.abs(panel.work - work) > 1e-9 * work) return null;
  const percent = (panel.makespan / base - 1) * 100;
  const sign = percent > 0 ? "+" : "−";
  return element("dd", `${sign}${Math.abs(percent).toFixed(1)} %`, percent > 0 ? "worse" : "better");
}

// Creates the header of a panel.
function makeHeader(panel) {
  const header = element("header"), list = element("dl", "", "metrics");
  for (const [name, value] of metricsOf(panel)) {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    if (name === "makespan" && comparison(panel)) pair.append(comparison(panel));
    list.append(pair);
  }
  header.append(element("h2", panel.name), list);
  return header;
}

// Creates the elements of a panel and adds its listeners.
function mount(panel) {
  const section = element("section", "", "panel");
  panel.sizes = sizesFor(panel.ranks);
  panel.height = panel.ranks * panel.sizes.pitch + 4;
  panel.plot = element("div", "", "plot");
  panel.plot.tabIndex = 0;
  panel.plot.setAttribute("role", "application");
  panel.plot.setAttribute("aria-roledescription", "timeline");
  const sizes = `${panel.ranks} ranks, ${panel.stages} stages, ${panel.microbatches} microbatches`;
  const keys = "Enter selects a step, arrows move, question mark lists the keys.";
  panel.plot.setAttribute("aria-label", `${panel.name}: ${sizes}. ${keys}`);
  panel.plot.style.height = `${panel.height}px`;
  panel.base = panel.plot.appendChild(element("canvas"));
  panel.overlay = panel.plot.appendChild(element("canvas"));
  for (const canvas of [panel.base, panel.overlay]) canvas.setAttribute("aria-hidden", "true");
  section.append(makeHeader(panel), panel.plot);
  document.getElementById("panels").append(section);
  listen(panel);
}

// Adds the listeners for a panel's pointer and wheel.
function listen(panel) {
  panel.plot.addEventListener("pointerdown", (event) => onPointerDown(event, panel));
  panel.plot.addEventListener("pointermove", (event) => onPointerMove(event, panel));
  panel.plot.addEventListener("pointerup", (event) => onPointerUp(event, panel));
  panel.plot.addEventListener("pointercancel", (event) => onPointerUp(event, panel));
  panel.plot.addEventListener("pointerleave", () => hover(null, null));
  panel.plot.addEventListener("wheel", onWheel, { passive: false });
  panel.plot.addEventListener("dblclick", fit);
}

const LEGEND = {
  F: "F forward", I: "I input gradient", W: "W weight gradient", B: "B backward",
  OVERLAP_F_B: "F and B overlapped", UNSHARD: "unshard", RESHARD: "reshard", REDUCE_GRAD: "reduce grad",
  RECOMPUTE: "RECOMPUTE recompute forward", OFFLOAD: "offload", RELOAD: "reload",
  activation: "activation sent", gradient: "gradient sent", memory: "memory", peak: "peak memory",
};

// Returns the entries of the legend: names of colours, each with the shape of its swatch.
function inLegend() {
  const present = new Set();
  for (const panel of panels) for (const kind of panel.steps.kind) present.add(kind);
  const namesOf = (kinds) => kinds.filter((kind) => present.has(kind)).map((kind) => data.kinds[kind]);
  const entries = [...namesOf(COMPUTE).map((name) => [name, ""]), ...namesOf(MARKS).map((name) => [name, "mark"])];
  if (panels.some((panel) => panel.messages.stage.length)) entries.push(["activation", "thin"], ["gradient", "thin"]);
  if (MAX_MEMORY > 0) entries.push(["memory", ""], ["peak", "thin"]);
  return entries;
}

// Creates the legend.
function makeLegend() {
  const legend = document.getElementById("legend");
  for (const [name, shape] of inLegend()) {
    const item = legend.appendChild(element("li")), swatch = element("span", "", `swatch ${shape}`);
    swatch.style.background = `var(--${name})`;
    item.append(swatch, element("span", LEGEND[name]));
  }
  if (panels.some((panel) => panel.stages > panel.ranks)) legend.append(element("li", "s·k: stage s, microbatch k"));
}

// Returns a target as plain values.
function describe(target) {
  if (target === null) return null;
  const { panel, step, gap } = target;
  if (step === undefined) return { panel: panel.number, action: null, gap };
  return { panel: panel.number, action: stepText(panel, step), step, rank: panel.rankOf[step] };
}

// Returns the texts of the steps highlighted for the current target.
function highlightedTexts() {
  const { panel, step } = currentTarget() ?? {};
  return step === undefined ? [] : Array.from(chainOf(panel, step), (each) => stepText(panel, each));
}

// Exposes the state of the page read-only, for tests.
function expose() {
  const exposed = {
    fit: FIT,
    get view() { return { start: state.start, end: state.end }; },
    get hovered() { return describe(state.hover); },
    get selected() { return describe(state.selected); },
    get highlighted() { return highlightedTexts(); },
    get critical() { return state.critical; },
    get theme() { return theme(); },
    get frames() { return state.frames; },
    get firstDraw() { return state.firstDraw; },
    get lastDraw() { return state.lastDraw; },
    get dense() { return panels.map(isDense); },
    placeOf: (number, step) => placeOf({ panel: panels[number], step }),
  };
  Object.defineProperty(window, "penstock", { value: Object.freeze(exposed) });
}

const BUTTONS = {
  "zoom-in": () => zoom(0.7), "zoom-out": () => zoom(1 / 0.7), fit,
  critical: toggleCritical, theme: toggleTheme, help: openKeys,
};

// Assembles the page.
function open() {
  panels.forEach(mount);
  if (!panels.length) document.getElementById("panels").append(element("p", "No timelines to show.", "empty"));
  makeLegend();
  for (const [id, act] of Object.entries(BUTTONS)) document.getElementById(id).addEventListener("click", act);
  document.addEventListener("keydown", onKey);
  addEventListener("scroll", redraw, { passive: true });
  prefersDark.addEventListener("change", applyTheme);
  expose();
  applyTheme();
  new ResizeObserver(resize).observe(document.documentElement);
  resize();
}

open();
