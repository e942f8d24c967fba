"""torchtitan's `pipeline_llm` on Penstock's runtime: give it to a `TrainSpec` in place of torchtitan's own.

torchtitan splits the model and applies its other parallelisms; Penstock builds the schedule by its name, or
from the CSV, and runs it. A CSV may have any order with the placement that torchtitan derives from the name
(`penstock export torchtitan` chooses the name).
"""

# ruff: noqa: SLF001, ANN401 -- torch's private names; torchtitan has no types

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from penstock.errors import MissingExtraError, PipelineError
from penstock.pipelining import schedules


def pipeline_llm(
    model: Any,
    parallel_dims: Any,
    job_config: Any,
    device: Any,
    model_args: Any,
    parallelize_fn: Any,
    loss_fn: Any,
) -> tuple[schedules._PipelineSchedule, list[Any], bool, bool]:
    """The schedule, the model parts, and whether this rank has the first and the last stage."""
    try:
        from torchtitan.distributed import pipeline_parallel  # noqa: PLC0415 -- optional
    except ImportError as error:
        raise MissingExtraError(f"this function needs torchtitan: pip install torchtitan ({error})") from error
    _check_overlap(parallel_dims, job_config)
    without_csv = copy.copy(job_config)
    without_csv.parallelism = dataclasses.replace(job_config.parallelism, pipeline_parallel_schedule_csv="")
    built, parts, has_first, has_last = pipeline_parallel.pipeline_llm(
        model, parallel_dims, without_csv, device, model_args, parallelize_fn, loss_fn
    )
    return _on_our_runtime(built, job_config.parallelism, loss_fn), parts, has_first, has_last


def _on_our_runtime(built: Any, settings: Any, loss_fn: Any) -> schedules._PipelineSchedule:
    """The schedule of these settings over the stages of torch's schedule."""
    stages = built._stages if hasattr(built, "_stages") else [built._stage]
    csv = settings.pipeline_parallel_schedule_csv
    kind: Any = (
        schedules._PipelineScheduleRuntime
        if csv
        else schedules.get_schedule_class(settings.pipeline_parallel_schedule)
    )
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    schedule: schedules._PipelineSchedule = kind(
        stages if several else stages[0], built._n_microbatches, loss_fn=loss_fn, scale_grads=False
    )
    if csv:
        schedule._load_csv(csv)  # type: ignore[attr-defined]
    return schedule


def _check_overlap(parallel_dims: Any, job_config: Any) -> None:
    settings = job_config.parallelism
    wanted = settings.pipeline_parallel_expert_parallel_overlap and parallel_dims.ep > 1
    if (
        wanted
        and schedules.get_schedule_class(settings.pipeline_parallel_schedule) is schedules.ScheduleDualPipeV
    ):
        raise PipelineError(
            "torchtitan's overlap of expert-parallel communication is code for torch's runtime: set "
            "parallelism.pipeline_parallel_expert_parallel_overlap = false"
        )
