"""Runtime overhead: Penstock and torch.distributed.pipelining with the same modules in the same processes.

    python -m benchmarks.runtime [sleep] [together] [empty] [alone] [transformer] [split]

Stages that sleep use almost no CPU, so that more ranks than cores can be measured. Times are medians over
steps; the time of a step is that of its slowest rank. Overheads are relative to the simulated makespan.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch import Tensor, nn

import penstock
from benchmarks import modules
from benchmarks.processes import on_ranks, print_row
from benchmarks.split_backward import measure_split
from penstock.runtime import Pipeline, register_layer
from penstock.runtime.session import connection
from penstock.runtime.session.agreement import StepCommit
from penstock.runtime.transport.transport_errors import Pending

STEPS = 7
TORCH_SCHEDULES = {
    "gpipe": torch_pipelining.ScheduleGPipe,
    "1f1b": torch_pipelining.Schedule1F1B,
    "interleaved-1f1b": torch_pipelining.ScheduleInterleaved1F1B,
    "looped-bfs": torch_pipelining.ScheduleLoopedBFS,
    "interleaved-zero-bubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "zbv": torch_pipelining.ScheduleZBVZeroBubble,
    "dualpipev": torch_pipelining.ScheduleDualPipeV,
}
SINGLE = ("gpipe", "1f1b")
Make = Callable[[int], nn.Module]
Table = list[tuple[Any, ...]]


def schedule_of(name: str, ranks: int, microbatches: int) -> penstock.Schedule:
    per_rank = 2 if "interleaved" in name or "looped" in name else None
    return penstock.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)


def penstock_step(
    schedule: penstock.Schedule, make: Callable[[int], nn.Module], x: Tensor, y: Tensor
) -> Callable[[], Any]:
    own = schedule.placement.stages_of_rank[dist.get_rank()]
    pipeline = Pipeline([make(stage) for stage in own], schedule, loss=nn.functional.mse_loss)
    return lambda: pipeline.step(x, target=y)


def torch_step(name: str, schedule: penstock.Schedule, make: Make, x: Tensor, y: Tensor) -> Callable[[], Any]:
    own = schedule.placement.stages_of_rank[dist.get_rank()]
    count, device = schedule.num_stages, torch.device("cpu")
    stages: Any = [torch_pipelining.PipelineStage(make(stage), stage, count, device) for stage in own]
    runner: Any = TORCH_SCHEDULES[name](
        stages[0] if name in SINGLE else stages, schedule.microbatches, loss_fn=nn.functional.mse_loss
    )
    first, last = 0 in own, count - 1 in own
    target = {"target": y} if last else {}

    def step() -> None:
        runner.step(*((x,) if first else ()), losses=[] if last else None, **target)

    return step


def seconds(*runners: Callable[[], Any], steps: int = STEPS) -> list[float]:
    """Return per runner the median over steps of the slowest rank's time. The runners take turns."""
    taken: list[list[float]] = [[] for _ in runners]
    for _ in range(steps + 2):
        for runner, times in zip(runners, taken):
            dist.barrier()
            start = time.perf_counter()
            runner()
            took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times.append(float(took))
    return [statistics.median(times[2:]) for times in taken]


# --- measurements ----------------------------------------------------------------------------------


def sleeping(print_row: Callable[..., None]) -> None:
    """F, I and W sleep 10 ms: overhead of a step over the simulated makespan.

    `of sleeps`: simulated with 10 ms. `of stages`: with the measured time of a stage without a pipeline.
    """
    m, duration = 8, 0.010
    alone = stage_seconds(duration)
    print_row("a stage's F, B in ms", *(1e3 * seconds for seconds in alone))
    columns = "penstock s", "of sleeps", "of stages", "torch s", "of sleeps", "of stages", "torch / penstock"
    print_row("schedule", "simulated s", *columns)
    for name in TORCH_SCHEDULES:
        schedule = schedule_of(name, dist.get_world_size(), m)
        both = costs_of(duration, 2 * duration), costs_of(*alone)
        ideal, own = (penstock.simulate(schedule, costs).makespan for costs in both)
        x = torch.zeros(m, 4, requires_grad=True)  # so that stage 0 computes an input gradient too
        y = torch.zeros(m, 4)
        ours, theirs = seconds(
            penstock_step(schedule, lambda _: modules.Sleeping(duration), x, y),
            torch_step(name, schedule, lambda _: modules.SleepingForTorch(duration), x, y),
        )
        overheads = ([taken, taken / ideal - 1, taken / own - 1] for taken in (ours, theirs))
        print_row(name, ideal, *next(overheads), *next(overheads), theirs / ours)


def stage_seconds(duration: float) -> tuple[float, float]:
    """F and B of a stage that sleeps, without a pipeline: means over the ranks, which all run one."""
    dist.barrier()
    times = torch.tensor(modules.stage_seconds(duration), dtype=torch.float64)
    dist.all_reduce(times)
    forward, backward = (times / dist.get_world_size()).tolist()
    return forward, backward


def costs_of(forward: float, backward: float) -> penstock.Costs:
    """I and W take half of B each."""
    return penstock.Costs(forward=forward, backward_input=backward / 2, backward_weight=backward / 2)


class EarlyReturn(StepCommit):
    """Lets the last stage's rank return before the others have finished: it waits for them a step later."""

    _earlier: tuple[Pending, ...] = ()

    def finish(self, weights: Sequence[float]) -> tuple[float | None, Tensor | None]:
        if self._is_source:
            earlier, self._earlier = self._earlier, tuple(self._pending.values())
            self._pending.clear()
            for work in earlier:
                work.wait()
        return super().finish(weights)


def simulated_ratio(schedule: penstock.Schedule) -> float:
    """The same without noise: the ranks of the first and the last stage decide when the next step starts."""
    timeline = penstock.simulate(schedule, penstock.Costs(forward=1, backward_input=1, backward_weight=1))
    ends = np.split(timeline.end, np.cumsum([len(row) for row in schedule.ranks])[:-1])
    hosts = schedule.placement.stage_to_rank
    return float((timeline.makespan + 1) / (max(ends[hosts[0]].max(), ends[hosts[-1]].max()) + 1))


def together(print_row: Callable[..., None]) -> None:
    """F = I = W = optimizer = 10 ms, six steps in sequence: the cost of ending steps on all ranks together."""
    m, duration, steps = 8, 0.010, 6
    print_row("schedule", "early s", "together s", "together / early", "simulated")
    for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h2", "zbv", "dualpipev"):
        schedule = schedule_of(name, dist.get_world_size(), m)
        x, y = torch.zeros(m, 4, requires_grad=True), torch.zeros(m, 4)
        runners = []
        for exchange in (EarlyReturn, StepCommit):
            with mock.patch.object(connection, "StepCommit", exchange):
                step = penstock_step(schedule, lambda _: modules.Sleeping(duration), x, y)

            def sequence(step: Callable[[], Any] = step) -> None:
                for _ in range(steps):
                    step()
                    time.sleep(duration)

            runners.append(sequence)
        early, ended = (total / steps for total in seconds(*runners, steps=3))
        print_row(name, early, ended, ended / early, simulated_ratio(schedule))


def empty(print_row: Callable[..., None]) -> None:
    """Stages with almost no compute: microseconds per action, with communication."""
    m = 16
    print_row("schedule", "actions", "penstock us", "torch us", "penstock / torch")
    for name in TORCH_SCHEDULES:
        schedule = schedule_of(name, dist.get_world_size(), m)
        actions = max(map(len, penstock.lower(schedule).ranks))
        x, y = torch.zeros(m, 4, requires_grad=True), torch.zeros(m, 4)
        ours, theirs = seconds(
            penstock_step(schedule, lambda _: modules.Scale(), x, y),
            torch_step(name, schedule, lambda _: modules.Scale(), x, y),
            steps=40,
        )
        print_row(name, actions, ours / actions * 1e6, theirs / actions * 1e6, ours / theirs)


def alone(print_row: Callable[..., None]) -> None:
    """The same on one rank, without communication: microseconds per action beyond plain autograd."""
    m = 16
    print_row(
        "schedule",
        "actions",
        "plain autograd us",
        "penstock overhead us",
        "torch overhead us",
        "penstock / torch",
    )
    for name in TORCH_SCHEDULES:
        schedule = schedule_of(name, 1, m)
        actions = max(map(len, penstock.lower(schedule).ranks))
        x, y = torch.zeros(m, 4, requires_grad=True), torch.zeros(m, 4)
        floor, ours, theirs = seconds(
            plain_autograd([modules.Scale() for _ in range(schedule.num_stages)], x, y, m),
            penstock_step(schedule, lambda _: modules.Scale(), x, y),
            torch_step(name, schedule, lambda _: modules.Scale(), x, y),
            steps=100,
        )
        ours, theirs = ours - floor, theirs - floor
        print_row(name, actions, *(each / actions * 1e6 for each in (floor, ours, theirs)), ours / theirs)


def plain_autograd(stages: list[nn.Module], x: Tensor, y: Tensor, m: int) -> Callable[[], Any]:
    """Run forward and backward of each microbatch and stage in turn, and nothing else."""

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


def transformer(print_row: Callable[..., None]) -> None:
    """Eight transformer blocks of width 256, one thread per rank."""
    m, width = 8, 256
    print_row("schedule", "penstock s", "torch s", "torch / penstock")
    for name in TORCH_SCHEDULES:
        schedule = schedule_of(name, dist.get_world_size(), m)
        x, y = torch.randn(m * 2, 64, width), torch.randn(m * 2, 64, width)

        def make(_: int, blocks: int = 8 // schedule.num_stages) -> nn.Module:
            return nn.Sequential(*(modules.Block(width) for _ in range(blocks)))

        ours, theirs = seconds(
            penstock_step(schedule, make, x, y), torch_step(name, schedule, make, x, y), steps=25
        )
        print_row(name, ours, theirs, theirs / ours)


# --- processes -------------------------------------------------------------------------------------

PARTS = {
    "sleep": (sleeping, 4),
    "together": (together, 4),
    "empty": (empty, 4),
    "alone": (alone, 1),
    "transformer": (transformer, 2),
}


def prepare_sleeps() -> None:
    """Let sleeps of this process end on time, and split the backward of stages that sleep."""
    ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK: not up to 50 us later
    register_layer(modules.Sleeping, modules.SleepingRule())


def run_part(part: str, print_row: Callable[..., None]) -> None:
    prepare_sleeps()
    PARTS[part][0](print_row)


def main() -> None:
    for part in sys.argv[1:] or [*PARTS, "split"]:
        if part == "split":
            measure_split(print_row)
            continue
        function, ranks = PARTS[part]
        print(f"{part} ({ranks} ranks)\n  {function.__doc__}")
        on_ranks(ranks, run_part, part)


if __name__ == "__main__":
    main()
