"""The gain of the schedule found over 1F1B on two ranks of this machine, for several settings of the demo.

    python -m benchmarks.demo_gain            all settings, about 20 s each
    python -m benchmarks.demo_gain 2x8        2 microbatches of 8 sequences

Every pair of steps is one of 1F1B and one of the schedule found, so that the load of the machine changes both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.cli.demo import Gain, measured_gain
from penstock.families import build
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.runtime.demo import Step, begin, end, train
from penstock.runtime.local_ranks import LocalRanks
from penstock.search import search
from penstock.simulation.calibration import calibrate
from penstock.simulation.simulator import simulate

SETTINGS = ((4, 4), (2, 4), (2, 8))
"""Microbatches, and sequences in each."""
RANKS, PROFILED, PAIRS, SEARCH_SECONDS = 2, 4, 14, 1.0


def measure(microbatches: int, rows: int, log: Path) -> Gain:
    """Profile 1F1B and ZB-H1, search at these costs within the memory of 1F1B, and measure pairs of steps."""
    first, split = (build(name, ranks=RANKS, microbatches=microbatches) for name in ("1f1b", "zb-h1"))
    with LocalRanks(RANKS) as ranks:

        def steps(schedules: list[Schedule]) -> list[Step]:
            return [ranks.run(train, schedule)[0] for schedule in schedules]

        ranks.run(begin, RANKS, log, microbatches, rows)
        steps([first, split] * 2)
        costs = calibrate([step.timeline for step in steps([first, split] * PROFILED)])
        before = simulate(first, costs)
        result = search(
            ranks=RANKS,
            microbatches=microbatches,
            costs=costs,
            placement=Placement.loop(RANKS),
            memory_limit=max(before.peak_memory),
            seconds=SEARCH_SECONDS,
        )
        found = result.schedule.renamed("found")
        steps([found])
        taken = [step.timeline.makespan for step in steps([first, found] * PAIRS)]
        ranks.run(end)
    predicted = 1 - result.timeline.makespan / before.makespan
    return measured_gain(taken[::2], taken[1::2], predicted, same_order=found.ranks == first.ranks)


def main(arguments: list[str]) -> None:
    """Print a line for each setting."""
    settings = [tuple(map(int, each.split("x"))) for each in arguments] or SETTINGS
    with TemporaryDirectory() as folder:
        for microbatches, rows in settings:
            gain = measure(microbatches, rows, Path(folder) / "log.jsonl")
            setting = f"{microbatches} microbatches of {rows} sequences"
            noise = f"noise {gain.noise:.1%} with {gain.steps} pairs"
            print(f"{setting}: gain {gain.measured:.1%}, {noise}, predicted {gain.predicted:.1%}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
