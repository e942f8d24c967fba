// Buttons, and the assembly of the page.
//
// The hooks of `host`, all optional:
//   memoryLimit            bytes per rank, drawn into the memory strips
//   signal                 an AbortSignal that removes every listener: the data is about to be replaced
//   restore                { critical, view } of the drawing before, with `view` in shares of the whole
//   room                   seconds of empty time after the last end, for what the host draws there
//   plain                  a selected step has a frame only: its inputs are not highlighted, and it has no card
//   scrolls                the wheel scrolls the page; with Ctrl it zooms, with Shift it pans
//   header(panel, header)  adds to the header of a panel
//   decorate(context, panel, tools)   draws on the overlay
//   onPick(target, tools, event)      a click on a step, a gap, a memory strip or nothing (null)
//   onGrab(target, event)  returns whether the host takes this drag; then onDrag and onDrop(event, panel, tools)

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

// Returns the chosen theme, else the one the system prefers.
function theme() {
  return document.documentElement.dataset.chosenTheme ?? (prefersDark.matches ? "dark" : "light");
}

// Toggles between dark and light.
function toggleTheme() {
  document.documentElement.dataset.chosenTheme = theme() === "dark" ? "light" : "dark";
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
  if (Math.abs(percent) < 0.05) return null;
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
  host.header?.(panel, header);
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
  panel.plot.addEventListener("wheel", (event) => onWheel(event, panel), { passive: false });
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
  legend.replaceChildren();
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
  Object.defineProperty(window, "penstock", { value: Object.freeze(exposed), configurable: true });
}

const BUTTONS = {
  "zoom-in": () => zoom(0.7), "zoom-out": () => zoom(1 / 0.7), fit,
  critical: toggleCritical, theme: toggleTheme, help: openKeys,
};

// What a host may use: coordinates, colours and texts of the drawing.
const tools = {
  state, layout, panels, xOf, timeAt, rowAt, stepText, gapText, seconds, bytes, placeOf, targetAt, select, redraw, redrawOverlay,
  drawArrow, firstWhere, fit, colourOf: (name) => colour[name], describe,
  get restore() {
    const whole = FIT.end - FIT.start;
    return { critical: state.critical, view: [(state.start - FIT.start) / whole, (state.end - FIT.start) / whole] };
  },
};

// Shows what the drawing before showed: the same share of the time, and the critical path.
function restore({ critical, view: [start, end] }) {
  const whole = FIT.end - FIT.start;
  show(FIT.start + start * whole, (end - start) * whole);
  if (critical !== state.critical) toggleCritical();
}

// Assembles the page.
function open() {
  const options = { signal: host.signal };
  document.getElementById("panels").replaceChildren();
  panels.forEach(mount);
  if (!panels.length) document.getElementById("panels").append(element("p", "No timelines to show.", "empty"));
  makeLegend();
  for (const [id, act] of Object.entries(BUTTONS)) document.getElementById(id).addEventListener("click", act, options);
  document.addEventListener("keydown", onKey, options);
  addEventListener("scroll", redraw, { passive: true, ...options });
  prefersDark.addEventListener("change", applyTheme, options);
  expose();
  applyTheme();
  const observer = new ResizeObserver(resize);
  observer.observe(document.getElementById("panels"));
  host.signal?.addEventListener("abort", () => observer.disconnect());
  resize();
  if (host.restore) restore(host.restore);
  document.getElementById("critical").setAttribute("aria-pressed", state.critical);
  return tools;
}

return open();
