// Lessons: the list of puzzles, and the panel of the one that is open in the editor.

import { $, complain, h } from "./dom.js";
import { Refused, ask } from "./api.js";
import { draw } from "./drawing.js";
import { changeSelected } from "./edit.js";
import { time, useUnits } from "./format.js";
import { MOVES } from "./lesson_moves.js";
import { forget, keep, progress } from "./lesson_progress.js";
import { DEFAULTS, store, subscribe, update } from "./state.js";

let lessons = null, verdict = null, hints = 0, before = null, judged = "";
const SETTINGS = ["costs", "limit", "same", "weights", "send", "lowered", "jitter", "whatif", "ranks", "microbatches", "stages"];

export function start() {
  subscribe((state, past) => follow(state, past));
  document.addEventListener("keydown", onKey);
  follow(store.state, null);
}

async function load() {
  lessons ??= (await ask("lessons", {}, "lessons"))?.lessons ?? null;
  return lessons;
}

const nameOf = (key) => `lesson-${key}`;
const openLesson = (state) => (state.mode === "edit" && lessons?.find(({ key }) => key === state.lesson && state.edit === nameOf(key) && state.own[nameOf(key)])) || null;

// --- the list --------------------------------------------------------------------------------------

// Shows the list of lessons.
export async function show() {
  try {
    if (!(await load()) || store.state.mode !== "lessons") return;
  } catch (error) {
    return refused(error);
  }
  complain(null);
  draw({ kinds: [], tracks: {}, timelines: [] }); // the theme and the keys are the drawing's
  const solved = lessons.filter(({ key }) => progress()[key]?.solved).length;
  const reset = h("button", { type: "button", id: "lessons-forget", onclick: () => { forget(); show(); } }, "Forget progress");
  $("mode-panel").replaceChildren(h("div", { class: "card-box" },
    h("div", { class: "title" }, h("h2", {}, "Lessons"), solved > 0 && reset),
    h("p", {}, `Ten short puzzles. Par is the optimum: it is proved that no order is faster. ${solved ? `You solved ${solved} of ${lessons.length}.` : ""}`),
    h("ol", { class: "lessons" }, lessons.map(card))));
}

function card(lesson, index) {
  useUnits(lesson);
  const state = progress()[lesson.key], mark = state?.solved ? "solved" : state?.steps ? "begun" : "";
  return h("li", {}, h("button", { type: "button", class: `lesson ${mark}`, id: `lesson-${lesson.key}`, onclick: () => begin(lesson) },
    h("span", { class: "number" }, state?.solved ? "✓" : String(index + 1)), h("strong", {}, lesson.title),
    h("span", { class: "goal" }, lesson.goal), h("span", { class: "quiet" }, `par ${time(lesson.par)}${mark ? `, ${mark}` : ""}`)));
}

function begin(lesson, { fresh = false } = {}) {
  const { state } = store, name = nameOf(lesson.key), past = progress()[lesson.key];
  const steps = fresh || !past?.steps || past.solved || past.steps.length !== lesson.steps.length ? lesson.steps : past.steps;
  if (!state.lesson) before = Object.fromEntries(SETTINGS.map((key) => [key, state[key]]));
  const own = { stage_to_rank: lesson.stage_to_rank, microbatches: lesson.microbatches, steps };
  const settings = Object.fromEntries(SETTINGS.map((key) => [key, DEFAULTS[key]]));
  update({ ...settings, mode: "edit", lesson: lesson.key, edit: name, own: { ...withoutLessons(state.own), [name]: own }, costs: lesson.costs, limit: lesson.memory_limit, same: false });
}

const withoutLessons = (own) => Object.fromEntries(Object.entries(own).filter(([name]) => !name.startsWith("lesson-")));

// --- the open lesson -------------------------------------------------------------------------------

// Follows the state: shows the panel of an open lesson, asks for its verdict, and puts settings back afterwards.
async function follow(state, past) {
  if (state.lesson && !lessons) {
    try {
      await load();
    } catch (error) {
      return refused(error);
    }
    state = store.state;
  }
  const lesson = openLesson(state);
  document.body.toggleAttribute("data-lesson", Boolean(lesson));
  $("lesson").hidden = !lesson;
  if (!lesson) {
    judged = "";
    if (past?.lesson && state.mode !== "lessons") leave(state);
    else if (state.lesson && state.mode === "edit") update({ lesson: "" }, { replace: true }); // an address without an attempt
    return;
  }
  if (past?.lesson !== state.lesson) hints = 0;
  await judge(lesson, state.own[state.edit].steps);
}

function leave(state) {
  const kept = state.schedules.some((entry) => entry.startsWith("@lesson-")) ? {} : before ?? Object.fromEntries(SETTINGS.map((key) => [key, DEFAULTS[key]]));
  const own = state.mode === "edit" || kept.costs === undefined ? {} : { own: withoutLessons(state.own), edit: state.edit.startsWith("lesson-") ? "" : state.edit };
  before = null;
  update({ ...kept, ...own, lesson: "" }, { replace: true });
}

async function judge(lesson, steps) {
  const request = JSON.stringify([lesson.key, steps]);
  if (request === judged) return;
  judged = request;
  try {
    const answer = await ask("lesson", { lesson: lesson.key, steps });
    if (answer === null || openLesson(store.state) !== lesson) return;
    verdict = answer;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    verdict = { solved: false, message: error.message };
  }
  keep(lesson.key, verdict.solved ? { solved: true, steps } : { steps });
  panel(lesson);
}

function panel(lesson) {
  const focused = document.activeElement?.id, index = lessons.indexOf(lesson), next = lessons[index + 1];
  const button = (id, label, title, act, type = "") => h("button", { type: "button", id, title, class: type, onclick: act }, label);
  $("lesson").replaceChildren(h("div", { class: "card-box" },
    h("div", { class: "title" }, h("h2", {}, `Lesson ${index + 1} of ${lessons.length}: ${lesson.title}`), button("lesson-list", "All lessons", "Back to the list", () => update({ mode: "lessons" }))),
    h("p", {}, lesson.goal), h("p", { class: "quiet" }, facts(lesson)),
    h("div", { class: `verdict ${verdict.solved ? "" : "open"}`, id: "lesson-verdict", role: "status" },
      h("p", {}, h("strong", {}, verdict.solved ? "Solved. " : ""), verdict.message), verdict.solved && h("p", {}, verdict.explanation)),
    h("div", { class: "row" }, ...lesson.moves.filter((name) => MOVES[name]).map((name) => button(`move-${name}`, MOVES[name].label, MOVES[name].title, () => move(name))),
      hints < lesson.hints.length && button("lesson-hint", hints ? "Another hint" : "Hint", "Show a hint", () => { hints++; panel(lesson); $("lesson-hint")?.focus(); }),
      button("lesson-again", "Start again", "Back to the start of this lesson", () => begin(lesson, { fresh: true })),
      verdict.solved && next && button("lesson-next", `Next: ${next.title}`, "The next lesson", () => begin(next), "primary")),
    hints > 0 && h("ul", { class: "hints", "aria-live": "polite" }, lesson.hints.slice(0, hints).map((hint) => h("li", {}, hint))),
    h("p", { class: "quiet", id: "lesson-note", role: "status" })));
  if (focused && $("lesson").contains($(focused))) $(focused).focus({ preventScroll: true });
}

function facts(lesson) {
  useUnits(lesson);
  const { costs } = lesson, parts = [`Par ${time(lesson.par)}`];
  if (lesson.memory_limit !== null) parts.push(`at most ${lesson.memory_limit} activations on a rank`);
  if (costs.latency_seconds) parts.push(`latency ${time(costs.latency_seconds)}`);
  return `${parts.join(" · ")}. Select a step, then drag it, or move it with [ and ].`;
}

function move(name) {
  const done = changeSelected((rows, at) => MOVES[name].act(rows, at));
  if (!done) $("lesson-note").textContent = MOVES[name].not;
}

function onKey(event) {
  const lesson = openLesson(store.state);
  if (!lesson || event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea, dialog")) return;
  const name = lesson.moves.find((each) => MOVES[each]?.key === event.key);
  if (!name) return;
  event.preventDefault();
  move(name);
}

function refused(error) {
  if (!(error instanceof Refused)) throw error;
  complain(error.message);
}
