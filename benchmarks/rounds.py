"""Profiled steps of several schedules, taken in rounds, and the schedules that costs are calibrated from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock import Schedule, Timeline
from penstock.runtime import Pipeline

__all__ = ["half_split", "profiled_rounds"]

_NOT_COUNTED = 2
"""Rounds in which shapes are exchanged and memory is touched first."""


def half_split(family: str, ranks: int, microbatches: int) -> Schedule:
    """A family with B in which every second microbatch has I and W instead, so that all three are measured."""
    plain = penstock.build(family, ranks=ranks, microbatches=microbatches)
    rows = [" ".join(_halves(str(step)) for step in row) for row in plain.ranks]
    return Schedule.parse("\n".join(rows), name=f"half-split {family}")


def _halves(step: str) -> str:
    stage, is_backward, microbatch = step.partition("B")
    if is_backward and int(microbatch) % 2:
        return f"{stage}I{microbatch} {stage}W{microbatch}"
    return step


def profiled_rounds(
    schedules: Mapping[str, Schedule],
    stages_of: Callable[[Schedule], Sequence[nn.Module]],
    batch: Callable[[], tuple[Tensor, Tensor]],
    loss: Callable[..., Any],
    rounds: int,
    order: Sequence[str] = (),
) -> dict[str, list[Timeline]]:
    """The timelines of each schedule.

    In each round every schedule runs once, so that load affects all of them alike. Each round begins with
    another schedule, so that none always runs after the same one. `order` are the schedules of every round
    instead, in which some may run several times.
    """
    found: dict[str, list[Timeline]] = {name: [] for name in schedules}
    with ExitStack() as stack:
        pipelines = {}
        for name, schedule in schedules.items():
            stages = stages_of(schedule)
            own = [stages[stage] for stage in schedule.placement.stages_of_rank[dist.get_rank()]]
            pipelines[name] = stack.enter_context(Pipeline(own, schedule, loss=loss))
            stack.enter_context(pipelines[name].profile())
        names = list(pipelines)
        for number in range(_NOT_COUNTED + rounds):
            first = number % len(names)
            for name in order or names[first:] + names[:first]:
                pipeline, (x, target) = pipelines[name], batch()
                step = pipeline.step(x, target=target)
                for parameter in pipeline.parameters():
                    parameter.grad = None
                assert step.timeline is not None
                if number >= _NOT_COUNTED:
                    found[name].append(step.timeline)
    return found
