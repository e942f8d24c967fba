// Exports of the page: the picture as SVG or PNG, the steps as CSV, the timelines as JSON.

const EXPORT = { header: 30, axis: 34, legend: 22, margin: 12 };

// Draws all panels as they are shown, with title, axis and legend, and returns the height.
function drawPicture(context) {
  context.fillStyle = colour.page;
  context.fillRect(0, 0, layout.width, pictureHeight());
  state.exporting = true;
  let y = EXPORT.margin;
  for (const panel of panels) {
    drawHeader(context, panel, y + 18);
    y += EXPORT.header;
    context.translate(0, y);
    drawBase(panel, context);
    if (highlightedIn(panel) || state.critical) drawOverlay(panel, context);
    context.translate(0, -y);
    y += panel.height + 8;
  }
  context.translate(0, y);
  drawAxis(context);
  context.translate(0, -y);
  drawLegend(context, y + EXPORT.axis + 12);
  state.exporting = false;
}

// Returns the height of the whole picture.
function pictureHeight() {
  const rows = panels.reduce((sum, panel) => sum + EXPORT.header + panel.height + 8, 0);
  return Math.ceil(2 * EXPORT.margin + rows + EXPORT.axis + legendLines().length * EXPORT.legend + 4);
}

// Draws the name, sizes and metrics of a panel.
function drawHeader(context, panel, y) {
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillStyle = colour.ink;
  context.font = `bold 14px ${colour.font}`;
  context.fillText(panel.name, EXPORT.margin, y);
  const x = EXPORT.margin + context.measureText(panel.name).width + 14;
  context.font = `12px ${colour.font}`;
  context.fillStyle = colour.soft;
  context.fillText([panel.sizes_text, ...metricsOf(panel).map((pair) => pair.join(" "))].join("   "), x, y);
}

// Returns the entries of the legend in lines that fit the width, each entry with its x.
function legendLines() {
  const context = axis.getContext("2d"), lines = [[]];
  context.font = `12px ${colour.font}`;
  let x = EXPORT.margin;
  for (const [colours, shape, meaning] of [...legendEntries(), [[], "box", labelText()]]) {
    const swatch = shape === "halves" ? 12 : colours.length * 12, width = swatch + 6 + context.measureText(meaning).width + 16;
    if (x + width > layout.width && lines.at(-1).length) {
      lines.push([]);
      x = EXPORT.margin;
    }
    lines.at(-1).push({ x, swatch, colours, shape, meaning });
    x += width;
  }
  return lines;
}

// Draws the legend.
function drawLegend(context, top) {
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.font = `12px ${colour.font}`;
  legendLines().forEach((line, number) => {
    const y = top + number * EXPORT.legend;
    for (const { x, swatch, colours, shape, meaning } of line) {
      colours.forEach((each, n) => {
        context.fillStyle = each;
        if (shape === "halves") context.fillRect(x, y - 10 + 6 * n, 12, 6);
        else context.fillRect(x + 12 * n, shape === "thin" ? y - 6 : y - 10, shape === "mark" ? 4 : 12, shape === "thin" ? 4 : 12);
      });
      context.fillStyle = colour.ink;
      context.fillText(meaning, x + swatch + 6, y);
    }
  });
}

// Returns the picture as an SVG document.
function svgText() {
  const context = new SvgContext(axis.getContext("2d"));
  drawPicture(context);
  return context.document(layout.width, pictureHeight(), document.title);
}

// Returns a canvas with the picture, at twice the resolution where browsers allow it.
function pictureCanvas() {
  const canvas = element("canvas"), height = pictureHeight(), ratio = Math.min(2, 16000 / Math.max(height, layout.width));
  [canvas.width, canvas.height] = [layout.width * ratio, height * ratio];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  drawPicture(context);
  return canvas;
}

// Returns all steps as CSV, with their times in seconds or units.
function csvText() {
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = [`schedule,rank,action,kind,stage,microbatch,start_${data.time_unit},end_${data.time_unit}`];
  for (const panel of panels) {
    const { kind, stage, microbatch, start, end } = panel.steps;
    for (let step = 0; step < panel.count; step++) {
      const of = COLLECTIVE.includes(kind[step]) ? "" : microbatch[step];
      const names = [quoted(panel.name), panel.rankOf[step], stepText(panel, step), LOOK.kinds[kind[step]]];
      lines.push([...names, stage[step], of, start[step], end[step]].join(","));
    }
  }
  return `${lines.join("\n")}\n`;
}

const EXPORTS = {
  svg: () => new Blob([svgText()], { type: "image/svg+xml" }),
  csv: () => new Blob([csvText()], { type: "text/csv" }),
  json: () => new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }),
};

// Saves the page in one of the formats.
function save(format) {
  if (format === "png") pictureCanvas().toBlob((blob) => download(blob, format));
  else download(EXPORTS[format](), format);
}

// Offers a file to the user.
function download(blob, format) {
  const link = element("a"), name = document.title.replace(/[^A-Za-z0-9.-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 60);
  link.href = URL.createObjectURL(blob);
  link.download = `${name || "penstock"}.${format}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
