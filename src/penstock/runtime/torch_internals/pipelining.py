"""torch.distributed.pipelining: fields of its schedule objects, and the names that the drop-in needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.runtime.torch_internals.registry import Feature

_SCHEDULES = "torch.distributed.pipelining.schedules"
_SCHEDULE = f"{_SCHEDULES}._PipelineSchedule"

RECORDING = Feature("record_state() of torch's schedules", without="states of Penstock's own pipelines")
DROP_IN = Feature("penstock.pipelining", without="penstock.runtime.Pipeline")

RUNTIME_CLASS = "_PipelineScheduleRuntime"
"""The name of torch's class for a list of actions per rank."""

DROP_IN.uses(
    *(
        f"{_SCHEDULES}.{name}"
        for name in (
            "_Action",
            "_ComputationType",
            "_CustomFunctionProtocol",
            "_PipelineContext",
            "_PipelineSchedule._check_inputs",
            "_PipelineSchedule._compute_loss",
            "_PipelineSchedule._has_backward",
            "_PipelineSchedule._internal_losses",
            "_PipelineSchedule._loss_fn",
            "_PipelineSchedule._maybe_compute_loss",
            "_PipelineSchedule._maybe_get_loss",
            "_PipelineSchedule._merge_outputs",
            "_PipelineSchedule._n_microbatches",
            "_PipelineSchedule._output_merge_spec",
            "_PipelineSchedule._split_inputs",
            "_PipelineSchedule._step_microbatches",
            "_PipelineSchedule._update_losses",
            "_PipelineScheduleRuntime._comp_type_to_function_map",
            "_requires_reduce_grad",
            "PipelineScheduleMulti._stages",
            "PipelineScheduleSingle._stage",
        )
    ),
    "torch.distributed.pipelining.microbatch._split_tensor",
    "torch.distributed.pipelining.stage._PipelineStage",
    "torch.distributed.pipelining.stage._PipelineStageBase",
)


@RECORDING.uses(f"{_SCHEDULES}.PipelineScheduleMulti._stages", f"{_SCHEDULES}.PipelineScheduleSingle._stage")
def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of this rank."""
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


microbatches_of: Callable[[Any], int] = RECORDING.field(f"{_SCHEDULE}._n_microbatches")
"""Return the number of microbatches."""

stage_count: Callable[[Any], int] = RECORDING.field(f"{_SCHEDULES}.PipelineScheduleSingle._num_stages")
"""Return the number of stages of a schedule with one stage per rank."""


@RECORDING.uses(f"{_SCHEDULE}._loss_fn", f"{_SCHEDULE}._has_backward")
def is_eval(schedule: Any) -> bool:
    """Return whether the running step of a schedule with a loss has its backward switched off."""
    return schedule._loss_fn is not None and not schedule._has_backward


@RECORDING.uses(f"{_SCHEDULE}._step_microbatches")
def wrap_steps(schedule: Any, run: Callable[..., Any]) -> None:
    """Let a schedule call `run`, with its own function as first argument, for each step."""
    schedule._step_microbatches = partial(run, schedule._step_microbatches, schedule)
