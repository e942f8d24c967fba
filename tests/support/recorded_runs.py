"""Runs that are recorded with torch.profiler: torch's own schedules, and Penstock's runtime, on gloo."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile

import penstock
from penstock.runtime import Pipeline, label_actions
from penstock.runtime.demo.gpt import Block

__all__ = ["MICROBATCHES", "NAP", "V_SHAPED", "record_labelled", "record_ours", "record_torchs"]

NAP = 0.01
MICROBATCHES = 4
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        time.sleep(NAP)
        return gradient.clone()


class Sleeping(nn.Module):
    """F, I and W sleep for one nap each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(NAP)
        output: Tensor = _SlowBackward.apply(x) * _SlowBackward.apply(self.weight)  # type: ignore[no-untyped-call]
        return output


def _stage(kind: str) -> nn.Module:
    return Sleeping() if kind == "sleep" else nn.Sequential(Block(), Block())


def _batch(kind: str) -> tuple[Tensor, Tensor]:
    shape = (MICROBATCHES, 8) if kind == "sleep" else (2 * MICROBATCHES, 64, 256)
    return torch.randn(shape), torch.randn(shape)


def _record(step: Any, path: Path, steps: int) -> list[tuple[float, float]]:
    """Start and end of each step, on the clock of the machine."""
    step()
    times = []
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            times.append((begin, time.perf_counter()))
            dist.barrier()
    recorded.export_chrome_trace(str(path))
    return times


def record_labelled(name: str, kind: str, directory: str) -> list[tuple[float, float]]:
    """One of torch's schedules, with labels of actions."""
    return record_torchs(name, kind, directory, labelled=True)


def record_torchs(
    name: str, kind: str, directory: str, steps: int = 3, *, labelled: bool = False
) -> list[tuple[float, float]]:
    """One of torch's schedules on this rank's stages."""
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    make = getattr(schedules, name)
    single = issubclass(make, schedules.PipelineScheduleSingle)
    count = world if single else 2 * world
    second = count - 1 - rank if name in V_SHAPED else rank + world
    own = [rank] if single else [rank, second]
    stages = [PipelineStage(_stage(kind), index, count, torch.device("cpu")) for index in own]
    if labelled:
        label_actions(*stages)
    schedule = make(stages[0] if single else stages, MICROBATCHES, loss_fn=mse_loss)
    x, target = _batch(kind)
    args = (x,) if 0 in own else ()
    kwargs: Any = {"target": target, "losses": []} if count - 1 in own else {}
    return _record(lambda: schedule.step(*args, **kwargs), Path(directory) / f"rank{rank}.json", steps)


def record_ours(family: str, kind: str, directory: str, steps: int = 3) -> list[tuple[float, float]]:
    """A family on Penstock's runtime."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    schedule = penstock.build(family, ranks=dist.get_world_size(), microbatches=MICROBATCHES)
    stages = [_stage(kind) for _ in schedule.placement.stages_of_rank[rank]]
    x, target = _batch(kind)
    with closing(Pipeline(stages, schedule, loss=mse_loss)) as pipeline:
        path = Path(directory) / f"rank{rank}.json"
        return _record(lambda: pipeline.step(x, target=target), path, steps)
