// Files: schedules and traces that are dropped onto the page, or chosen.

import { showTrace } from "./trace.js";
import { $, complain, h } from "./dom.js";
import { Refused, ask } from "./api.js";
import { freshName, question, store, subscribe, update } from "./state.js";

let taking = false;
const MAX_FILE_BYTES = 8 * 1024 * 1024, MAX_TRACE_BYTES = 45 * 1024 * 1024;

// Accepts files on the whole page, and adds a button for those who do not drag.
export function start(catalogue) {
  const input = h("input", { type: "file", id: "file", accept: ".csv,.json,.gz", multiple: true, class: "sr", onchange: () => {
    const files = [...input.files];
    input.value = ""; // the same file can be chosen again
    take(files, catalogue);
  } });
  const button = h("button", { type: "button", id: "open-file", class: "wide", onclick: () => input.click() }, "Open a file…");
  if (!catalogue.read_only) $("controls").firstChild.append(button, h("label", { for: "file", class: "sr" }, "Schedule file"), input);
  subscribe(() => { if (!taking) complain(null, "files"); }); // what is done next is about something else
  let depth = 0;
  const over = (shown) => { $("drop").hidden = !shown; };
  addEventListener("dragenter", (event) => { if (event.dataTransfer?.types.includes("Files")) { depth++; over(true); } });
  addEventListener("dragleave", () => { depth = Math.max(0, depth - 1); over(depth > 0); });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    over(false);
    take(event.dataTransfer.files, catalogue);
  });
}

// Reads files one after the other; each that is refused has a line of the message.
async function take(files, catalogue) {
  if (catalogue.read_only) return complain("This playground is read-only: it takes no files.", "files");
  const traces = [], schedules = [], refused = [];
  const attempt = (work) => work.catch((error) => {
    if (!(error instanceof Refused)) throw error;
    refused.push(error.message);
  });
  taking = true;
  try {
    for (const file of [...files]) ((await isTrace(file)) ? traces : schedules).push(file);
    for (const file of schedules) await attempt(takeSchedule(file, catalogue));
    if (traces.length) await attempt(takeTraces(traces));
  } finally {
    taking = false;
    complain(refused.join("\n"), "files");
  }
}

// Returns whether a file is a profiler trace: compressed, or JSON with trace events near its beginning or at its end.
async function isTrace(file) {
  if (/\.gz$/i.test(file.name)) return true;
  if (!/\.json$/i.test(file.name)) return false;
  const parts = await Promise.all([file.slice(0, 65536).text(), file.slice(-4096).text()]);
  return parts.some((text) => text.includes('"traceEvents"') || /"ph"\s*:/.test(text));
}

async function takeTraces(files) {
  const total = files.reduce((sum, file) => sum + file.size, 0);
  if (total > MAX_TRACE_BYTES) throw new Refused(`Traces can have at most ${MAX_TRACE_BYTES.toLocaleString("en")} bytes here; use penstock read-trace, which has no limit.`);
  const encoded = await Promise.all(files.map(async (file) => ({ name: file.name, base64: await base64(file) })));
  const answer = await ask("trace", { files: encoded }, "upload");
  if (answer === null) return;
  complain(null);
  showTrace(answer);
}

// Returns the content of a file in base64.
function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Refused(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

async function takeSchedule(file, catalogue) {
  const suffix = file.name.toLowerCase().split(".").pop();
  if (!["csv", "json"].includes(suffix)) throw new Refused(`${file.name}: a schedule is a .csv or .json file.`);
  if (file.size > MAX_FILE_BYTES) throw new Refused(`${file.name}: files can have at most ${MAX_FILE_BYTES.toLocaleString("en")} bytes.`);
  const name = freshName(store.state, file.name.replace(/\.[^.]+$/, ""));
  const asked = { ...question(store.state, catalogue, []), lowered: false, send_model: "buffered", schedules: [{ [suffix]: await file.text(), name: file.name }] };
  const answer = await ask("edit", asked, "upload");
  if (answer === null) return;
  if (!answer.steps) throw new Refused(`${file.name}: this schedule has too many steps for the page; use penstock show.`);
  const own = { ...store.state.own, [name]: { stage_to_rank: answer.stage_to_rank, microbatches: answer.microbatches, steps: answer.steps } };
  if (store.state.mode === "edit" || !answer.verdict.valid) update({ mode: "edit", own, edit: name });
  else update({ mode: "compare", own, schedules: [...store.state.schedules, `@${name}`].slice(-8) });
}
