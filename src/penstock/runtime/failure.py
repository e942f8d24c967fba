"""The report of a failed step: who, where, why, and what every rank was doing, the same on all ranks."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

from penstock.errors import StepFailedError
from penstock.runtime.program import Program
from penstock.runtime.watch import Cause, Status
from penstock.schedule import Schedule

__all__ = ["cause_of", "failed"]

_AROUND = 3  # steps shown before and after the one at hand


def cause_of(error: BaseException, program: Program, rank: int, step: int, peer: str) -> Cause:
    """What went wrong on this rank; `peer` says which message it was waiting for, if it was."""
    at = program.steps[program.place]
    part = at.parts[0]
    text = str(error)
    kind, message = "exception", "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    elif program.waiting and "Timed out" in text:
        kind, message = "timeout", f"{at} waited for {peer}, and it did not come in time"
    elif program.waiting:
        kind, message = "lost", f"{at} waited for {peer}, and the connection broke: that process is gone"
    details = "".join(traceback.format_exception(error)) if kind == "exception" else ""
    return Cause(rank, kind, step, str(at), part.stage, part.microbatch, message, details)


def failed(cause: Cause, statuses: Mapping[int, Status], schedules: Mapping[str, Schedule]) -> StepFailedError:
    """The error that every rank raises."""
    where = f"stage {cause.stage}" + ("" if cause.microbatch is None else f", microbatch {cause.microbatch}")
    lines = [
        f"step {cause.step} failed on rank {cause.rank}, {where}, in {cause.action}",
        f"  {cause.message}",
        "  what each rank was doing:",
        *(f"    {line}" for line in _grid(cause, statuses, schedules)),
    ]
    if cause.details:
        lines += [f"  traceback on rank {cause.rank}:", *(f"    {line}" for line in cause.details.splitlines())]
    return StepFailedError(
        "\n".join(lines), cause.rank, cause.action, cause.stage, cause.microbatch, cause.kind, cause.details
    )


def _grid(cause: Cause, statuses: Mapping[int, Status], schedules: Mapping[str, Schedule]) -> list[str]:
    lines = []
    for rank in range(schedules["step"].num_ranks):
        status = statuses.get(rank)
        if status is None:
            lines.append(f"rank {rank}   does not answer")
        elif status.mode == "outside":
            lines.append(f"rank {rank}   is not in a step")
        else:
            row = schedules[status.mode].ranks[rank]
            first = max(status.place - _AROUND, 0)
            cells = [str(step) for step in row[first : status.place + _AROUND + 1]]
            here = status.place - first
            cells[here] = f"[{cells[here]}]"
            more = "... " if first else "", " ..." if status.place + _AROUND + 1 < len(row) else ""
            note = f"   waits for {status.waits}" if status.waits else ""
            mark = "   <-- here" if rank == cause.rank and cause.kind in ("exception", "interrupted") else ""
            lines.append(f"rank {rank}   {more[0]}{' '.join(cells)}{more[1]}{note}{mark}")
    return lines
