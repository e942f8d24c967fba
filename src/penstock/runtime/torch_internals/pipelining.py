"""torch.distributed.pipelining: fields of its schedule objects, and the names that the drop-in needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.runtime.torch_internals.registry import RELEASE, Feature, members

_SCHEDULES = "torch.distributed.pipelining.schedules"
_SCHEDULE = f"{_SCHEDULES}._PipelineSchedule"

RECORDING = Feature("record_state() of torch's schedules", without="states of Penstock's own pipelines")
DROP_IN = Feature("penstock.pipelining", without="penstock.runtime.Pipeline")

RUNTIME_CLASS = "_PipelineScheduleRuntime"
"""The name of torch's class for a list of actions per rank."""

DROP_IN.uses(
    *members(
        _SCHEDULES,
        "_Action _ComputationType _CustomFunctionProtocol _PipelineContext _requires_reduce_grad"
        " _PipelineScheduleRuntime._comp_type_to_function_map PipelineScheduleMulti._stages"
        " PipelineScheduleSingle._stage",
    ),
    *members(
        _SCHEDULE,
        "_check_inputs _compute_loss _has_backward _internal_losses _loss_fn _maybe_compute_loss"
        " _maybe_get_loss _merge_outputs _n_microbatches _output_merge_spec _split_inputs _step_microbatches"
        " _update_losses",
    ),
    "torch.distributed.pipelining.microbatch._split_tensor",
    "torch.distributed.pipelining.stage._PipelineStage",
    "torch.distributed.pipelining.stage._PipelineStageBase",
)
if RELEASE >= (2, 15):
    DROP_IN.uses(
        *members(
            f"{_SCHEDULES}._PipelineScheduleRuntime",
            "_defer_reduce_grad_wait _max_active_stages _unshard_lookahead"
            " _validate_deferred_gradient_reduction",
        ),
        *members(
            "torch.distributed.pipelining.stage._PipelineStageBase",
            "_call_with_forward_context _forward_contexts",
        ),
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
