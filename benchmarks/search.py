"""The optimality gap of the search: `python -m benchmarks.search [seconds ...] [--only TEXT]`.

For a fixed set of instances: the gap to the lower bound after 1, 10 and 60 s (or the seconds given), each in a
separate search, and the orders evaluated per second. It prints how long that takes at most, and how long it
took. A gap is an upper limit: a bound can be too low, a value cannot.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from time import perf_counter

from penstock import Costs, Placement
from penstock.cost.presets import preset
from penstock.search import search

__all__ = ["Instance", "instances", "unequal"]

_SMALL = "all with p <= 8 and m <= 32"


@dataclass(frozen=True)
class Instance:
    """A search problem."""

    group: str
    name: str
    placement: Placement
    microbatches: int
    costs: Costs
    memory_limit: float | None
    objective: str = "makespan"


def unequal(kind: str, stages: int, seed: int) -> Costs:
    """Stages of about 100 units: a heavy last or first one, or each random within 50 %."""
    rng = random.Random(seed)  # noqa: S311 -- no secret
    forward = [rng.uniform(50, 150) if kind == "random" else 100.0 for _ in range(stages)]
    if kind == "heavy last":
        forward[-1] = 180.0
    if kind == "heavy first":
        forward[0] = 180.0
    return Costs(
        forward=tuple(forward),
        backward_input=tuple(1.05 * each for each in forward),
        backward_weight=tuple(0.8 * each for each in forward),
        latency=5.0,
        activation=2,
        activation_freed_by_input=1,
    )


def instances() -> Iterator[Instance]:
    """The fixed set."""
    units = Costs(
        forward=10, backward_input=10, backward_weight=8, latency=1, activation=2, activation_freed_by_input=1
    )
    for p, m in ((4, 8), (8, 16), (8, 32)):
        for held in (p, 2 * p):
            yield Instance(
                "equal stages", f"p={p} m={m} room for {held}", Placement.loop(p), m, units, 2 * held
            )
    for name in ("zb-h2304-p8-m24", "zb-h4096-p8-m32"):
        costs = preset(name)
        p, m = 8, int(name.rpartition("m")[2])
        for held in (p, 2 * p):
            limit = held * costs.per_stage("activation", p)[0]
            title = f"{name} room for {held}"
            yield Instance("equal stages", title, Placement.loop(p), m, costs, limit, "span")
    for kind in ("heavy last", "heavy first", "random"):
        for p, v in ((3, 1), (4, 2), (8, 1), (8, 2)):
            costs = unequal(kind, p * v, seed=p * v)
            for placement in (Placement.loop(p, v), Placement.v(p, v))[:v]:
                name = f"{kind} p={p} m={4 * p} v={v} {placement.style}"
                yield Instance("unequal stages", name, placement, 4 * p, costs, None)
                room = f"{name} room for {p * v}"
                yield Instance("unequal stages", room, placement, 4 * p, costs, 2.0 * p * v)
    chunk = Costs(forward=4959, backward_input=5217, backward_weight=3519, latency=213, activation=1)
    for held in (8, 10, 13, 16):
        yield Instance("a V in little memory", f"p=8 m=24 room for {held}", Placement.v(8), 24, chunk, held)
    costs = unequal("random", 32, seed=32)
    for most, name in ((None, ""), (64.0, " room for 32")):
        yield Instance("many microbatches", f"random p=32 m=256{name}", Placement.loop(32), 256, costs, most)
    yield Instance("many microbatches", "V p=8 m=192 room for 10", Placement.v(8), 192, chunk, 10)
    yield Instance("many microbatches", "equal p=128 m=256 v=2", Placement.v(128), 256, units, None)


def main() -> None:
    """Run all instances, or those with a text in their name, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", nargs="*", type=float, default=[1.0, 10.0, 60.0])
    parser.add_argument("--only", default="", help="instances with this text in their name or group")
    arguments = parser.parse_args()
    chosen = [each for each in instances() if arguments.only in f"{each.group} {each.name}"]
    started, most = perf_counter(), len(chosen) * sum(arguments.seconds) / 60
    print(f"{len(chosen)} instances, at most {most:.0f} minutes")
    search(ranks=2, microbatches=2, moves=100)  # compiles
    gaps: dict[tuple[str, float], list[float]] = {}
    print(
        f"{'instance':58}" + "".join(f"{f'gap, {each:g} s':>14}" for each in arguments.seconds) + "   orders/s"
    )
    for instance in chosen:
        cells = ""
        rate = 0.0
        for seconds in arguments.seconds:
            found = search(
                ranks=instance.placement.num_ranks,
                microbatches=instance.microbatches,
                costs=instance.costs,
                placement=instance.placement,
                memory_limit=instance.memory_limit,
                objective=instance.objective,
                seconds=seconds,
            )
            gaps.setdefault((instance.group, seconds), []).append(found.gap)
            if instance.placement.num_ranks <= 8 and instance.microbatches <= 32:
                gaps.setdefault((_SMALL, seconds), []).append(found.gap)
            cells += f"{'proved best' if found.proved else f'{found.gap:.2%}':>14}"
            rate = max(rate, found.runs / found.seconds)
        print(f"{f'{instance.group}: {instance.name}':58}{cells}{rate:11,.0f}", flush=True)
    print()
    for group in dict.fromkeys(group for group, _ in gaps):
        cells = "".join(f"{mean(gaps[group, each]):>14.2%}" for each in arguments.seconds)
        print(f"{f'mean of {group}':58}{cells}")
    print(f"\n{(perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
