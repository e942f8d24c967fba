// The assembly of the page: modes, settings, theme, link.

import { $, complain, h } from "./dom.js";
import { catalogue as loadCatalogue } from "./api.js";
import * as compare from "./compare.js";
import * as edit from "./edit.js";
import { explainSelection } from "./explain.js";
import { fill, makeControls } from "./controls.js";
import * as lessons from "./lessons.js";
import * as search from "./search.js";
import * as upload from "./upload.js";
import { store, subscribe, update } from "./state.js";

const MODES = {
  compare: { label: "Compare", module: compare }, edit: { label: "Edit", module: edit }, search: { label: "Search", module: search },
  lessons: { label: "Lessons", module: lessons },
};

function makeModes() {
  $("modes").replaceChildren(...Object.entries(MODES).map(([name, { label }]) =>
    h("button", { type: "button", id: `mode-${name}`, onclick: () => update({ mode: name, lesson: name === "lessons" ? store.state.lesson : "" }) }, label)));
}

function show(state, before) {
  const mode = MODES[state.mode] ? state.mode : "compare";
  document.body.dataset.mode = mode;
  for (const name of Object.keys(MODES)) $(`mode-${name}`).setAttribute("aria-pressed", name === (state.lesson ? "lessons" : mode));
  fill(state);
  if (before && before.mode !== state.mode) {
    MODES[before.mode]?.module.leave?.();
    $("mode-panel").replaceChildren();
  }
  MODES[mode].module.show(state, before);
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    $("share").textContent = "Copied";
  } catch {
    $("share").textContent = "Copy the address bar";
  }
  setTimeout(() => { $("share").textContent = "Copy link"; }, 1600);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea, dialog, [data-keys=own]")) return;
  if (event.key === "g") explainSelection();
}

function keepTheme() {
  const root = document.documentElement;
  try {
    const kept = localStorage.getItem("penstock.theme");
    if (kept) root.dataset.chosenTheme = kept;
    new MutationObserver(() => localStorage.setItem("penstock.theme", root.dataset.chosenTheme ?? ""))
      .observe(root, { attributes: true, attributeFilter: ["data-chosen-theme"] });
  } catch { /* no storage: the theme lasts as long as the page */ }
}

async function open() {
  keepTheme();
  document.body.dataset.busy = 0;
  const offered = await loadCatalogue();
  makeModes();
  makeControls(offered);
  for (const { module } of Object.values(MODES)) module.start?.(offered);
  upload.start(offered);
  $("share").addEventListener("click", copyLink);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address is the state
    $("main").focus();
  });
  document.addEventListener("keydown", onKey);
  subscribe(show);
  addEventListener("penstock:refresh", () => show(store.state, null));
  show(store.state, null);
}

open().catch((error) => complain(`The page could not start: ${error.message}`));
