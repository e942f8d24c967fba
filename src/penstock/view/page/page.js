// Buttons, and the assembly of the page.
//
// The hooks of `host`, all optional:
//   memoryLimit            bytes, or activations, per rank, drawn into the memory strips
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

// Shows or hides the memory of all ranks.
function toggleMemory() {
  state.memory = !state.memory;
  document.getElementById("memory")?.setAttribute("aria-pressed", state.memory);
  makeLegend();
  resize();
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
  makeLegend();
  redraw();
}

// --- panels ----------------------------------------------------------------------------------------

// Creates the elements of a panel and adds its listeners.
function mount(panel) {
  const section = element("section", "", "panel");
  panel.plot = element("div", "", "plot");
  panel.plot.tabIndex = 0;
  panel.plot.setAttribute("role", "application");
  panel.plot.setAttribute("aria-roledescription", "timeline");
  const keys = "Enter selects a step, arrows move, question mark lists the keys.";
  panel.plot.setAttribute("aria-label", `${panel.name}: ${panel.sizes_text}. ${keys}`);
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

// Returns a target as plain values.
function describe(target) {
  if (target === null) return null;
  const { panel, step, gap } = target;
  if (step === undefined) return { panel: panel.number, action: null, gap };
  return { panel: panel.number, action: stepText(panel, step), step, rank: panel.rankOf[step] };
}

// Returns the texts of the steps highlighted in the panel of the current target.
function highlightedTexts() {
  const panel = (state.selected ?? state.hover)?.panel, found = panel ? highlightedIn(panel) : null;
  return found ? Array.from(found, (each) => stepText(panel, each)) : [];
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
    get memory() { return state.memory; },
    get theme() { return theme(); },
    get frames() { return state.frames; },
    get firstDraw() { return state.firstDraw; },
    get lastDraw() { return state.lastDraw; },
    get dense() { return panels.map(isDense); },
    get labels() { return panels.map((panel) => panel.label); },
    labelOf: (number, step) => labelsOf(panels[number], step)[panels[number].label?.form]?.join("") ?? null,
    exported: (format) => ({ svg: svgText, csv: csvText, png: () => pictureCanvas().toDataURL() })[format](),
    placeOf: (number, step) => placeOf({ panel: panels[number], step }),
  };
  Object.defineProperty(window, "penstock", { value: Object.freeze(exposed), configurable: true });
}

const BUTTONS = {
  "zoom-in": () => zoom(0.7), "zoom-out": () => zoom(1 / 0.7), fit,
  critical: toggleCritical, memory: toggleMemory, theme: toggleTheme, help: openKeys,
  "save-svg": () => save("svg"), "save-png": () => save("png"), "save-csv": () => save("csv"), "save-json": () => save("json"),
};

// What a host may use: coordinates, colours and texts of the drawing.
const tools = {
  state, layout, panels, xOf, timeAt, rowAt, stepText, gapText, timeText, memoryText, placeOf, targetAt, select, redraw, redrawOverlay,
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
  for (const [id, act] of Object.entries(BUTTONS)) document.getElementById(id)?.addEventListener("click", act, options);
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
