"""A custom schedule in twenty lines: 1F1B in groups of two, validated, printed and simulated.

python examples/custom_schedule.py
"""

import penstock
from penstock import Placement, Schedule


@penstock.register("by-twos", "1F1B with two forwards and two backwards in turn", stages_per_rank=1)
def by_twos(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Warm up with 2(p - r) forwards on rank r, then alternate two backwards and two forwards."""
    rows = []
    for r in range(ranks):
        forwards = [f"{r}F{k}" for k in range(microbatches)]
        backwards = [f"{r}B{k}" for k in range(microbatches)]
        row, forwards = forwards[: 2 * (ranks - r)], forwards[2 * (ranks - r) :]
        while backwards:
            row += backwards[:2] + forwards[:2]
            backwards, forwards = backwards[2:], forwards[2:]
        rows.append(row)
    return Schedule(rows, Placement.loop(ranks, stages_per_rank), microbatches, "by-twos")


def main() -> None:
    """Use it as any built-in family."""
    mine = penstock.build("by-twos", ranks=3, microbatches=6)
    print(mine)
    print("violations:", penstock.validate(penstock.lower(mine)))
    for name in ("1f1b", "by-twos"):
        for latency in (0, 0.5):
            made = penstock.build(name, ranks=3, microbatches=6)
            timeline = penstock.simulate(made, penstock.Costs(latency=latency))
            live = max(timeline.peak_memory)
            print(f"{name}, latency {latency}: makespan {timeline.makespan:g}, {live:g} live activations")


if __name__ == "__main__":
    main()
