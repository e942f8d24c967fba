"""How well a step's time is predicted: simulated at calibrated costs, against what was measured.

    python -m benchmarks.predict [sleep-4] [sleep-8] [compute-2]

Of the profiled steps, ordered by length, every second tells the costs (`penstock.simulation.calibration`), and
the others are what the prediction is compared with: so a busy machine disturbs both alike. Times are means.
Stages that sleep take no processor, so that 4 and 8 ranks are measured honestly on fewer cores.
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
from penstock.simulation.calibration import calibrated
from penstock.simulation.timeline import Timeline

FAMILIES = [name for name in penstock.families() if name != "forward-only"]
NAP = 0.010
WIDTH = 256


def profiled(schedule: penstock.Schedule, stages: list[nn.Module], shape: tuple[int, ...]) -> list[Timeline]:
    """Steps after the first two, which learn the shapes, the shortest first."""
    x, y = torch.randn(shape, requires_grad=True), torch.randn(shape)  # so that stage 0 has an I too
    with Pipeline(stages, schedule, loss=nn.functional.mse_loss) as pipeline, pipeline.profile() as profile:
        for _ in range(14):
            pipeline.step(x, target=y)
            for parameter in pipeline.parameters():
                parameter.grad = None
    return sorted(profile.timelines[2:], key=lambda step: step.makespan)


def compared(
    make: Callable[[int], nn.Module], m: int, rows: tuple[int, ...], tell: Callable[..., None]
) -> None:
    tell("schedule", "predicted ms", "measured ms", "error %")
    errors = []
    for name in FAMILIES:
        schedule = penstock.build(name, ranks=dist.get_world_size(), microbatches=m)
        own = schedule.placement.stages_of_rank[dist.get_rank()]
        steps = profiled(schedule, [make(schedule.num_stages) for _ in own], (m * rows[0], *rows[1:]))
        predicted = penstock.simulate(steps[0].schedule, calibrated(steps[::2])).makespan
        measured = statistics.fmean(step.makespan for step in steps[1::2])
        errors.append(100 * (predicted / measured - 1))
        tell(name, predicted * 1e3, measured * 1e3, errors[-1])
    tell("largest", "", "", max(errors, key=abs))


def sleeping(tell: Callable[..., None]) -> None:
    """F = I = W = 10 ms."""
    compared(lambda _: modules.Sleeping(NAP), 8, (1, 4), tell)


def computing(tell: Callable[..., None]) -> None:
    """Eight transformer blocks of width 256, one thread a rank."""

    def make(stages: int) -> nn.Module:
        return nn.Sequential(*(modules.Block(WIDTH) for _ in range(8 // stages)))

    compared(make, 8, (2, 64, WIDTH), tell)


PARTS = {"sleep-4": (sleeping, 4), "sleep-8": (sleeping, 8), "compute-2": (computing, 2)}


def measured(part: str, tell: Callable[..., None]) -> None:
    ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK: naps end when they should, not up to 50 us later
    register_layer(modules.Sleeping, modules.SleepingRule())
    PARTS[part][0](tell)


def main() -> None:
    for part in sys.argv[1:] or PARTS:
        function, ranks = PARTS[part]
        print(f"{part} ({ranks} ranks)\n  {function.__doc__}")
        on_ranks(ranks, measured, part)


if __name__ == "__main__":
    main()
