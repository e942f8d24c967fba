// Requests to the server. Of several requests under one name only the latest counts; the others are cancelled.

const running = new Map();
let busy = 0;

// Counts the requests that are under way; the page shows it as a thin line.
function count(by) {
  busy += by;
  document.body.dataset.busy = busy;
}

export class Refused extends Error {}

// Asks the server; returns its answer, null if a later request replaced this one, and throws `Refused` with its message.
export async function ask(name, document, slot = name) {
  running.get(slot)?.abort();
  const control = new AbortController();
  running.set(slot, control);
  count(1);
  try {
    const response = await fetch(`api/${name}`, {
      method: "POST", body: JSON.stringify(document), headers: { "Content-Type": "application/json" }, signal: control.signal,
    });
    const answer = await response.json();
    if (!response.ok) throw new Refused(answer.error ?? response.statusText);
    return running.get(slot) === control ? answer : null;
  } catch (error) {
    if (error.name === "AbortError") return null;
    if (error instanceof Refused) throw error;
    throw new Refused("The server does not answer. Is penstock play still running?");
  } finally {
    setTimeout(() => count(-1)); // after what the answer is used for
  }
}

// Cancels the running request of a name.
export function cancel(slot) {
  running.get(slot)?.abort();
}

// Returns what the page offers.
export async function catalogue() {
  const response = await fetch("api/catalogue");
  return response.json();
}

// Sends a request whose answer is a stream of lines, and calls `onLine` with each.
export async function stream(name, document, onLine, signal) {
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
