// Requests to the server, each in a slot of which only the latest counts.

import { useUnits } from "./format.js";

const running = new Map(), latest = new Map();
let busy = 0;

// Counts the requests that are under way; the page shows it as a thin line.
function count(by) {
  busy += by;
  document.body.dataset.busy = busy;
}

export class Refused extends Error {}

const PATIENCE = 250; // milliseconds that a request may run before a later one of its slot cancels it

// Asks the server. Requests of one slot run one after the other, so that a dragged slider shows every answer that is ready
// in time; those that wait are dropped for the latest, and one that takes long is cancelled. Returns null if this one was,
// and throws `Refused` with the server's message.
export async function ask(name, document, slot = name) {
  const turn = Symbol(slot), before = running.get(slot);
  latest.set(slot, turn);
  count(1);
  try {
    if (before) {
      await Promise.race([before.done, pause(PATIENCE - (performance.now() - before.began))]);
      if (latest.get(slot) !== turn) return null;
      before.control.abort();
    }
    return await send(name, document, slot);
  } catch (error) {
    if (error.name === "AbortError") return null;
    if (error instanceof Refused) throw error;
    throw new Refused("The server does not answer. Is penstock play still running?");
  } finally {
    setTimeout(() => count(-1)); // after what the answer is used for
  }
}

const pause = (milliseconds) => new Promise((resolve) => { setTimeout(resolve, Math.max(0, milliseconds)); });

async function send(name, document, slot) {
  const control = new AbortController();
  const entry = { control, began: performance.now(), done: null };
  running.set(slot, entry);
  const work = (async () => {
    const response = await fetch(`api/${name}`, {
      method: "POST", body: JSON.stringify(document), headers: { "Content-Type": "application/json" }, signal: control.signal,
    });
    const answer = await response.json();
    if (!response.ok) throw new Refused(answer.error ?? response.statusText);
    useUnits(answer.row ?? answer.schedules?.find?.(({ row }) => row)?.row);
    return answer;
  })();
  entry.done = work.catch(() => null).finally(() => { if (running.get(slot) === entry) running.delete(slot); });
  return work;
}

// Returns what the page offers.
export async function catalogue() {
  const response = await fetch("api/catalogue");
  return response.json();
}

// Sends a request whose answer is a stream of lines, and calls `onLine` with each. Unless it is `shown` elsewhere, it counts as under way.
export async function stream(name, document, onLine, { signal, shown = false }) {
  count(shown ? 0 : 1);
  try {
    await lines(name, document, onLine, signal);
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Refused) throw error;
    throw new Refused("The server does not answer. Is penstock play still running?");
  } finally {
    setTimeout(() => count(shown ? 0 : -1));
  }
}

async function lines(name, document, onLine, signal) {
  const response = await fetch(`api/${name}`, {
    method: "POST", body: JSON.stringify(document), headers: { "Content-Type": "application/json" }, signal,
  });
  if (!response.ok) throw new Refused((await response.json()).error);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) onLine(JSON.parse(line));
  }
}
