// Numbers as text.

// Formats a number to so many digits, without trailing zeros.
export function short(value, digits = 5) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return String(Number(value.toPrecision(digits)));
}

// Formats seconds with a fitting unit.
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const [unit, factor] = value >= 1 || value === 0 ? ["s", 1] : value >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return `${short(value * factor)} ${unit}`;
}

let units = { time: "seconds", memory: "bytes" };

// From now on formats times and sizes in the units of this row of an answer.
export function useUnits(row) {
  if (row?.time_unit) units = { time: row.time_unit, memory: row.memory_unit };
}

// Formats a time of a schedule: seconds with a fitting unit, or units.
export function time(value) {
  return units.time === "seconds" || value === null || value === undefined ? seconds(value) : counted(value, "unit");
}

// Formats the memory of a schedule: bytes with a fitting unit, or activations.
export function memory(amount) {
  return units.memory === "bytes" || amount === null || amount === undefined ? bytes(amount) : counted(amount, "activation");
}

const counted = (value, name) => `${short(value)} ${name}${value === 1 ? "" : "s"}`;

// Formats bytes with a fitting unit.
export function bytes(amount) {
  if (amount === null || amount === undefined) return "–";
  const power = amount > 0 ? Math.min(4, Math.max(0, Math.floor(Math.log2(amount) / 10))) : 0;
  return `${short(amount / 1024 ** power, 4)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// Formats a share as a percentage.
export function percent(share) {
  const text = Math.abs(share * 100).toFixed(1);
  return `${share < 0 && text !== "0.0" ? "−" : ""}${text} %`;
}

// Formats a relative difference with its sign, or returns null if there is none.
export function difference(value, base) {
  if (!base || value === base) return null;
  const share = value / base - 1;
  if (Math.abs(share) < 5e-4) return null;
  return `${share > 0 ? "+" : "−"}${(Math.abs(share) * 100).toFixed(1)} %`;
}

const UNITS = { "": 1, B: 1, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, KIB: 1024, MIB: 1024 ** 2, GIB: 1024 ** 3, TIB: 1024 ** 4 };

// Parses bytes with or without a unit: 80GB, 74.5 GiB, 8. Returns null if empty, NaN if it is none.
export function parseBytes(text) {
  if (!text.trim()) return null;
  const match = /^\s*([0-9.eE+-]+)\s*([KMGT]?i?B?)\s*$/i.exec(text);
  const unit = match && UNITS[match[2].toUpperCase()];
  return match && unit ? Number(match[1]) * unit : NaN;
}
