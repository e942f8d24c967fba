// The drawing of timelines: the function of the HTML view, called again for every answer.

import { drawTimelines } from "./timelines.js";

let current = null;

// Draws timelines in place of those before; zoom and critical path stay. Returns the tools of the drawing.
export function draw(data, host = {}) {
  const restore = current?.tools.restore;
  current?.control.abort();
  const control = new AbortController();
  const tools = drawTimelines(data, { scrolls: true, signal: control.signal, restore, ...host });
  current = { control, tools };
  return tools;
}

// Returns the tools of the current drawing, or null.
export const drawn = () => current?.tools ?? null;
