"""The schedule of a pipeline, lowered and validated once."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.validation import SendModel, invalid_schedule_error, validate

__all__ = ["VerifiedSchedule", "verify_schedule"]

_PROVIDED = SendModel.EDGE_STREAMS  # of our channels: no message waits for one of another channel


@dataclass(frozen=True)
class VerifiedSchedule:
    """A valid schedule with communication."""

    schedule: Schedule
    safe_with_blocking_sends: bool
    """Whether it has no deadlock even if every send blocks until it is received (`rendezvous`).

    If so, the same holds for its forward-only part: leaving out whole messages removes waits and adds none.
    """


def verify_schedule(schedule: Schedule) -> VerifiedSchedule:
    """Lower the schedule if it has no communication, and raise if it is not valid.

    `lower` raises for an invalid schedule, and the communication that it adds has no deadlock under any send
    model. A schedule with communication is validated under the strictest send model; deadlocks that our
    channels cannot have are not errors.
    """
    if all(kind.is_compute or kind.is_host_copy for kind in schedule.table.kinds):
        return VerifiedSchedule(lower(schedule), safe_with_blocking_sends=True)
    violations = validate(schedule)
    errors = [each for each in violations if not each.send_models or _PROVIDED in each.send_models]
    if errors:
        raise invalid_schedule_error(schedule, errors)
    return VerifiedSchedule(schedule, safe_with_blocking_sends=not violations)
