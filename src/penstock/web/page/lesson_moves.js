// The further moves of lessons: pure functions from rows of step texts and a selected step to new rows, or null.

import { partsOf } from "./steps.js";

const PAIR = /^\((\w+);(\w+)\)OVERLAP_F_B$/;

function changed(rows, rank, row) {
  return rows.map((each, r) => (r === rank ? row : each));
}

// Splits a B into I and W, or joins an I and its W to the B that they were.
export function split(rows, { rank, index }) {
  const row = [...rows[rank]], parts = partsOf(row[index]);
  if (!parts || !"BIW".includes(parts.kind)) return null;
  const text = (kind) => `${parts.stage}${kind}${parts.microbatch}`;
  if (parts.kind === "B") {
    row.splice(index, 1, text("I"), text("W"));
    return { rows: changed(rows, rank, row), index };
  }
  const at = row.indexOf(text("I")), weight = row.indexOf(text("W"));
  if (at < 0 || weight < 0) return null;
  row[at] = text("B");
  row.splice(weight, 1);
  return { rows: changed(rows, rank, row), index: weight < at ? at - 1 : at };
}

// Adds a RECOMPUTE directly before the backward of the selected stage and microbatch, or removes it.
export function recompute(rows, { rank, index }) {
  const row = [...rows[rank]], parts = partsOf(row[index]);
  if (!parts) return null;
  const text = `${parts.stage}RECOMPUTE${parts.microbatch}`, there = row.indexOf(text);
  if (there >= 0) {
    row.splice(there, 1);
    return { rows: changed(rows, rank, row), index: Math.min(index, row.length - 1) };
  }
  const backward = row.findIndex((step) => step === `${parts.stage}B${parts.microbatch}` || step === `${parts.stage}I${parts.microbatch}`);
  if (backward < 0) return null;
  row.splice(backward, 0, text);
  return { rows: changed(rows, rank, row), index: backward };
}

// Makes a pair of the selected step and the one after it, a forward and a backward; a pair becomes two steps again.
export function pair(rows, { rank, index }) {
  const row = [...rows[rank]], pairOf = PAIR.exec(row[index]);
  if (pairOf) {
    row.splice(index, 1, pairOf[1], pairOf[2]);
    return { rows: changed(rows, rank, row), index };
  }
  const both = [row[index], row[index + 1] ?? ""], kinds = both.map((step) => partsOf(step)?.kind);
  const forward = kinds.indexOf("F"), backward = kinds.findIndex((kind) => kind === "B" || kind === "I");
  if (forward < 0 || backward < 0) return null;
  row.splice(index, 2, `(${both[forward]};${both[backward]})OVERLAP_F_B`);
  return { rows: changed(rows, rank, row), index };
}

export const MOVES = {
  split: { act: split, label: "Split or join B", title: "Split the selected B into I and W, or join I and W (s)", key: "s", not: "Select a B to split it, or an I or W to join them." },
  recompute: { act: recompute, label: "Recompute", title: "Recompute the forward of the selected step before its backward, or not (r)", key: "r", not: "Select a step of the microbatch to recompute." },
  pair: { act: pair, label: "Pair with the next step", title: "Pair the selected step with the one after it, or take a pair apart (p)", key: "p", not: "Select a forward directly before a backward, or a backward directly before a forward." },
};
