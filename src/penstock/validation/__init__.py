"""Validation: every violation of a schedule at once, each with its place and what to try.

A rule is one small function from the action table (or the messages) to violations; a new rule is a new function
and a line in `validate`. Rules on communication, sharding, reduction and memory apply where the schedule has
such actions.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.ir.kinds import MEMORY_KINDS, SEND_WAITS, Kind
from penstock.ir.schedule import Schedule, require_schedule
from penstock.validation.deadlock import no_deadlock, suggested_move
from penstock.validation.rules import (
    channel_order,
    complete,
    delivered_in_time,
    held_when_offloaded,
    ids_in_range,
    needed_by_a_backward,
    no_duplicates,
    on_rank_of_stage,
    order_on_rank,
    reduced_once,
    reductions_waited_for,
    reloaded_once,
    sends_waited_for,
    sent_and_received,
    unsharded_when_used,
)
from penstock.validation.send_model import SendModel
from penstock.validation.violation import Violation, Violations, Wait, invalid_schedule_error, report

__all__ = [
    "SendModel",
    "Violation",
    "Violations",
    "Wait",
    "invalid_schedule_error",
    "report",
    "validate",
    "violations_in_lists",
]

_RULES_ON_ACTIONS = (
    ids_in_range,
    on_rank_of_stage,
    no_duplicates,
    complete,
    order_on_rank,
    unsharded_when_used,
    reduced_once,
    reductions_waited_for,
    needed_by_a_backward,
    reloaded_once,
    held_when_offloaded,
)
_RULES_ON_MESSAGES = (sent_and_received, delivered_in_time, channel_order, sends_waited_for)
_HANDLED = frozenset(
    {
        *(Kind.F, Kind.I, Kind.W, Kind.B, Kind.OVERLAP_F_B),
        *(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, *SEND_WAITS),
        *(Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD, Kind.WAIT_REDUCE_GRAD),
        *MEMORY_KINDS,
    }
)


def validate(schedule: Schedule, send_model: SendModel | str = SendModel.RENDEZVOUS) -> Violations:
    """Every violation of the schedule; an empty list when it is valid. Never raises for an invalid schedule.

    `send_model` is the strictest send model to prove it deadlock-free for: `rendezvous` unless given, which
    covers all; `edge-streams` asks for no more than a stream for every ordered pair of ranks.
    """
    require_schedule(schedule)
    model = SendModel.of(send_model)
    found = (
        replace(each, suggestion=suggested_move(schedule, each, lambda other: _all_violations(other, model)))
        if each.cycle
        else each
        for each in _all_violations(schedule, model)
    )
    return Violations(found, schedule, model)


def _all_violations(schedule: Schedule, model: SendModel) -> list[Violation]:
    found = violations_in_lists(schedule)
    found += [violation for rule in _RULES_ON_MESSAGES for violation in rule(schedule.messages)]
    return found + list(no_deadlock(schedule.messages, model))


def violations_in_lists(schedule: Schedule) -> list[Violation]:
    """The violations that can be seen in each rank's own list, without following messages between ranks."""
    schedule.table.require_handled(_HANDLED, "validation")
    return [violation for rule in _RULES_ON_ACTIONS for violation in rule(schedule.table)]
