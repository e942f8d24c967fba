"""Pipelines of test cases, and their gradients and states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from penstock.runtime import Pipeline
from tests.support.models import TASKS, Batch
from tests.support.reference import (
    TIMEOUT,
    Case,
    differences,
    gradients_of,
)


def pipeline_of(case: Case, stages: list[nn.Module] | None = None, **options: Any) -> Pipeline:
    task = TASKS[case.task]
    made = task.stages(case.schedule.num_stages, case.dtype) if stages is None else stages
    given = {"loss": task.loss, "tokens": task.tokens, "timeout": TIMEOUT, **options}
    return Pipeline(dict(enumerate(made)), case.schedule, **given)


def batch_of(case: Case, step: int = 0) -> Batch:
    return TASKS[case.task].batch(step, case.schedule.microbatches, case.dtype)


def gradients(pipeline: Pipeline) -> dict[str, Tensor | None]:
    return {
        f"{stage}.{name}": gradient
        for stage, module in pipeline.modules.items()
        for name, gradient in gradients_of(module).items()
    }


def gradient_problems(
    pipeline: Pipeline, stages: Sequence[nn.Module], plain: Sequence[nn.Module], where: str = "", **how: Any
) -> list[str]:
    """How the gradients of this rank's stages differ from those of plain training."""
    return [
        problem
        for stage in pipeline.modules
        for problem in differences(
            f"{where}stage {stage}", gradients_of(stages[stage]), gradients_of(plain[stage]), **how
        )
    ]


def state(pipeline: Pipeline) -> dict[str, Tensor | None]:
    return {
        f"{stage}.{name}": value.clone()
        for stage, module in pipeline.modules.items()
        for name, value in module.state_dict().items()
    }
