"""Prediction error of step times: costs from one profiled schedule, simulated for all others, and measured.

    python -m benchmarks.predict [sleep-4] [sleep-8] [compute-2] [family ...] [rounds]

Two schedules are profiled for costs, one for families with one stage per rank, one for those with two: 1F1B and
interleaved 1F1B in which every second microbatch has a split backward, so that B, I and W are measured. Every
family is predicted from one of these profiles, with its jitter.
A profiled step precedes and follows each step of a family, which is predicted from these two: a machine whose
speed changes within seconds changes both. The error is the median over rounds, and so are the predicted and the
measured time. Unless given there are 9 rounds of stages that sleep and 15 of those that compute. Stages that
sleep use no CPU, so that 8 ranks can be measured on fewer cores.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import penstock
from benchmarks import modules
from benchmarks.processes import on_ranks
from benchmarks.rounds import half_split, profiled_rounds
from penstock import Schedule, Timeline
from penstock.ir.kinds import Kind
from penstock.runtime import register_layer
from penstock.simulation.calibration import calibrate, measured_jitter
from penstock.simulation.jitter import simulate_with_jitter

FAMILIES = [name for name in penstock.families() if name != "forward-only"]
PROFILED = {1: "1f1b", 2: "interleaved-1f1b"}
"""By stages per rank."""
MICROBATCHES, LIMIT = 8, 5
SLEEP = 0.010
WIDTH = 256


def predicted(schedule: Schedule, profile: Sequence[Timeline]) -> float:
    """Mean seconds of a step at the costs, and with the jitter, of another schedule's profile."""
    costs, jitter = calibrate(profile), min(measured_jitter(profile), 1.0)
    return simulate_with_jitter(schedule, costs, jitter=jitter).mean


def _forwards(profile: Sequence[Timeline]) -> Iterator[str]:
    """The median F of microbatches with B, which are even, and of those with I and W."""
    found: tuple[list[float], list[float]] = ([], [])
    for event in (event for step in profile for event in step.events):
        (action, *_) = event.step.parts
        if action.kind is Kind.F and action.microbatch is not None:
            found[action.microbatch % 2].append(event.end - event.start)
    for name, seconds in zip(("with B", "with I, W"), found):
        yield f"{name} {1e3 * statistics.median(seconds):.2f} ms"


class Request(NamedTuple):
    """What to measure."""

    families: list[str]
    rounds: int


def compare(
    request: Request, stage: Callable[[int], nn.Module], shape: tuple[int, ...], print_row: Callable[..., None]
) -> None:
    """`stage` makes one of as many stages as given; `shape` is that of a batch."""
    ranks = dist.get_world_size()
    families = {each: penstock.build(each, ranks=ranks, microbatches=MICROBATCHES) for each in request.families}
    groups = {
        half_split(family, ranks, MICROBATCHES): names
        for count, family in PROFILED.items()
        if (names := [name for name, each in families.items() if each.num_stages == count * ranks])
    }
    x = torch.randn(shape, requires_grad=True)  # so that stage 0 computes an input gradient too
    y = torch.randn(shape)
    steps = profiled_rounds(
        families | {profiled.name: profiled for profiled in groups},
        lambda schedule: [stage(schedule.num_stages) for _ in range(schedule.num_stages)],
        lambda: (x, y),
        nn.functional.mse_loss,
        request.rounds,
        [each for profiled, names in groups.items() for each in in_turn(profiled.name, names)],
    )
    if dist.get_rank() == 0:
        print_errors(groups, steps, print_row)


def in_turn(profiled: str, names: list[str]) -> list[str]:
    """The profiled schedule before and after each of the others."""
    return [profiled, *(each for name in names for each in (name, profiled))]


def print_errors(
    groups: Mapping[Schedule, list[str]], steps: Mapping[str, list[Timeline]], print_row: Callable[..., None]
) -> None:
    """A row for each family, and the sum."""
    print_row("schedule", "predicted ms", "measured ms", "error %", "shortest ms", "longest ms")
    errors = []
    for profiled, names in groups.items():
        profile, per_round = steps[profiled.name], len(names) + 1
        for place, name in enumerate(names):
            own, pairs = steps[name], range(place, len(profile), per_round)
            expected = [predicted(step.schedule, profile[at : at + 2]) for at, step in zip(pairs, own)]
            times = [step.makespan for step in own]
            shares = [100 * (one / other - 1) for one, other in zip(expected, times)]
            errors.append(statistics.median(shares))
            middle = (1e3 * statistics.median(each) for each in (expected, times))
            print_row(name, *middle, errors[-1], 1e3 * min(times), 1e3 * max(times))
        print_row(f"F in {profiled.name}", *_forwards(profile))
    within = sum(abs(error) <= LIMIT for error in errors)
    print_row(f"within {LIMIT} %", f"{within} of {len(errors)}", "largest", max(errors, key=abs))


def sleeping(request: Request, print_row: Callable[..., None]) -> None:
    """F = I = W = 10 ms."""
    compare(request, lambda _: modules.Sleeping(SLEEP), (MICROBATCHES, 4), print_row)


def computing(request: Request, print_row: Callable[..., None]) -> None:
    """Eight transformer blocks of width 256, one thread per rank."""

    def stage(stages: int) -> nn.Module:
        return nn.Sequential(*(modules.Block(WIDTH) for _ in range(8 // stages)))

    compare(request, stage, (2 * MICROBATCHES, 64, WIDTH), print_row)


PARTS = {"sleep-4": (sleeping, 4, 9), "sleep-8": (sleeping, 8, 9), "compute-2": (computing, 2, 15)}
"""What to measure, on how many ranks, in how many rounds: steps that compute vary more."""


def run_part(part: str, request: Request, print_row: Callable[..., None]) -> None:
    ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK: sleeps end on time, not up to 50 us later
    register_layer(modules.Sleeping, modules.SleepingRule())
    PARTS[part][0](request, print_row)


def main() -> None:
    families = [each for each in sys.argv[1:] if each in FAMILIES] or FAMILIES
    given = [int(each) for each in sys.argv[1:] if each.isdigit()]
    for part in [each for each in sys.argv[1:] if each in PARTS] or PARTS:
        function, ranks, rounds = PARTS[part]
        print(f"{part} ({ranks} ranks)\n  {function.__doc__}")
        on_ranks(ranks, run_part, part, Request(families, given[0] if given else rounds))


if __name__ == "__main__":
    main()
