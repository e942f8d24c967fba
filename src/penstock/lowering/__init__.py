"""Lowering: named passes that turn a compute schedule into one a runtime can execute.

    compute schedule  --add-sharding-->  --add-reduce-grad-->  --add-communication-->  lowered schedule

`split-backward`, `merge-backward`, `recompute`, `offload` and `defer-receives` are optional passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.ir.schedule import Schedule, require_schedule
from penstock.lowering.backward import MergeBackward, SplitBackward
from penstock.lowering.communication import AddCommunication, DeferReceives
from penstock.lowering.memory import Offload, Policy, Recompute, parse_policy
from penstock.lowering.passes import Pass
from penstock.lowering.sharding import AddGradReduction, AddSharding
from penstock.validation import SendModel, invalid_schedule_error, validate, violations_in_lists

__all__ = [
    "DEFAULT_PASSES",
    "AddCommunication",
    "AddGradReduction",
    "AddSharding",
    "DeferReceives",
    "MergeBackward",
    "Offload",
    "Pass",
    "Policy",
    "Recompute",
    "SplitBackward",
    "lower",
    "parse_policy",
]

DEFAULT_PASSES: tuple[Pass, ...] = (AddSharding(), AddGradReduction(), AddCommunication())


def lower(
    schedule: Schedule,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    trace: Callable[[str, Schedule], object] | None = None,
) -> Schedule:
    """Run the passes one after another: by default add sharding, gradient reduction and communication.

    `trace` is called with the name of each pass and the schedule after it. All violations of
    an invalid schedule are raised as one error.
    """
    require_schedule(schedule)
    # add-communication finds a deadlock itself, so it is not searched for twice
    found_later = not schedule.table.has_communication and AddCommunication() in passes
    violations = violations_in_lists(schedule) if found_later else validate(schedule, SendModel.EDGE_STREAMS)
    if violations:
        raise invalid_schedule_error(schedule, violations)
    for step in passes:
        schedule = step(schedule)
        if trace is not None:
            trace(step.name, schedule)
    return schedule
