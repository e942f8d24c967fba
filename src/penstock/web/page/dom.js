// Helpers for elements: one way to make, find and replace them.

// Returns the element with an id.
export const $ = (id) => document.getElementById(id);

// Creates an element: h("button", { id: "go", onclick: act, "aria-label": "Go" }, "Go").
export function h(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(made.dataset, value);
    else if (name in made && !name.includes("-") && name !== "list" && name !== "form") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

// Creates an SVG element with attributes.
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const messages = new Map();

// Shows an error message above everything, one for each thing it is about, or hides that one.
export function complain(text, about = "answer") {
  if (text) messages.set(about, text);
  else messages.delete(about);
  const box = $("message");
  box.hidden = !messages.size;
  box.textContent = [...messages.values()].join("\n");
}

// Returns the width of a chart in its own units, so that its text has the size of the page's.
export function chartWidth() {
  return Math.round(Math.min(860, Math.max(320, $("main").clientWidth - 34)));
}

// Calls a function after a pause in which it is not asked for again.
export function debounce(milliseconds, act) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...values), milliseconds);
  };
}
