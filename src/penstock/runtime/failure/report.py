"""The report of a failed step: who, where, why, and what every rank was doing, the same on all ranks."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

from penstock.errors import StepFailedError
from penstock.ir.schedule import Schedule
from penstock.runtime.execution.program import Program
from penstock.runtime.failure.watch import Cause, Status

__all__ = ["cause_of", "failed"]

_AROUND = 3  # steps shown before and after the one at hand


def cause_of(error: BaseException, program: Program, rank: int, step: int, waits_for: str) -> Cause:
    """What went wrong on this rank; `waits_for` says which message it was about, if it was about one."""
    place = program.place
    at = program.steps[place] if place >= 0 else None
    part = at.parts[program.part] if at is not None else None
    kind, message, details = "exception", _last_line(error), _traceback(error)
    if isinstance(error, KeyboardInterrupt):
        kind, message, details = "interrupted", "KeyboardInterrupt", ""
    elif isinstance(error, RuntimeError) and (program.communicates or (at is None and waits_for)):
        late = "Timed out" in message
        kind, details = ("timeout", "") if late else ("lost", "")
        why = "it did not come in time" if late else "the connection broke: that process is gone"
        waited = "had done all its steps and waited" if program.finished else f"waited in {at}"
        if at is None:
            waited = "waited before its first action"
        message = f"rank {rank} {waited} for {waits_for}, and {why}"
    stage, microbatch = (None, None) if part is None else (part.stage, part.microbatch)
    return Cause(rank, kind, step, "" if at is None else str(at), stage, microbatch, message, details)


def _last_line(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # noqa: BLE001 -- an exception may have any __str__
        return type(error).__name__


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 -- an exception may have any __str__
        return "".join(traceback.format_tb(error.__traceback__))


def failed(cause: Cause, statuses: Mapping[int, Status], schedules: Mapping[str, Schedule]) -> StepFailedError:
    """The error that every rank raises."""
    lines = [f"step {cause.step} failed{_where(cause)}", f"  {cause.message}"]
    if statuses:
        lines += ["  what each rank was doing:", *(f"    {line}" for line in _grid(cause, statuses, schedules))]
    if cause.details:
        lines += [f"  traceback on rank {cause.rank}:", *(f"    {line}" for line in cause.details.splitlines())]
    rank = None if cause.rank < 0 else cause.rank
    given = (cause.action or None, cause.stage, cause.microbatch, cause.kind, cause.details)
    return StepFailedError("\n".join(lines), rank, *given)


def _where(cause: Cause) -> str:
    if cause.rank < 0:
        return ""
    if cause.kind == "timeout":
        return f": rank {cause.rank} waited too long"
    if cause.kind == "lost":
        return f": rank {cause.rank} lost the connection to another"
    if cause.stage is None:
        return f" on rank {cause.rank}, before its first action"
    microbatch = "" if cause.microbatch is None else f", microbatch {cause.microbatch}"
    return f" on rank {cause.rank}, stage {cause.stage}{microbatch}, in {cause.action}"


def _grid(cause: Cause, statuses: Mapping[int, Status], schedules: Mapping[str, Schedule]) -> list[str]:
    """A line for each rank: the steps around the one at hand, which stands in brackets."""
    modes = {status.mode for status in statuses.values()} - {"outside"}
    lines = []
    for rank in range(schedules["step"].num_ranks):
        status = statuses.get(rank)
        if status is None:
            lines.append(f"rank {rank}   does not answer")
            continue
        if status.mode == "outside":
            lines.append(f"rank {rank}   is in neither step nor eval, after step {status.step}")
            continue
        which = "" if status.step == cause.step else f"already in step {status.step}: "
        mode = f"in {status.mode}: " if len(modes) > 1 else ""
        row = schedules[status.mode].ranks[rank]
        lines.append(f"rank {rank}   {which}{mode}{_excerpt(row, status.place)}{_note(rank, cause, status)}")
    return lines


def _note(rank: int, cause: Cause, status: Status) -> str:
    if rank == cause.rank and cause.kind in ("exception", "interrupted"):
        return "   <-- here"
    if status.waits:
        return f"   waits for {status.waits}"
    return "   is computing" if cause.kind == "timeout" else ""


def _excerpt(row: tuple[object, ...], place: int) -> str:
    if place < 0:
        return "[about to begin] " + " ".join(map(str, row[:_AROUND])) + " ..." * (len(row) > _AROUND)
    first, last = max(place - _AROUND, 0), place + _AROUND + 1
    cells = [f"[{step}]" if first + i == place else str(step) for i, step in enumerate(row[first:last])]
    return "... " * (first > 0) + " ".join(cells) + " ..." * (last < len(row))
