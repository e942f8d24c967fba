"""Prediction error of step times: simulated at calibrated costs, compared with measured steps.

    python -m benchmarks.predict [sleep-4] [sleep-8] [compute-2]

The profiled steps are sorted by duration. Every second step calibrates the costs
(`penstock.simulation.calibration`), and the prediction is compared with the others, so that load on the machine
affects both. Times are means. Stages that sleep use no CPU, so that 8 ranks can be measured on fewer cores.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import penstock
from benchmarks import modules
from benchmarks.processes import on_ranks
from penstock.runtime import Pipeline, register_layer
from penstock.simulation.calibration import calibrate
from penstock.simulation.timeline import Timeline

FAMILIES = [name for name in penstock.families() if name != "forward-only"]
SLEEP = 0.010
WIDTH = 256


def profiled(schedule: penstock.Schedule, stages: list[nn.Module], shape: tuple[int, ...]) -> list[Timeline]:
    """Profile steps, shortest first, without the first two, in which shapes are exchanged."""
    x, y = (
        torch.randn(shape, requires_grad=True),
        torch.randn(shape),
    )  # so that stage 0 computes an input gradient too
    with Pipeline(stages, schedule, loss=nn.functional.mse_loss) as pipeline, pipeline.profile() as profile:
        for _ in range(14):
            pipeline.step(x, target=y)
            for parameter in pipeline.parameters():
                parameter.grad = None
    return sorted(profile.timelines[2:], key=lambda step: step.makespan)


def compare(
    make: Callable[[int], nn.Module], m: int, rows: tuple[int, ...], print_row: Callable[..., None]
) -> None:
    print_row("schedule", "predicted ms", "measured ms", "error %")
    errors = []
    for name in FAMILIES:
        schedule = penstock.build(name, ranks=dist.get_world_size(), microbatches=m)
        own = schedule.placement.stages_of_rank[dist.get_rank()]
        steps = profiled(schedule, [make(schedule.num_stages) for _ in own], (m * rows[0], *rows[1:]))
        predicted = penstock.simulate(steps[0].schedule, calibrate(steps[::2])).makespan
        measured = statistics.fmean(step.makespan for step in steps[1::2])
        errors.append(100 * (predicted / measured - 1))
        print_row(name, predicted * 1e3, measured * 1e3, errors[-1])
    print_row("largest error", "", "", max(errors, key=abs))


def sleeping(print_row: Callable[..., None]) -> None:
    """F = I = W = 10 ms."""
    compare(lambda _: modules.Sleeping(SLEEP), 8, (1, 4), print_row)


def computing(print_row: Callable[..., None]) -> None:
    """Eight transformer blocks of width 256, one thread per rank."""

    def make(stages: int) -> nn.Module:
        return nn.Sequential(*(modules.Block(WIDTH) for _ in range(8 // stages)))

    compare(make, 8, (2, 64, WIDTH), print_row)


PARTS = {"sleep-4": (sleeping, 4), "sleep-8": (sleeping, 8), "compute-2": (computing, 2)}


def run_part(part: str, print_row: Callable[..., None]) -> None:
    ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK: sleeps end on time, not up to 50 us later
    register_layer(modules.Sleeping, modules.SleepingRule())
    PARTS[part][0](print_row)


def main() -> None:
    for part in sys.argv[1:] or PARTS:
        function, ranks = PARTS[part]
        print(f"{part} ({ranks} ranks)\n  {function.__doc__}")
        on_ranks(ranks, run_part, part)


if __name__ == "__main__":
    main()
