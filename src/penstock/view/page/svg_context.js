// A drawing context that writes SVG: the part of a canvas's 2D context that this page uses.

class SvgContext {
  constructor(measuring) {
    this.measuring = measuring;
    this.parts = [];
    this.path = [];
    this.dx = this.dy = 0;
    this.dash = [];
    Object.assign(this, { fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, globalAlpha: 1, lineJoin: "miter" });
    Object.assign(this, { font: "10px sans-serif", textAlign: "left", textBaseline: "alphabetic" });
  }

  translate(dx, dy) { this.dx += dx; this.dy += dy; }
  setLineDash(dash) { this.dash = dash; }
  measureText(text) { this.measuring.font = this.font; return this.measuring.measureText(text); }
  beginPath() { this.path = []; }
  moveTo(x, y) { this.path.push(`M${this.at(x, y)}`); }
  lineTo(x, y) { this.path.push(`${this.path.length ? "L" : "M"}${this.at(x, y)}`); }
  rect() {}
  save() {}
  restore() {}
  clip() {} // what is drawn is clamped to the picture anyway
  stroke() { this.parts.push(`<path d="${this.path.join("")}" fill="none"${this.strokes()}/>`); }
  fill() { this.parts.push(`<path d="${this.path.join("")}Z"${this.fills()}/>`); }
  fillRect(...box) { if (box[2] > 0 && box[3] > 0) this.parts.push(`<rect ${this.box4(box)}${this.fills()}/>`); }
  strokeRect(...box) { this.parts.push(`<rect ${this.box4(box)} fill="none"${this.strokes()}/>`); }
  fillText(text, x, y) { this.parts.push(this.text(text, x, y, this.fills())); }
  strokeText(text, x, y) { this.parts.push(this.text(text, x, y, ` fill="none"${this.strokes()}`)); }

  number(value) { return `${Math.round(value * 100) / 100}`; }
  at(x, y) { return `${this.number(x + this.dx)} ${this.number(y + this.dy)}`; }
  alpha() { return this.globalAlpha < 1 ? ` opacity="${this.globalAlpha}"` : ""; }
  fills() { return ` fill="${this.fillStyle}"${this.alpha()}`; }
  strokes() {
    const dash = this.dash.length ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
    return ` stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}" stroke-linejoin="${this.lineJoin}"${dash}${this.alpha()}`;
  }

  box4([x, y, width, height]) {
    const [left, top] = this.at(x, y).split(" ");
    return `x="${left}" y="${top}" width="${this.number(width)}" height="${this.number(height)}"`;
  }

  text(text, x, y, paint) {
    const [, weight, size] = this.font.match(/^(bold )?([\d.]+)px/), [left, top] = this.at(x, y).split(" ");
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    const shift = this.textBaseline === "middle" ? ` dy="${this.number(0.36 * size)}"` : "";
    const style = `font-size="${size}"${weight ? ' font-weight="bold"' : ""} text-anchor="${anchor}"`;
    return `<text x="${left}" y="${top}"${shift} ${style}${paint}>${escaped(text)}</text>`;
  }

  document(width, height, title) {
    const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    const head = `<svg xmlns="${svgNamespace()}" ${size} font-family="Helvetica,Arial,sans-serif">`;
    return `${head}\n<title>${escaped(title)}</title>\n${this.parts.join("\n")}\n</svg>\n`;
  }
}

// Returns the namespace of SVG, from an element that the browser has parsed.
function svgNamespace() {
  return new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;
}

// Escapes a text for XML.
function escaped(text) {
  return String(text).replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
}
