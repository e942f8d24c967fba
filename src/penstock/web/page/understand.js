// Below the timelines: what-if questions, critical paths compared, and the Pareto chart.

import { $ } from "./dom.js";

// Shows what belongs below the timelines of an answer.
export function showBelow() {
  $("below").replaceChildren();
}
