// Explanations: why a rank is idle, who must be faster, and what the critical path consists of.

import { $, h } from "./dom.js";
import { drawn } from "./drawing.js";
import { percent, time } from "./format.js";

const REASONS = {
  "warm-up": "its first input has not been computed yet", activation: "it waits for an activation", gradient: "it waits for a gradient",
  link: "it waits for a message that is in transit", "blocked receive": "an earlier receive blocks it", "blocked send": "an earlier send blocks it",
  unshard: "it waits for its parameters to be gathered", reload: "it waits for its activation to come back from the host",
  drain: "it has no work left while others finish",
};

// Returns the hooks of a drawing that explains what is clicked.
export function explainHooks() {
  return { onPick: (target) => pick(target) };
}

// Hides the explanation.
export function resetExplanation() {
  $("explain").hidden = true;
}

function pick(target) {
  if (target?.gap !== undefined) return showGap(target.panel, target.gap);
  if (target?.step !== undefined) return showStep(target.panel, target.step);
  resetExplanation();
}

// Shows the gap before the selected step, if any.
export function explainSelection() {
  const target = drawn()?.state.selected;
  if (!target || target.step === undefined) return;
  const gap = target.panel.gapBefore.get(target.step);
  if (gap !== undefined) showGap(target.panel, gap);
}

function fillBox(title, ...lines) {
  const close = h("button", { type: "button", class: "icon small", "aria-label": "Close the explanation", onclick: resetExplanation }, "×");
  $("explain").replaceChildren(h("div", { class: "title" }, h("h2", {}, title), close), ...lines);
  $("explain").hidden = false;
}

// Explains an idle gap in sentences: the reason, who must be faster, and where that began.
function showGap(panel, gap) {
  const { rank, start, end, reason, before, blame, message } = panel.gaps, tools = drawn();
  const length = end[gap] - start[gap];
  const next = before[gap] < 0 ? "" : ` before ${tools.stepText(panel, before[gap])}`;
  const lines = [h("p", {}, `Rank ${rank[gap]} is idle for ${time(length)}${next} (${percent(length / panel.makespan)} of the makespan): `,
    h("strong", {}, REASONS[reason[gap]] ?? reason[gap]), ".")];
  if (blame[gap] >= 0) lines.push(h("p", {}, fasterText(panel, gap, blame[gap], message[gap])), ...rootLines(panel, gap));
  else if (reason[gap] === "drain") lines.push(h("p", {}, "A shorter drain needs work that can be done late, such as weight gradients (W), or fewer ranks after this one."));
  fillBox(`Why is rank ${rank[gap]} idle?`, ...lines);
}

function fasterText(panel, gap, step, message) {
  const tools = drawn(), culprit = `${tools.stepText(panel, step)} on rank ${panel.rankOf[step]}`;
  if (panel.gaps.reason[gap] === "link" && message >= 0) {
    const { begin, arrival } = panel.messages;
    return `The message from ${culprit} is on its way for ${time(arrival[message] - begin[message])}: the link from rank ${panel.rankOf[step]} to rank ${panel.gaps.rank[gap]} must be faster, or ${culprit} must end earlier.`;
  }
  return `${culprit} must end earlier: it ends at ${time(panel.steps.end[step])}.`;
}

// Follows the waits back: what the blamed step itself waited for.
function rootLines(panel, gap) {
  const tools = drawn(), chain = [];
  let step = panel.gaps.blame[gap];
  for (let guard = 0; step >= 0 && guard < 200; guard++) {
    const own = panel.gapBefore.get(step);
    if (own === undefined || panel.gaps.blame[own] < 0) break;
    step = panel.gaps.blame[own];
    chain.push(step);
  }
  if (!chain.length) return [h("p", { class: "quiet" }, "That step starts as soon as its rank is free, so its rank has to do it earlier, or everything before it has to be shorter.")];
  const shown = chain.slice(0, 5).map((each) => `${tools.stepText(panel, each)} (rank ${panel.rankOf[each]})`);
  return [h("p", { class: "quiet" }, `That step waited too, in the end for ${shown.join(", then ")}${chain.length > 5 ? " and further back" : ""}.`)];
}

// Explains a step: what it needed last, and whether it is critical.
function showStep(panel, step) {
  const tools = drawn(), gap = panel.gapBefore.get(step);
  const critical = panel.onPath.has(step);
  const lines = [h("p", {}, `Rank ${panel.rankOf[step]} runs it from ${time(panel.steps.start[step])} to ${time(panel.steps.end[step])}. `,
    critical ? h("strong", {}, "It is on the critical path: any delay of it delays the whole step.") : "It is not on the critical path.")];
  if (gap !== undefined) lines.push(h("button", { type: "button", onclick: () => showGap(panel, gap) }, "Why is the rank idle before it?"));
  fillBox(tools.stepText(panel, step), ...lines);
}
