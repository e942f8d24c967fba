"""The work of one rank in a verification: train in a pipeline and compare with the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path

import torch.distributed as dist
from torch import nn

from penstock.errors import BatchError
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.wrappers import split_metadata
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.verification.reference_run import (
    Reference,
    named_parameters,
    optimizer_for,
    relative_error,
)
from penstock.runtime.verification.user_function import Source
from penstock.runtime.verification.user_model import UserModel, load_user_model

__all__ = ["Deviation", "RankErrors", "train_in_pipeline", "worst"]


@dataclass(frozen=True)
class Deviation:
    """The error of one tensor: of a gradient in one step, or of a parameter after all steps."""

    name: str
    stage: int
    step: int
    """The step, from 1."""
    error: float


@dataclass(frozen=True)
class RankErrors:
    """The largest errors on one rank."""

    loss: float
    norm: float
    gradient: Deviation | None
    parameter: Deviation | None
    tolerance: float
    draws: bool
    """Whether the model draws random numbers."""


def worst(deviations: list[Deviation]) -> Deviation | None:
    """The deviation with the largest error."""
    return max(deviations, default=None, key=lambda each: each.error)


def train_in_pipeline(source: Source, schedule: Schedule, steps: int, file: Path) -> RankErrors | None:
    """Train with a schedule and compare with the reference; None on a rank that the schedule does not use."""
    group = _first_ranks(schedule.num_ranks)
    if group is None:
        return None
    user_model = load_user_model(source, schedule.graph)
    reference = Reference(file)
    reference.check_same_model(user_model, group)
    _check_equal_microbatches(user_model, schedule)
    gradients: list[Deviation] = []
    losses, norms = [], []
    with closing(_pipeline(user_model, schedule, group)) as pipeline:
        modules = _modules_by_stage(pipeline, user_model)
        optimizer = optimizer_for(pipeline.parameters())
        for step in range(steps):
            result = pipeline.step(*user_model.args, target=user_model.target, **user_model.kwargs)
            losses.append(relative_error(result.loss, reference.header["losses"][step]))
            norm = float(pipeline.clip_grad_norm_(inf))
            norms.append(relative_error(norm, reference.header["norms"][step]))
            for stage, name, weight in _parameters(modules):
                error = reference.gradient_error(step, name, weight.grad)
                gradients.append(Deviation(name, stage, pipeline.completed_steps, error))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    parameters = [
        Deviation(name, stage, steps, reference.parameter_error(name, weight))
        for stage, name, weight in _parameters(modules)
    ]
    header = reference.header
    return RankErrors(
        max(losses), max(norms), worst(gradients), worst(parameters), header["tolerance"], draws=header["draws"]
    )


def _pipeline(user_model: UserModel, schedule: Schedule, group: dist.ProcessGroup) -> Pipeline:
    stages = user_model.stages(schedule.graph)
    own = split_metadata(stages[0], "stage_graph")
    if schedule.graph.is_chain and own is not None and not own.is_chain:  # a family, and a traced module
        schedule = schedule.over(own)
    return Pipeline(
        stages,
        schedule,
        loss=user_model.losses,
        tokens=user_model.tokens,
        group=group,
    )


def _check_equal_microbatches(user_model: UserModel, schedule: Schedule) -> None:
    rows = None if user_model.tokens is not None else user_model.rows
    if rows is not None and rows % schedule.microbatches:
        raise BatchError(
            f"{rows} rows cannot be split into {schedule.microbatches} microbatches of the same "
            "size, and the mean of their losses would not be that of the batch: change the batch or "
            "--microbatches, or return tokens, a function that counts the tokens of a target"
        )


def _modules_by_stage(pipeline: Pipeline, user_model: UserModel) -> dict[int, nn.ModuleDict]:
    """The modules of this rank and of its losses, with the names that the reference uses."""
    return {
        stage: nn.ModuleDict({"model": user_model.named(stage, module)} | user_model.loss_modules(stage))
        for stage, module in pipeline.modules.items()
    }


def _parameters(modules: Mapping[int, nn.Module]) -> Iterator[tuple[int, str, nn.Parameter]]:
    for stage, module in modules.items():
        for name, weight in named_parameters(module):
            yield stage, name, weight


@cache
def _first_ranks(count: int) -> dist.ProcessGroup | None:
    """A group of the first `count` ranks, None on all others; every rank must call this."""
    group = dist.new_group(list(range(count)))
    return group if dist.get_rank() < count else None
