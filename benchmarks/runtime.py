"""How well steps are orchestrated: Penstock and torch.distributed.pipelining, same modules, same run.

    python -m benchmarks.runtime [sleep] [empty] [alone] [transformer] [split]

Stages that sleep measure orchestration alone, so more ranks than cores run honestly. Times are medians of
steps, each step as long as its slowest rank; ratios are to torch's, or to what the simulator says.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as rival
from torch import Tensor, nn

import penstock
from benchmarks import modules
from benchmarks.processes import on_ranks, row
from penstock.runtime import Pipeline, register_layer

STEPS = 7
RIVALS = {
    "gpipe": rival.ScheduleGPipe,
    "1f1b": rival.Schedule1F1B,
    "interleaved-1f1b": rival.ScheduleInterleaved1F1B,
    "looped-bfs": rival.ScheduleLoopedBFS,
    "interleaved-zero-bubble": rival.ScheduleInterleavedZeroBubble,
    "zbv": rival.ScheduleZBVZeroBubble,
    "dualpipev": rival.ScheduleDualPipeV,
}
SINGLE = ("gpipe", "1f1b")
Make = Callable[[int], nn.Module]
Table = list[tuple[Any, ...]]


def schedule_of(name: str, ranks: int, microbatches: int) -> penstock.Schedule:
    given = {"stages_per_rank": 2} if "interleaved" in name or "looped" in name else {}
    return penstock.build(name, ranks=ranks, microbatches=microbatches, **given)


def ours(
    schedule: penstock.Schedule, make: Callable[[int], nn.Module], x: Tensor, y: Tensor
) -> Callable[[], Any]:
    own = schedule.placement.stages_of_rank[dist.get_rank()]
    pipeline = Pipeline([make(stage) for stage in own], schedule, loss=nn.functional.mse_loss)
    return lambda: pipeline.step(x, target=y)


def theirs(name: str, schedule: penstock.Schedule, make: Make, x: Tensor, y: Tensor) -> Callable[[], Any]:
    own = schedule.placement.stages_of_rank[dist.get_rank()]
    count, device = schedule.num_stages, torch.device("cpu")
    stages: Any = [rival.PipelineStage(make(stage), stage, count, device) for stage in own]
    runner: Any = RIVALS[name](
        stages[0] if name in SINGLE else stages, schedule.microbatches, loss_fn=nn.functional.mse_loss
    )
    first, last = 0 in own, count - 1 in own
    given = {"target": y} if last else {}

    def step() -> None:
        runner.step(*((x,) if first else ()), losses=[] if last else None, **given)

    return step


def seconds(*runners: Callable[[], Any], steps: int = STEPS) -> list[float]:
    """Of each runner, the median over its steps of the slowest rank. They take turns, step by step."""
    taken: list[list[float]] = [[] for _ in runners]
    for _ in range(steps + 2):
        for runner, times in zip(runners, taken):
            dist.barrier()
            begin = time.perf_counter()
            runner()
            took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times.append(float(took))
    return [statistics.median(times[2:]) for times in taken]


# --- stages that sleep -----------------------------------------------------------------------------


def sleeping(tell: Callable[..., None]) -> None:
    """F = I = W = 10 ms: how much longer than the simulator's makespan a step takes."""
    m, nap = 8, 0.010
    tell("schedule", "simulated", "penstock", "over", "torch", "over", "torch / penstock")
    for name in RIVALS:
        schedule = schedule_of(name, dist.get_world_size(), m)
        costs = penstock.Costs(forward=nap, backward_input=nap, backward_weight=nap)
        ideal = penstock.simulate(schedule, costs).makespan
        x = torch.zeros(m, 4, requires_grad=True)  # so that the first stage has an input gradient too
        y = torch.zeros(m, 4)
        mine, other = seconds(
            ours(schedule, lambda _: modules.Sleeping(nap), x, y),
            theirs(name, schedule, lambda _: modules.SleepingForTorch(nap), x, y),
        )
        tell(name, ideal, mine, mine / ideal - 1, other, other / ideal - 1, other / mine)


def empty(tell: Callable[..., None]) -> None:
    """Stages that do nothing: microseconds for each action, communication and compute."""
    m = 16
    tell("schedule", "actions", "penstock us", "torch us", "penstock / torch")
    for name in RIVALS:
        schedule = schedule_of(name, dist.get_world_size(), m)
        actions = max(map(len, penstock.lower(schedule).ranks))
        x, y = torch.zeros(m, 4, requires_grad=True), torch.zeros(m, 4)
        mine, other = seconds(
            ours(schedule, lambda _: modules.Scale(), x, y),
            theirs(name, schedule, lambda _: modules.Scale(), x, y),
            steps=40,
        )
        tell(name, actions, mine / actions * 1e6, other / actions * 1e6, mine / other)


def alone(tell: Callable[..., None]) -> None:
    """The same on one rank, without messages: microseconds an action takes beyond bare autograd."""
    m = 16
    tell("schedule", "actions", "bare autograd us", "penstock adds us", "torch adds us", "penstock / torch")
    for name in RIVALS:
        schedule = schedule_of(name, 1, m)
        actions = max(map(len, penstock.lower(schedule).ranks))
        x, y = torch.zeros(m, 4, requires_grad=True), torch.zeros(m, 4)
        floor, mine, other = seconds(
            bare([modules.Scale() for _ in range(schedule.num_stages)], x, y, m),
            ours(schedule, lambda _: modules.Scale(), x, y),
            theirs(name, schedule, lambda _: modules.Scale(), x, y),
            steps=100,
        )
        mine, other = mine - floor, other - floor
        tell(name, actions, *(each / actions * 1e6 for each in (floor, mine, other)), mine / other)


def bare(stages: list[nn.Module], x: Tensor, y: Tensor, m: int) -> Callable[[], Any]:
    """Forward and backward, microbatch by microbatch and stage by stage, and nothing else."""

    def step() -> None:
        for rows, target in zip(x.chunk(m), y.chunk(m)):
            ends, value = [], rows
            for stage in stages:
                entered = value if value is rows else value.detach().requires_grad_()
                value = stage(entered)
                ends.append((entered, value))
            loss = nn.functional.mse_loss(value, target)
            torch.autograd.backward(loss, torch.full_like(loss, 1 / m))
            for (entered, _), (_, output) in zip(ends[:0:-1], ends[-2::-1]):
                torch.autograd.backward(output, entered.grad)

    return step


def transformer(tell: Callable[..., None]) -> None:
    """Real compute, one thread a rank."""
    m, width = 8, 256
    tell("schedule", "penstock s", "torch s", "torch / penstock")
    for name in RIVALS:
        schedule = schedule_of(name, dist.get_world_size(), m)
        x, y = torch.randn(m * 2, 64, width), torch.randn(m * 2, 64, width)

        def make(_: int, blocks: int = 8 // schedule.num_stages) -> nn.Module:
            return nn.Sequential(*(modules.Block(width) for _ in range(blocks)))

        mine, other = seconds(ours(schedule, make, x, y), theirs(name, schedule, make, x, y), steps=25)
        tell(name, mine, other, other / mine)


# --- processes -------------------------------------------------------------------------------------

PARTS = {"sleep": (sleeping, 4), "empty": (empty, 4), "alone": (alone, 1), "transformer": (transformer, 2)}


def measured(part: str, tell: Callable[..., None]) -> None:
    ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK: naps end when they should, not up to 50 us later
    register_layer(modules.Sleeping, modules.SleepingRule())
    PARTS[part][0](tell)


def main() -> None:
    for part in sys.argv[1:] or [*PARTS, "split"]:
        if part == "split":
            modules.measure_split(row)
            continue
        function, ranks = PARTS[part]
        print(f"{part} ({ranks} ranks)\n  {function.__doc__}")
        on_ranks(ranks, measured, part)


if __name__ == "__main__":
    main()
