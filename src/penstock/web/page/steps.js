// Changes of a schedule in the editor: pure functions from rows of step texts to new rows.

// Returns rows in which a step has moved to another place of its rank.
export function moved(rows, rank, from, to) {
  return change(rows, rank, (row) => {
    const [step] = row.splice(from, 1);
    row.splice(Math.max(0, Math.min(row.length, to)), 0, step);
  });
}

// Returns rows in which two steps of a rank have changed places.
export function swapped(rows, rank, a, b) {
  return change(rows, rank, (row) => { [row[a], row[b]] = [row[b], row[a]]; });
}

// Returns rows without a step.
export function removed(rows, rank, index) {
  return change(rows, rank, (row) => row.splice(index, 1));
}

// Returns rows with a step added at the end of a rank, or at a place.
export function added(rows, rank, text, index = Infinity) {
  return change(rows, rank, (row) => row.splice(index, 0, text));
}

// Returns the parts of a step: 2F0 is { stage: 2, kind: "F", microbatch: 0 }; null for pairs.
export function partsOf(text) {
  const match = /^(\d+)([A-Z_]+?)(\d+)$/.exec(text);
  return match && { stage: Number(match[1]), kind: match[2], microbatch: Number(match[3]) };
}

// Returns rows in which a step has the microbatch `by` further, and the step that had it takes its old one.
export function acrossMicrobatches(rows, rank, index, by) {
  const parts = partsOf(rows[rank][index]);
  const other = parts && rows[rank].indexOf(`${parts.stage}${parts.kind}${parts.microbatch + by}`);
  return parts && other >= 0 ? swapped(rows, rank, index, other) : rows;
}

// Copies the rows, and changes one of them.
function change(rows, rank, act) {
  const copy = rows.map((row) => [...row]);
  act(copy[rank]);
  return copy;
}
