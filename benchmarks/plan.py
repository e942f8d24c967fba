"""Build, lower and validate large schedules, beside torch's constructors, which build and lower.

    python -m benchmarks.plan            about two minutes; needs the extra `torch`

Both run in this process, one after the other, each several times; the best of each is taken. torch validates
less in its time (counts and per-stage order), Penstock proves every rule and the absence of deadlock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.oracles import torch_schedules

import penstock


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


def main() -> None:
    """Print the table, then how both grow with the number of microbatches."""
    logging.disable(logging.INFO)
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


if __name__ == "__main__":
    main()
