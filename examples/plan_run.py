"""Plan a run from costs, without torch or a GPU: which schedule, how many microbatches, and does it fit?

python examples/plan_run.py
"""

from pathlib import Path

import penstock
from penstock import Costs
from penstock.simulation.comparison import compare

RANKS, MEMORY = 8, 10
"""What there is: ranks, and room for as many activations of one stage per rank."""
COSTS = Path(__file__).parent / "costs"
CUTS = {
    "one_stage_slow_hops.toml": ("1f1b", "eager-1f1b", "zb-h1", "zb-h2"),
    "two_stages_slow_hops.toml": ("interleaved-1f1b", "interleaved-zero-bubble", "zbv", "v-half"),
}
"""The model cut into one stage per rank, or two, and the families for that."""


def main() -> None:
    """Simulate all of them for three microbatch counts, and name the fastest that fits."""
    rows = []
    for file, names in CUTS.items():
        costs = Costs.read(COSTS / file)
        for m in (8, 16, 32):
            made = [penstock.build(name, ranks=RANKS, microbatches=m) for name in names]
            rows += compare(*made, costs=costs)
    rows.sort(key=lambda row: row.makespan / row.microbatches)
    print("family                    m  time of one  idle   holds")
    for row in rows[:10]:
        fits = "" if row.peak_memory <= MEMORY else "  too much"
        each, m = row.makespan / row.microbatches, row.microbatches
        print(f"{row.name:<24} {m:>2}  {each:>11.3f}  {row.bubble:5.1%}  {row.peak_memory:5.1f}{fits}")
    best = next(row for row in rows if row.peak_memory <= MEMORY)
    print(f"take {best.name} with {best.microbatches} microbatches: within {best.gap:.1%} of the best order")


if __name__ == "__main__":
    main()
