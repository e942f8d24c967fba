// Downloads, and snippets that reproduce the page.

import { $, h } from "./dom.js";
import { Refused, ask } from "./api.js";
import { question, store } from "./state.js";

const FILES = [["csv", "CSV", "torch's format"], ["json", "JSON", "Penstock's format"]];
const PICTURES = [["svg", "SVG", ""], ["png", "PNG", ""], ["html", "HTML", "interactive, one file"], ["trace", "Perfetto", "for ui.perfetto.dev"]];

// Opens the dialog for one schedule of the state.
export function openTake(catalogue, entry) {
  const dialog = $("take"), status = h("p", { class: "quiet", role: "status", id: "take-status" });
  const all = h("input", { type: "checkbox", id: "take-all" });
  const layers = h("input", { type: "number", id: "take-layers", min: 1, max: 1000, placeholder: "one per stage", onchange: () => lines(catalogue, entry, layers, list) });
  const list = h("div", { class: "lines" });
  const fileButton = ([format, label, note]) => h("button", { type: "button", id: `take-${format}`, title: note, onclick: () => download(catalogue, entry, format, all.checked, status) }, label);
  dialog.replaceChildren(
    h("div", { class: "title" }, h("h2", { id: "take-title" }, `Take ${entry.replace(/^@/, "").split(";")[0]} away`),
      h("form", { method: "dialog" }, h("button", { "aria-label": "Close", class: "icon" }, "×"))),
    h("h3", {}, "Files"), h("div", { class: "row" }, FILES.map(fileButton), h("span", { class: "divider" }), PICTURES.map(fileButton)),
    h("label", { class: "check" }, all, "Pictures of all compared schedules"), status,
    list, h("div", { class: "row" }, h("label", { for: "take-layers" }, "Layers of the model, for torchtitan"), layers));
  dialog.showModal();
  lines(catalogue, entry, layers, list);
}

async function download(catalogue, entry, format, all, status) {
  const pictures = PICTURES.some(([name]) => name === format);
  const entries = all && pictures ? store.state.schedules : [entry];
  status.textContent = "Making the file…";
  try {
    const answer = await ask("export", { ...question(store.state, catalogue, entries), format }, "export");
    if (answer === null) return;
    const bytes = Uint8Array.from(atob(answer.base64), (c) => c.charCodeAt(0));
    const url = URL.createObjectURL(new Blob([bytes], { type: answer.type }));
    h("a", { href: url, download: answer.file }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
    status.textContent = `${answer.file}, ${bytes.length.toLocaleString("en")} bytes`;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    status.textContent = error.message;
  }
}

async function lines(catalogue, entry, layers, list) {
  const asked = { ...question(store.state, catalogue, [entry]), format: "lines" };
  if (layers.value) asked.layers = Number(layers.value);
  if (store.state.jitter) asked.jitter = store.state.jitter;
  try {
    const answer = await ask("export", asked, "lines");
    if (answer === null) return;
    const { flags, notes, error } = answer.torchtitan;
    list.replaceChildren(
      block("Command", answer.command), answer.costs && block("costs.toml", answer.costs), block("Python", answer.python),
      error ? h("div", {}, h("h3", {}, "torchtitan"), h("p", { class: "quiet" }, error))
        : block("torchtitan", flags.join(" \\\n"), notes.join(" ")));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    list.replaceChildren(h("p", {}, error.message));
  }
}

function block(title, text, note) {
  const copy = h("button", { type: "button", class: "small", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      copy.textContent = "Selected";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  } }, "Copy");
  const code = h("code", {}, text);
  return h("div", {}, h("div", { class: "title" }, h("h3", {}, title), copy), h("pre", { tabIndex: 0 }, code), note && h("p", { class: "quiet" }, note));
}
