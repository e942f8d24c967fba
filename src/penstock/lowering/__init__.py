"""Lowering: named passes that turn a compute schedule into one a runtime can execute.

    compute schedule  --add-sharding-->  --add-reduce-grad-->  --add-communication-->  lowered schedule

`split-backward`, `merge-backward`, `recompute`, `offload`, `defer-receives`, `add-send-waits`, `send-budget`
and `add-reduce-waits` are optional passes. `lower(schedule, torch="2.15")` runs the passes of a torch version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.arguments import printable
from penstock.errors import ScheduleError
from penstock.ir.schedule import Schedule, require_schedule
from penstock.lowering.backward import MergeBackward, SplitBackward
from penstock.lowering.communication import AddCommunication, DeferReceives
from penstock.lowering.memory import Offload, Policy, Recompute, parse_policy
from penstock.lowering.passes import Pass
from penstock.lowering.send_budget import SendBudget, smallest_send_budget
from penstock.lowering.sharding import AddGradReduction, AddSharding
from penstock.lowering.waits import AddReduceWaits, AddSendWaits
from penstock.validation import SendModel, invalid_schedule_error, validate, violations_in_lists

__all__ = [
    "DEFAULT_PASSES",
    "TORCH_PASSES",
    "AddCommunication",
    "AddGradReduction",
    "AddReduceWaits",
    "AddSendWaits",
    "AddSharding",
    "DeferReceives",
    "MergeBackward",
    "Offload",
    "Pass",
    "Policy",
    "Recompute",
    "SendBudget",
    "SplitBackward",
    "lower",
    "parse_policy",
    "smallest_send_budget",
]

DEFAULT_PASSES: tuple[Pass, ...] = (AddSharding(), AddGradReduction(), AddCommunication())

_WITH_WAITS = (
    *(AddSharding(oldest_first=True), AddGradReduction(), AddReduceWaits()),
    *(AddCommunication(), AddSendWaits()),
)
TORCH_PASSES: Mapping[str, tuple[Pass, ...]] = {
    "2.13": DEFAULT_PASSES,
    "2.14": DEFAULT_PASSES,
    "2.15": _WITH_WAITS,
}
"""By version of torch: the passes that give the lists that torch's own runtime lowers a schedule to."""


def lower(
    schedule: Schedule,
    passes: Sequence[Pass] | None = None,
    trace: Callable[[str, Schedule], object] | None = None,
    *,
    torch: str | None = None,
) -> Schedule:
    """Run the passes one after another: by default add sharding, gradient reduction and communication.

    With `torch` the result is the list that the runtime of this torch version accepts and would itself make.
    `trace` is called with the name of each pass and the schedule after it. All violations of
    an invalid schedule are raised as one error.
    """
    require_schedule(schedule)
    passes = _passes_of(passes, torch)
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


def _passes_of(passes: Sequence[Pass] | None, torch: str | None) -> Sequence[Pass]:
    if torch is None:
        return DEFAULT_PASSES if passes is None else passes
    if passes is not None:
        raise ScheduleError("passes and torch: give one of the two; torch chooses the passes of a version")
    if torch not in TORCH_PASSES:
        raise ScheduleError(f"torch must be one of {', '.join(TORCH_PASSES)} (given {printable(repr(torch))})")
    return TORCH_PASSES[torch]
