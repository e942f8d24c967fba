"""Validation: every fault of a schedule at once, each with its place and what to try.

A rule is one small function from columns (or messages) to violations; a new rule is a new function and a line
in `validate`. Rules on communication, sharding and reduction apply where the schedule has such steps.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.ir.schedule import Schedule
from penstock.validation.communication import Messages, channel_order, delivered_in_time, sent_and_received
from penstock.validation.deadlock import MODELS, no_deadlock
from penstock.validation.report import refusal, report
from penstock.validation.sharding import reduced_once, unsharded_when_used
from penstock.validation.suggestion import way_out
from penstock.validation.violation import Violation, Wait
from penstock.validation.work import complete, known_ids, no_duplicates, order_on_rank, right_rank

__all__ = ["MODELS", "Violation", "Wait", "faults_in_steps", "refusal", "report", "validate"]

_RULES_ON_STEPS = (
    known_ids,
    right_rank,
    no_duplicates,
    complete,
    order_on_rank,
    unsharded_when_used,
    reduced_once,
)
_RULES_ON_MESSAGES = (sent_and_received, delivered_in_time, channel_order)


def validate(schedule: Schedule, sends: str = MODELS[-1]) -> list[Violation]:
    """Every fault of the schedule; an empty list when it is right. Never raises for a bad schedule.

    `sends` is the strictest way of sending to prove it deadlock-free for: `rendezvous` unless said, which
    covers all; `edge-streams` asks for no more than a stream for every ordered pair of ranks.
    """
    if sends not in MODELS:
        raise ScheduleError(f"no way of sending is called {sends!r}; there are {', '.join(MODELS)}")
    models = MODELS[: MODELS.index(sends) + 1]
    return [
        replace(fault, suggestion=way_out(schedule, fault, lambda other: _find_all(other, models)))
        if fault.cycle
        else fault
        for fault in _find_all(schedule, models)
    ]


def _find_all(schedule: Schedule, models: tuple[str, ...]) -> list[Violation]:
    messages = Messages.of(schedule.table)
    found = faults_in_steps(schedule)
    found += [violation for rule in _RULES_ON_MESSAGES for violation in rule(messages)]
    return found + list(no_deadlock(messages, models))


def faults_in_steps(schedule: Schedule) -> list[Violation]:
    """The faults that can be seen in each rank's own list, without following messages between ranks."""
    return [violation for rule in _RULES_ON_STEPS for violation in rule(schedule.table)]
