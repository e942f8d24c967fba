"""Build, lower, validate and simulate large schedules; torch builds, lowers and dry-runs the same ones.

    python -m benchmarks.plan                  about two minutes; needs the extra `torch`
    python -m benchmarks.plan planning scale   only these; without torch: rates, start, scale

Both run in this process one after the other, several times; the tables have the CPU seconds of the fastest run
of each, which other processes on the machine disturb least. torch validates less (counts and the order per
stage), and its dry run counts unit steps. Penstock checks every rule, proves the absence of deadlock, and
simulates costs and memory. Its compiled loops are loaded before; what that takes is printed by itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import penstock
from penstock import loops
from penstock.simulation.jitter import simulate_with_jitter
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

    def build(self) -> penstock.Schedule:
        """The schedule by Penstock."""
        ranks, stages_per_rank, microbatches = self[2:]
        return penstock.build(
            self.name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
        )

    def torch_built(self) -> Any:
        """The schedule by torch, lowered."""
        from tests.oracles import torch_schedules  # noqa: PLC0415 -- loads torch

        return torch_schedules.built(self.torch_name, self.ranks, self.stages_per_rank, self.microbatches)


INSTANCES = (
    Instance("Interleaved1F1B", "interleaved-1f1b", 32, 4, 512),
    Instance("ZBVZeroBubble", "zbv", 32, 2, 512),
    Instance("InterleavedZeroBubble", "interleaved-zero-bubble", 16, 4, 256),
)
LARGEST = Instance("Interleaved1F1B", "interleaved-1f1b", 256, 8, 1024)
COSTS = penstock.Costs(forward=10, backward_input=11, backward_weight=9, latency=0.5, activation=3)


def fastest(call: Callable[[], object], times: int) -> float:
    """Return the CPU seconds of the fastest of so many runs; none starts after 10 s."""
    best, began = float("inf"), time.process_time()
    for _ in range(times):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
        if time.process_time() - began > 10:
            break
    return best


def planned(instance: Instance) -> None:
    """Build, lower, validate."""
    assert penstock.validate(penstock.lower(instance.build())) == []


def simulated(instance: Instance) -> None:
    """Build, lower, validate, simulate with memory."""
    assert penstock.simulate(penstock.lower(instance.build()), COSTS).peak_memory


def dry_run(instance: Instance) -> None:
    """Build, lower and run torch's simulator."""
    from tests.oracles import torch_schedules  # noqa: PLC0415 -- loads torch

    assert torch_schedules.dry_run(instance.torch_built())


def print_planning() -> None:
    """Compare build, lower and validate to torch's build and lower; and the time for half the microbatches."""
    print(
        f"{'build, lower, validate':<42}{'lowered steps':>14}{'penstock (s)':>13}{'torch (s)':>11}{'ratio':>8}"
    )
    for instance in INSTANCES:
        steps = penstock.lower(instance.build()).num_steps
        build = fastest(instance.build, 7)
        lower = fastest(lambda: penstock.lower(instance.build()), 7) - build  # noqa: B023 -- called at once
        ours, theirs = fastest(lambda: planned(instance), 15), fastest(instance.torch_built, 3)  # noqa: B023
        print(f"{instance!s:<42}{steps:>14,}{ours:>13.3f}{theirs:>11.2f}{theirs / ours:>7.1f}x")
        print(f"    of which build {build:.3f}, lower {lower:.3f}, validate {ours - build - lower:.3f}")
        half = instance._replace(microbatches=instance.microbatches // 2)
        growth = ours / fastest(lambda: planned(half), 15), theirs / fastest(half.torch_built, 2)  # noqa: B023
        print(f"    {growth[0]:.1f} times the seconds for half the microbatches (torch {growth[1]:.1f})")


def print_simulation() -> None:
    """Compare build, lower, validate and simulate with memory to torch's build, lower and dry run."""
    print(f"\n{'build, lower, validate, simulate':<56}{'penstock (s)':>13}{'torch (s)':>11}{'ratio':>8}")
    for instance in INSTANCES:
        ours, theirs = fastest(lambda: simulated(instance), 15), fastest(lambda: dry_run(instance), 2)  # noqa: B023
        print(f"{instance!s:<56}{ours:>13.3f}{theirs:>11.2f}{theirs / ours:>7.1f}x")


def print_rate() -> None:
    """Print simulations per second, of a new schedule each time and of the same schedule again."""
    schedule = penstock.build("zb-h1", ranks=8, microbatches=32)
    simulator = Simulator(schedule, COSTS)
    fresh = fastest(lambda: Simulator(schedule.with_rows(schedule.table.rows), COSTS).run(), 200)
    again = fastest(simulator.run, 200)
    rates = f"{1 / fresh:,.0f} new, {1 / again:,.0f} repeated"
    print(f"simulations per second, p=8 m=32, {schedule.num_steps} steps: {rates}")


def print_builds_and_jitter() -> None:
    """Print the time of families that are built by a loop, and of many runs with jitter."""
    for name in ("v-half", "v-min"):
        build = fastest(lambda: penstock.build(name, ranks=256, microbatches=512), 3)  # noqa: B023 -- called at once
        print(f"build {name}, p=256 m=512: {build:.2f} s")
    for ranks, microbatches, runs in ((8, 32, 1000), (64, 512, 200)):
        schedule = penstock.build("1f1b", ranks=ranks, microbatches=microbatches)
        seconds = fastest(lambda: simulate_with_jitter(schedule, runs=runs), 3)  # noqa: B023 -- called at once
        print(f"{runs:,} runs of 1f1b with jitter, p={ranks} m={microbatches}: {seconds:.2f} s")


def in_a_new_process(call: str) -> Any:
    """What a function of this module returns in a process of its own."""
    code = f"import json; from benchmarks import plan; print(json.dumps(plan.{call}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    return json.loads(done.stdout)


def cold_start(*, compile_loops: bool) -> tuple[float, float]:
    """CPU and wall seconds from the start of the process to the first simulated schedule."""
    loops.COMPILE_AFTER = 0 if compile_loops else sys.maxsize
    start = time.perf_counter()
    simulated(INSTANCES[2])
    return time.process_time(), time.perf_counter() - start


def scale() -> list[float]:
    """The largest schedule: steps, CPU and wall seconds of planning and of simulation, peak memory in GiB."""
    times = [(time.process_time(), time.perf_counter())]
    lowered = penstock.lower(LARGEST.build())
    assert penstock.validate(lowered) == []
    times.append((time.process_time(), time.perf_counter()))
    timeline = penstock.simulate(lowered, COSTS)
    assert timeline.peak_memory
    times.append((time.process_time(), time.perf_counter()))
    a, b, c = times
    return [
        lowered.num_steps,
        b[0] - a[0],
        b[1] - a[1],
        c[0] - b[0],
        c[1] - b[1],
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    ]


def print_scale() -> None:
    """Print the row of the largest schedule."""
    steps, cpu, wall, run_cpu, run_wall, gib = in_a_new_process("scale()")
    print(f"\n{LARGEST!s}, {steps:,.0f} lowered steps, in a new process:")
    print(f"    build, lower, validate   {cpu:6.1f} s of CPU, {wall:.1f} s in all")
    print(f"    simulate, memory         {run_cpu:6.1f} s of CPU, {run_wall:.1f} s in all")
    print(f"    peak memory              {gib:6.1f} GiB")


def print_cold_start() -> None:
    """Print what a new process takes for a small schedule, with plain loops and with compiled ones."""
    print(
        f"\ncold start: a new process that builds, lowers, validates and simulates {INSTANCES[2]}, CPU seconds"
    )
    for text, compile_loops in (("plain loops", False), ("compiled loops, from the cache on disk", True)):
        seconds = min(in_a_new_process(f"cold_start(compile_loops={compile_loops})")[0] for _ in range(2))
        print(f"    {text:<40}{seconds:6.2f}")


PARTS: dict[str, tuple[Callable[[], None], ...]] = {
    "planning": (print_planning,),
    "simulation": (print_simulation,),
    "rates": (print_rate, print_builds_and_jitter),
    "start": (print_cold_start,),
    "scale": (print_scale,),
}
"""What can be measured by itself."""


def main() -> None:
    """Print the tables: planning, simulation, rates, cold start, the largest schedule; or the given ones."""
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"a part is one of {', '.join(PARTS)} (given {unknown[0]})")
    loops.COMPILE_AFTER = 0
    simulated(INSTANCES[0])  # loads the compiled loops
    for part in parts:
        for show in PARTS[part]:
            show()


if __name__ == "__main__":
    main()
