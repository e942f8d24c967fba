"""Build, lower, validate and simulate large schedules, beside torch, which builds, lowers and dry-runs.

    python -m benchmarks.plan            about three minutes; needs the extra `torch`

Both run in this process, one after the other, each several times; the best of each is taken. torch validates
less in its time (counts and per-stage order) and its dry run counts unit steps; Penstock proves every rule and
the absence of deadlock, and simulates real costs with memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.oracles import torch_schedules

import penstock
from penstock.simulation.simulator import Engine


class Instance(NamedTuple):
    """One schedule to plan."""

    theirs: str
    ours: str
    ranks: int
    stages_per_rank: int
    microbatches: int

    def __str__(self) -> str:
        return f"{self.theirs} p={self.ranks} v={self.stages_per_rank} m={self.microbatches}"


INSTANCES = (
    Instance("Interleaved1F1B", "interleaved-1f1b", 32, 4, 512),
    Instance("ZBVZeroBubble", "zbv", 32, 2, 512),
    Instance("InterleavedZeroBubble", "interleaved-zero-bubble", 16, 4, 256),
)


def timed(work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of several runs."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def seconds(instance: Instance) -> dict[str, float]:
    """Penstock's parts, and torch's whole."""
    _, name, ranks, stages_per_rank, microbatches = instance

    def build() -> penstock.Schedule:
        return penstock.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)

    def all_of_it() -> None:
        assert penstock.validate(penstock.lower(build())) == []

    compute = build()
    lowered = penstock.lower(compute)
    return {
        "steps": lowered.num_steps,
        "build": timed(build, 5),
        "lower": timed(lambda: penstock.lower(build()), 5) - timed(build, 5),
        "ours": timed(all_of_it, 5),
        "torch": timed(lambda: torch_schedules.built(instance.theirs, ranks, stages_per_rank, microbatches), 2),
    }


COSTS = penstock.Costs(forward=10, backward_input=11, backward_weight=9, latency=0.5, activation=3)


def print_simulation(instance: Instance) -> None:
    """Everything from nothing to a timeline with memory, and torch's way to its count of steps."""
    _, name, ranks, stages_per_rank, microbatches = instance

    def ours() -> None:
        schedule = penstock.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        assert penstock.simulate(penstock.lower(schedule), COSTS).peak_memory

    def theirs() -> None:
        built = torch_schedules.built(instance.theirs, ranks, stages_per_rank, microbatches)
        assert torch_schedules.dry_run(built)

    mine, rival = timed(ours, 3), timed(theirs, 1)
    print(f"{instance!s:<56}{mine:>10.3f}{rival:>11.2f}{rival / mine:>7.1f}x")


def print_rate() -> None:
    """How many simulations a second, of a schedule that is new each time and of one with new costs."""
    schedule = penstock.build("zb-h1", ranks=8, microbatches=32)
    engine = Engine(schedule, COSTS)
    fresh = timed(lambda: Engine(schedule.with_rows(schedule.table.rows), COSTS).run(), 200)
    again = timed(engine.run, 200)
    rates = f"{1 / fresh:,.0f} new, {1 / again:,.0f} run again"
    print(f"simulations a second, p=8 m=32, {schedule.num_steps} steps: {rates}")


def main() -> None:
    """Print the tables: planning, growth with the number of microbatches, simulation."""
    logging.disable(logging.WARNING)
    print(f"{'schedule':<42}{'lowered steps':>14}{'ours (s)':>10}{'torch (s)':>11}{'ratio':>8}")
    for instance in INSTANCES:
        t = seconds(instance)
        ratio = t["torch"] / t["ours"]
        print(f"{instance!s:<42}{t['steps']:>14,.0f}{t['ours']:>10.3f}{t['torch']:>11.2f}{ratio:>7.1f}x")
        print(
            f"    of it build {t['build']:.3f}, lower {t['lower']:.3f}, "
            f"validate {t['ours'] - t['build'] - t['lower']:.3f}"
        )
    print(f"\ntwice the microbatches{'ours':>30}{'torch':>16}")
    for instance in INSTANCES:
        half = seconds(instance._replace(microbatches=instance.microbatches // 2))
        full = seconds(instance)
        grown = [full[who] / half[who] for who in ("ours", "torch")]
        print(f"{instance!s:<42}{grown[0]:>9.1f}x{grown[1]:>15.1f}x")
    print(f"\n{'build, lower, validate, simulate':<56}{'ours (s)':>10}{'torch (s)':>11}{'ratio':>8}")
    for instance in (INSTANCES[0], INSTANCES[2]):
        print_simulation(instance)
    print_rate()


if __name__ == "__main__":
    main()
