"""Aborts a failed step on this rank: publishes the cause, closes the connection, gives the error to raise."""

from __future__ import annotations

import traceback
from dataclasses import replace

from penstock.errors import PenstockError
from penstock.runtime.failure.monitor import FailureCause, FailureMonitor
from penstock.runtime.failure.report import failure_cause, failure_report
from penstock.runtime.program.program import Program, StepAbortedError
from penstock.runtime.session.connection import Connection
from penstock.runtime.transport.transport_errors import TransportError, is_transport_error

_RACE_SECONDS = 0.25
_BROKEN_SECONDS = 2.5


def abort_step(error: BaseException, connection: Connection, program: Program) -> BaseException:
    """Close all connections after this error; gives the error to raise, with the same text on every rank."""
    monitor = connection.monitor
    if monitor is None:
        return error
    schedules = {mode: each.schedule for mode, each in connection.programs.items()}
    monitor.handled()
    own = failure_cause(error, program, connection.config.rank, connection.status())
    cause = _cause(error, own, monitor)
    if program.communicates:
        traceback.clear_frames(error.__traceback__)  # frames refer to pending messages
    connection.abort()
    settled, statuses = monitor.settled()
    connection.close()
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    if isinstance(error, PenstockError) and not program.started:
        return error
    cause = settled or cause
    if cause.process:  # it may have ended before this call
        cause = replace(cause, call=connection.call)
    report = failure_report(cause, statuses, schedules, monitor.members, monitor.ended())
    is_own = cause.reporter == monitor.watch.rank and cause.kind == "exception"
    report.__cause__ = error if is_own else None
    return report


def race_seconds(error: BaseException) -> float:
    """How long an error of a stage waits for the failure elsewhere that it may follow from.

    A connection that breaks in a collective of the stage (of FSDP or tensor parallelism) always follows from
    one, which a busy machine may tell later. An error of the pipeline's own messages is a timeout here.
    """
    if is_transport_error(error) and not isinstance(error, TransportError):
        return _BROKEN_SECONDS
    return _RACE_SECONDS if isinstance(error, RuntimeError | OSError) else 0.0


def _cause(error: BaseException, own: FailureCause, monitor: FailureMonitor) -> FailureCause:
    """The cause that is known already, or else the failure of this rank."""
    if isinstance(error, StepAbortedError) or own.kind == "lost":
        known = monitor.wait_for_cause() or monitor.missed_cause()
    else:
        known = monitor.wait_for_cause(race_seconds(error))
    if known is not None:
        return known
    return monitor.publish_cause(monitor.blamed(own) if own.kind in ("lost", "timeout") else own)
