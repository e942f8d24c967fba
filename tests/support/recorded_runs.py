"""Runs that are recorded with torch.profiler: torch's own schedules, and Penstock's runtime, on gloo."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile, record_function

import penstock
from penstock.runtime import Pipeline, label_actions
from penstock.runtime.demo import Block

__all__ = [
    "MICROBATCHES",
    "NAP",
    "V_SHAPED",
    "action_ranges",
    "record_labelled",
    "record_ours",
    "record_torchs",
    "step_ranges",
]

STEP = "training step"
NAP = 0.03
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


def _record(steps: Sequence[Callable[[], object]], path: Path, rounds: int) -> None:
    """Record rounds of these steps, each in its range; the first of each allocates, and is left out."""
    for step in steps:
        step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for step in list(steps) * rounds:
            with record_function(STEP):
                step()
            dist.barrier()
    recorded.export_chrome_trace(str(path))


def step_ranges(path: Path) -> list[tuple[int, int]]:
    """Start and end of each recorded step on this rank, in nanoseconds."""
    return [times for name, times in _ranges(path) if name == STEP]


def action_ranges(path: Path) -> list[tuple[int, int]]:
    """Of each recorded action, whatever it is."""
    return [times for name, times in _ranges(path) if name.startswith(("PP:", "Forward ", "Backward "))]


def _ranges(path: Path) -> list[tuple[str, tuple[int, int]]]:
    content = json.loads(path.read_text())
    base = content.get("baseTimeNanoseconds", 0)
    events = [each for each in content["traceEvents"] if each.get("cat") == "user_annotation"]
    found = [(each["name"], round(each["ts"] * 1000) + base, round(each["dur"] * 1000)) for each in events]
    return [(name, (start, start + length)) for name, start, length in sorted(found, key=lambda each: each[1])]


def record_labelled(name: str, kind: str, directory: str) -> None:
    """One of torch's schedules, with labels of actions."""
    record_torchs([name], kind, directory, labelled=True)


def record_torchs(
    names: Sequence[str], kind: str, directory: str, rounds: int = 3, *, labelled: bool = False
) -> list[list[str]]:
    """Torch's schedules in turns; returns the actions of each that torch's runtime goes through on this rank.

    Torch's GPipe and 1F1B have no list of actions: theirs are empty.
    """
    torch.set_num_threads(1)
    made = [_torchs(name, kind, labelled=labelled) for name in names]
    _record([step for step, _ in made], Path(directory) / f"rank{dist.get_rank()}.json", rounds)
    orders = [getattr(schedule, "pipeline_order_with_comms", None) for _, schedule in made]
    return [[] if order is None else list(map(str, order[dist.get_rank()])) for order in orders]


def _torchs(name: str, kind: str, *, labelled: bool) -> tuple[Callable[[], object], Any]:
    """A step of one of torch's schedules, and the schedule."""
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
    return lambda: schedule.step(*args, **kwargs), schedule


def record_ours(family: str, kind: str, directory: str, rounds: int = 3) -> list[list[str]]:
    """A family on Penstock's runtime; returns this rank's list without collectives: they do nothing."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    schedule = penstock.build(family, ranks=dist.get_world_size(), microbatches=MICROBATCHES)
    stages = [_stage(kind) for _ in schedule.placement.stages_of_rank[rank]]
    x, target = _batch(kind)
    with closing(Pipeline(stages, schedule, loss=mse_loss)) as pipeline:
        path = Path(directory) / f"rank{rank}.json"
        _record([lambda: pipeline.step(x, target=target)], path, rounds)
        return [[str(step) for step in pipeline.schedule.ranks[rank] if not step.kind.is_collective]]
