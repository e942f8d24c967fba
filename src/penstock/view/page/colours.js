// Colours: those of the theme, of each kind and stage, and of the text on them.

let colour = {};

// Reads the colours of the theme from the style sheet.
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = "page ink soft line track blocked activation gradient memory peak accent".split(" ");
  const valueOf = (name) => style.getPropertyValue(`--${name}`).trim();
  colour = Object.fromEntries([...names, ...LOOK.kinds].map((name) => [name, valueOf(name)]));
  colour.font = style.getPropertyValue("--font");
  for (const panel of panels) panel.fills = new Map();
}

// Returns the colour of a kind on a stage of a rank; later stages are lighter.
function fillOf(panel, kind, stage, rank) {
  const key = kind * 1e6 + stage;
  if (!panel.fills.has(key)) panel.fills.set(key, lighter(colour[LOOK.kinds[kind]], chunkOf(panel, stage, rank)));
  return panel.fills.get(key);
}

// Returns how far along its rank's stages a stage is, from 0 to 1.
function chunkOf(panel, stage, rank) {
  const stages = panel.stages_of_rank[rank];
  return stages.length > 1 ? Math.max(0, stages.indexOf(stage)) / (stages.length - 1) : 0;
}

// Mixes a colour "#rrggbb" with up to LOOK.palest of white.
function lighter(hex, share) {
  if (!hex.startsWith("#")) return hex;
  const white = LOOK.palest * share;
  const mix = (at) => Math.round(parseInt(hex.slice(at, at + 2), 16) * (1 - white) + 255 * white);
  return `#${[1, 3, 5].map((at) => mix(at).toString(16).padStart(2, "0")).join("")}`;
}

const textColours = new Map();

// Returns the colour of text that is readable on a colour "#rrggbb": that with the higher contrast.
function textOn(hex) {
  if (!textColours.has(hex)) {
    const part = (at) => parseInt(hex.slice(at, at + 2), 16) / 255;
    const linear = (c) => (c > 0.04045 ? ((c + 0.055) / 1.055) ** 2.4 : c / 12.92);
    const light = 0.2126 * linear(part(1)) + 0.7152 * linear(part(3)) + 0.0722 * linear(part(5));
    textColours.set(hex, light > 0.184 ? "#1a1a1a" : "#ffffff");
  }
  return textColours.get(hex);
}
