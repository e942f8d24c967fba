"""Build, lower, validate and simulate large schedules; torch builds, lowers and dry-runs the same ones.

    python -m benchmarks.plan            about three minutes; needs the extra `torch`

Both run in this process one after the other, several times; the table has the fastest run of each. torch
validates less (counts and the order per stage), and its dry run counts unit steps. Penstock checks every rule,
proves the absence of deadlock, and simulates costs and memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.oracles import torch_schedules

import penstock
from penstock.simulation.simulator import Simulator


class Instance(NamedTuple):
    """One schedule: torch's name, Penstock's name and the arguments."""

    torch_name: str
    name: str
    ranks: int
    stages_per_rank: int
    microbatches: int

    def __str__(self) -> str:
        return f"{self.torch_name} p={self.ranks} v={self.stages_per_rank} m={self.microbatches}"


INSTANCES = (
    Instance("Interleaved1F1B", "interleaved-1f1b", 32, 4, 512),
    Instance("ZBVZeroBubble", "zbv", 32, 2, 512),
    Instance("InterleavedZeroBubble", "interleaved-zero-bubble", 16, 4, 256),
)


def fastest(call: Callable[[], object], times: int) -> float:
    """Return the seconds of the fastest run."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def seconds(instance: Instance) -> dict[str, float]:
    """Measure Penstock in total and per part, and torch in total."""
    _, name, ranks, stages_per_rank, microbatches = instance

    def build() -> penstock.Schedule:
        return penstock.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)

    def build_lower_validate() -> None:
        assert penstock.validate(penstock.lower(build())) == []

    compute = build()
    lowered = penstock.lower(compute)
    return {
        "steps": lowered.num_steps,
        "build": fastest(build, 5),
        "lower": fastest(lambda: penstock.lower(build()), 5) - fastest(build, 5),
        "penstock": fastest(build_lower_validate, 5),
        "torch": fastest(
            lambda: torch_schedules.built(instance.torch_name, ranks, stages_per_rank, microbatches), 2
        ),
    }


COSTS = penstock.Costs(forward=10, backward_input=11, backward_weight=9, latency=0.5, activation=3)


def print_simulation(instance: Instance) -> None:
    """Compare build, lower and simulate with memory to torch's build, lower and dry run."""
    _, name, ranks, stages_per_rank, microbatches = instance

    def run_penstock() -> None:
        schedule = penstock.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        assert penstock.simulate(penstock.lower(schedule), COSTS).peak_memory

    def run_torch() -> None:
        built = torch_schedules.built(instance.torch_name, ranks, stages_per_rank, microbatches)
        assert torch_schedules.dry_run(built)

    penstock_seconds, torch_seconds = fastest(run_penstock, 3), fastest(run_torch, 1)
    ratio = torch_seconds / penstock_seconds
    print(f"{instance!s:<56}{penstock_seconds:>13.3f}{torch_seconds:>11.2f}{ratio:>7.1f}x")


def print_rate() -> None:
    """Print simulations per second, of a new schedule each time and of the same schedule again."""
    schedule = penstock.build("zb-h1", ranks=8, microbatches=32)
    simulator = Simulator(schedule, COSTS)
    fresh = fastest(lambda: Simulator(schedule.with_rows(schedule.table.rows), COSTS).run(), 200)
    again = fastest(simulator.run, 200)
    rates = f"{1 / fresh:,.0f} new, {1 / again:,.0f} repeated"
    print(f"simulations per second, p=8 m=32, {schedule.num_steps} steps: {rates}")


def main() -> None:
    """Print the tables: planning, scaling with the number of microbatches, simulation."""
    logging.disable(logging.WARNING)
    print(f"{'schedule':<42}{'lowered steps':>14}{'penstock (s)':>13}{'torch (s)':>11}{'ratio':>8}")
    for instance in INSTANCES:
        t = seconds(instance)
        ratio = t["torch"] / t["penstock"]
        print(f"{instance!s:<42}{t['steps']:>14,.0f}{t['penstock']:>13.3f}{t['torch']:>11.2f}{ratio:>7.1f}x")
        print(
            f"    of which build {t['build']:.3f}, lower {t['lower']:.3f}, "
            f"validate {t['penstock'] - t['build'] - t['lower']:.3f}"
        )
    print(f"\n{'time ratio for twice the microbatches':<42}{'penstock':>10}{'torch':>16}")
    for instance in INSTANCES:
        half = seconds(instance._replace(microbatches=instance.microbatches // 2))
        full = seconds(instance)
        ratios = [full[library] / half[library] for library in ("penstock", "torch")]
        print(f"{instance!s:<42}{ratios[0]:>9.1f}x{ratios[1]:>15.1f}x")
    print(f"\n{'build, lower, validate, simulate':<56}{'penstock (s)':>13}{'torch (s)':>11}{'ratio':>8}")
    for instance in (INSTANCES[0], INSTANCES[2]):
        print_simulation(instance)
    print_rate()


if __name__ == "__main__":
    main()
