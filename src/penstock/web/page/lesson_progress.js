// The progress in lessons, kept in the browser: which are solved, and the last attempt at each.

const KEY = "penstock.lessons";
let kept = null;

// Returns what is kept; what is damaged or not ours is left out.
export function progress() {
  if (kept) return kept;
  kept = {};
  try {
    const read = JSON.parse(localStorage.getItem(KEY) ?? "{}");
    for (const [key, each] of Object.entries(read ?? {})) {
      if (each && typeof each === "object") kept[key] = { solved: each.solved === true, steps: rowsOf(each.steps) };
    }
  } catch { /* no storage, or damaged: the progress lasts as long as the page */ }
  return kept;
}

function rowsOf(value) {
  const rows = Array.isArray(value) && value.every((row) => Array.isArray(row) && row.every((step) => typeof step === "string"));
  return rows ? value : null;
}

// Keeps a change of one lesson.
export function keep(key, change) {
  kept = { ...progress(), [key]: { solved: false, steps: null, ...progress()[key], ...change } };
  try {
    localStorage.setItem(KEY, JSON.stringify(kept));
  } catch { /* no storage */ }
}

// Forgets everything.
export function forget() {
  kept = {};
  try {
    localStorage.removeItem(KEY);
  } catch { /* no storage */ }
}
