// Texts: times and sizes with their units, actions, labels, causes of idle time.

const WAITING = {
  "warm-up": "warm-up, no input yet",
  activation: "waits for an activation to be computed", gradient: "waits for a gradient to be computed",
  link: "waits for a message in transit", "blocked receive": "blocked by an earlier receive",
  unshard: "waits for its parameters to be gathered", drain: "drain, no work left",
  reload: "waits for its activation to be reloaded", overhead: "nothing in the schedule explains it",
};

// Returns the unit of the time axis: its name, and how many of it are one second (or one unit of relative costs).
function timeUnit() {
  if (data.time_unit === "units") return ["units", 1];
  return longest >= 1 || longest === 0 ? ["s", 1] : longest >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
}

// Formats a time with its unit.
function timeText(t, digits = 7) {
  const [unit, per] = timeUnit(), number = Number((t * per).toPrecision(digits));
  return `${number} ${unit === "units" && number === 1 ? "unit" : unit}`;
}

// Formats an amount of memory: bytes in a fitting unit, or activations.
function memoryText(amount) {
  if (data.memory_unit !== "activations") return bytesText(amount);
  const number = Number(amount.toPrecision(4));
  return `${number} ${number === 1 ? "activation" : "activations"}`;
}

// Formats an amount of memory for a narrow place.
function shortMemoryText(amount) {
  return data.memory_unit === "activations" ? `${Number(amount.toPrecision(4))} act.` : bytesText(amount);
}

// Formats bytes in a fitting unit.
function bytesText(amount) {
  const power = amount > 0 ? Math.min(4, Math.max(0, Math.floor(Math.log2(amount) / 10))) : 0;
  return `${Number((amount / 1024 ** power).toPrecision(4))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// Formats one part of a step: 2F0, 1UNSHARD.
function partText(kind, stage, microbatch) {
  return `${stage}${LOOK.kinds[kind]}${COLLECTIVE.includes(kind) ? "" : microbatch}`;
}

// Formats a step: 2F0 or (0F7;7B3)OVERLAP_F_B.
function stepText(panel, step) {
  const { kind, stage, microbatch } = panel.steps, pair = panel.pairOf.get(step);
  if (pair === undefined) return partText(kind[step], stage[step], microbatch[step]);
  const first = partText(KIND.F, stage[step], microbatch[step]);
  const second = partText(panel.pairs.kind[pair], panel.pairs.stage[pair], panel.pairs.microbatch[pair]);
  return `(${first};${second})OVERLAP_F_B`;
}

// Returns the forms of a box's label, the longest first: 2F0 (F0 with one stage per rank), 0; of a pair 2F0 +5B3, 0 +3.
function labelsOf(panel, step) {
  const { kind, stage, microbatch } = panel.steps, pair = panel.pairOf.get(step);
  const named = (k, s, m) => `${panel.stages > panel.ranks ? s : ""}${LOOK.short[LOOK.kinds[k]]}${m}`;
  const m = microbatch[step];
  if (pair === undefined) return [[named(kind[step], stage[step], m)], [`${m}`]];
  const { kind: kinds, stage: stages, microbatch: microbatches } = panel.pairs;
  return [
    [named(KIND.F, stage[step], m), `+${named(kinds[pair], stages[pair], microbatches[pair])}`],
    [`${m}`, `+${microbatches[pair]}`],
  ];
}

// Describes a message: "activation of stage 1, microbatch 3".
function messageText(panel, m) {
  const { gradient, stage, microbatch } = panel.messages;
  return `${gradient[m] ? "gradient" : "activation"} of stage ${stage[m]}, microbatch ${microbatch[m]}`;
}

// Describes why a rank is idle, and which step it waits for.
function gapText(panel, gap) {
  const { start, end, reason, blame, message } = panel.gaps;
  const text = `idle ${timeText(end[gap] - start[gap])}: ${WAITING[reason[gap]] ?? reason[gap]}`;
  if (blame[gap] < 0) return text;
  const culprit = `${stepText(panel, blame[gap])}, rank ${panel.rankOf[blame[gap]]}`;
  return `${text} (${message[gap] < 0 ? "" : `${messageText(panel, message[gap])}, computed by `}${culprit})`;
}

// Returns the metrics of a panel, each with its name.
function metricsOf(panel) {
  const peak = Math.max(0, ...panel.memory.map((m) => m.peak));
  const where = panel.memory.findIndex((m) => m.peak === peak);
  return [
    ["makespan", timeText(panel.makespan, 5)], ["span", timeText(panel.span, 5)],
    ...(panel.period === null ? [] : [["period", timeText(panel.period, 5)]]),
    ["bubble", `${(panel.bubble * 100).toFixed(1)} %`],
    ...(!panel.memory.length ? [] : [["peak memory", panel.ranks > 1 && peak > 0 ? `${memoryText(peak)} (rank ${where})` : memoryText(peak)]]),
  ];
}
