// The legend, and the header of each panel: the same words and colours as in SVG and PNG pictures.

// Returns the entries of the legend: the colours of a swatch from left to right, its shape, and its meaning.
function legendEntries() {
  const present = new Set(panels.flatMap((panel) => [...panel.kinds]));
  const shown = (kinds) => kinds.filter((kind) => present.has(kind)).map((kind) => LOOK.kinds[kind]);
  const compute = shown(COMPUTE).filter((name) => name !== "OVERLAP_F_B");
  const entries = compute.map((name) => [[colour[name]], "box", `${name}: ${LOOK.meaning[name]}`]);
  if (present.has(KIND.OVERLAP_F_B)) {
    const second = compute.includes("B") ? "B" : "I";
    entries.push([[colour.F, colour[second]], "halves", LOOK.meaning.OVERLAP_F_B]);
  }
  const stages = Math.max(0, ...panels.flatMap((panel) => panel.stages_of_rank.map((own) => own.length)));
  if (stages > 1 && compute.length) {
    const tints = Array.from({ length: Math.min(stages, 8) }, (_, n) => lighter(colour[compute[0]], n / (Math.min(stages, 8) - 1)));
    entries.push([tints, "box", LOOK.words.stages]);
  }
  for (const name of shown(MARKS)) entries.push([[colour[name]], "mark", LOOK.meaning[name]]);
  if (panels.some((panel) => panel.longestMessage > 0)) {
    for (const name of ["activation", "gradient"]) entries.push([[colour[name]], "thin", `${name} sent`]);
  }
  entries.push([[colour.track], "box", "idle"]);
  if (maxMemory > 0 && state.memory && panels.some((panel) => panel.memory.length)) entries.push([[colour.memory], "box", "memory"], [[colour.peak], "thin", "peak memory"]);
  return entries;
}

// Returns what the labels in the boxes are.
function labelText() {
  if (!panels.length) return "";
  const full = panels.some((panel) => panel.stages > panel.ranks) ? "2F0: stage 2, forward, microbatch 0" : "F0: forward, microbatch 0";
  return `${LOOK.words.number}; ${full}; zoomed out: shares of time`;
}

// Creates the legend.
function makeLegend() {
  const legend = document.getElementById("legend");
  legend.replaceChildren();
  for (const [colours, shape, meaning] of legendEntries()) {
    const item = legend.appendChild(element("li")), group = item.appendChild(element("span", "", `swatches ${shape}`));
    for (const each of colours) group.appendChild(element("span", "", "swatch")).style.background = each;
    item.append(element("span", meaning));
  }
  if (panels.length) legend.append(element("li", labelText(), "note"));
}

// Returns the difference of a panel's makespan to that of the first, if both do the same amount of work.
function comparison(panel) {
  const { makespan: base, work } = panels[0], share = panel.makespan / base - 1;
  if (panel.number === 0 || Math.abs(share) < 5e-4 || Math.abs(panel.work - work) > 1e-9 * work) return null;
  return element("dd", `${share > 0 ? "+" : "−"}${Math.abs(share * 100).toFixed(1)} %`, share > 0 ? "worse" : "better");
}

// Creates the header of a panel: name, sizes, metrics.
function makeHeader(panel) {
  const header = element("header"), list = element("dl", "", "metrics");
  for (const [name, value] of metricsOf(panel)) {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    if (name === "makespan" && comparison(panel)) pair.append(comparison(panel));
    list.append(pair);
  }
  const inTitle = panels.length === 1 && document.querySelector("h1")?.textContent.includes(panel.sizes_text);
  if (!inTitle) header.append(element("h2", panel.name), element("span", panel.sizes_text, "sizes"));
  header.append(list);
  host.header?.(panel, header);
  return header;
}
