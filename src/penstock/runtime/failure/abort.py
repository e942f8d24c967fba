"""What a rank does when its step failed: it tells the others why, hangs up, and gives the error to raise."""

from __future__ import annotations

import traceback
from contextlib import suppress

from penstock.errors import PenstockError
from penstock.runtime.execution.connections import Wiring
from penstock.runtime.execution.program import Program, StoppedError
from penstock.runtime.failure.report import cause_of, failed
from penstock.runtime.failure.watch import Cause, Status

__all__ = ["hang_up"]

_TELL_WITHIN = 1.0  # seconds that ranks have to say what they were doing


def hang_up(error: BaseException, wiring: Wiring, program: Program) -> BaseException:
    """Close all connections after this error; on every rank the result says the same."""
    watch = wiring.watch
    if watch is None:
        return error
    schedules = {mode: each.schedule for mode, each in wiring.programs.items()}
    cause = _cause(error, wiring, program)
    with suppress(RuntimeError):  # the store may be gone by now, but the cause is known
        watch.tell_status()
    if program.communicates:
        # frames hold on to messages, and those to the connections
        traceback.clear_frames(error.__traceback__)
    wiring.close()
    statuses: dict[int, Status] = {}
    with suppress(RuntimeError):
        statuses = watch.statuses(_TELL_WITHIN)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    if isinstance(error, PenstockError) and program.at < 0:
        return error
    report = failed(cause, statuses, schedules)
    if cause.rank == wiring.plan.rank and cause.kind == "exception":
        report.__cause__ = error
    return report


def _cause(error: BaseException, wiring: Wiring, program: Program) -> Cause:
    """What somebody wrote down, or what went wrong here."""
    watch = wiring.watch
    assert watch is not None
    mine = cause_of(error, program, wiring.plan.rank, wiring.step, wiring.waits_for(program))
    try:
        if isinstance(error, StoppedError) or mine.kind == "lost":
            found = watch.wait_for_cause()
            if found is not None:
                return found
        return watch.tell(mine)
    except RuntimeError:
        known = watch.cause or (mine if mine.kind == "exception" else None)
        return known or _lost_store(wiring.step)


def _lost_store(step: int) -> Cause:
    message = (
        "the connection to the job's key-value store broke, so the process that hosts it is gone: rank 0 of "
        "the world, or the agent of torchrun"
    )
    return Cause(-1, "lost", step, "", None, None, message, "")
