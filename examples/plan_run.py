"""Choose a schedule and a number of microbatches from costs and a memory limit, without torch or a GPU.

python examples/plan_run.py
"""

from pathlib import Path

import penstock
from penstock import Costs
from penstock.simulation.comparison import compare

RANKS, MEMORY = 8, 10
"""The number of ranks, and the memory limit per rank in activations of a whole rank."""
COSTS = Path(__file__).parent / "costs"
SPLITS = {
    "one_stage_slow_hops.toml": ("1f1b", "eager-1f1b", "zb-h1", "zb-h2"),
    "two_stages_slow_hops.toml": ("interleaved-1f1b", "interleaved-zero-bubble", "zbv", "v-half"),
}
"""Costs of the model split into one or two stages per rank, and the families for each."""


def main() -> None:
    """Simulate all of them, and print the fastest within the memory limit."""
    rows = []
    for file, names in SPLITS.items():
        costs = Costs.read(COSTS / file)
        for m in (8, 16, 32):
            made = [penstock.build(name, ranks=RANKS, microbatches=m) for name in names]
            rows += compare(*made, costs=costs)
    rows.sort(key=lambda row: row.makespan / row.microbatches)
    print("family                    m  time per microbatch   idle  memory")
    for row in rows[:10]:
        fits = "" if row.peak_memory <= MEMORY else "  over the limit"
        each, m = row.makespan / row.microbatches, row.microbatches
        print(f"{row.name:<24} {m:>2}  {each:>19.3f}  {row.bubble:5.1%}  {row.peak_memory:6.1f}{fits}")
    best = next(row for row in rows if row.peak_memory <= MEMORY)
    print(f"best: {best.name} with {best.microbatches} microbatches, gap to the lower bound {best.gap:.1%}")


if __name__ == "__main__":
    main()
