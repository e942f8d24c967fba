"""Aborts a failed step on this rank: publishes the cause, closes the connection, gives the error to raise."""

from __future__ import annotations

import traceback
from contextlib import suppress

from penstock.errors import PenstockError
from penstock.runtime.execution.connection import Connection
from penstock.runtime.execution.program import Program, StepAbortedError
from penstock.runtime.failure.monitor import FailureCause, FailureMonitor, RankStatus
from penstock.runtime.failure.report import failure_cause, failure_report

__all__ = ["abort_step"]

_STATUS_SECONDS = 1.0  # how long ranks have to publish what they were doing


def abort_step(error: BaseException, connection: Connection, program: Program) -> BaseException:
    """Close all connections after this error; gives the error to raise, with the same text on every rank."""
    monitor = connection.monitor
    if monitor is None:
        return error
    schedules = {mode: each.schedule for mode, each in connection.programs.items()}
    cause = _agreed_cause(error, monitor, connection, program)
    with suppress(RuntimeError):  # the store may be gone by now, but the cause is known
        monitor.publish_status()
    if program.communicates:
        # frames refer to pending messages, which keep the connections open
        traceback.clear_frames(error.__traceback__)
    connection.close()
    statuses: dict[int, RankStatus] = {}
    with suppress(RuntimeError):
        statuses = monitor.statuses(_STATUS_SECONDS)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    if isinstance(error, PenstockError) and not program.started:
        return error
    report = failure_report(cause, statuses, schedules)
    report.__cause__ = error if cause.rank == connection.config.rank and cause.kind == "exception" else None
    return report


def _agreed_cause(
    error: BaseException, monitor: FailureMonitor, connection: Connection, program: Program
) -> FailureCause:
    """The cause that another rank published, or else the failure of this rank."""
    own = failure_cause(error, program, connection.config.rank, connection.step, connection.awaited(program))
    try:
        if isinstance(error, StepAbortedError) or own.kind == "lost":
            published = monitor.wait_for_cause()
            if published is not None:
                return published
        return monitor.publish_cause(own)
    except RuntimeError:
        known = monitor.cause or (own if own.kind == "exception" else None)
        return known or _lost_store(connection.step)


def _lost_store(step: int) -> FailureCause:
    message = (
        "the connection to the job's key-value store broke, so the process that hosts it is gone: rank 0 of "
        "the world, or the agent of torchrun"
    )
    return FailureCause(-1, "lost", step, "", None, None, message, "")
