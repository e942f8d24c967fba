"""The report of a failed step: which rank, where, why, and what every rank was doing; the same on all ranks."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch

from penstock.arguments import listed
from penstock.errors import FailureKind, PenstockError, PipelineError, StepFailedError
from penstock.ir.schedule import Schedule
from penstock.runtime.failure.links import Ended
from penstock.runtime.failure.monitor import FailureCause, FailureMonitor, RankStatus
from penstock.runtime.program.program import Program
from penstock.runtime.transport.process_groups import rank_name
from penstock.runtime.transport.stores import first_line
from penstock.runtime.transport.transport_errors import TransportError
from penstock.traces.rank_state import excerpt

# Tracebacks of failures: without the frames of Penstock that lead to the user's code, or follow it.


_PENSTOCK = str(Path(__file__).parents[2]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def _is_own_file(name: str) -> bool:
    """Whether a file of code is Penstock's."""
    return name.startswith(_PENSTOCK)


def from_users_code(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is not Penstock's; all of it if there is none."""
    first = frames
    while first is not None and _is_own_file(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or frames


def only_users_code(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the user's code to the last; all of it if there is none."""
    entries, each = [], frames
    while each is not None:
        entries.append(each)
        each = each.tb_next
    of_user = [i for i, frame in enumerate(traceback.extract_tb(frames)) if _is_users_frame(frame)]
    if not of_user:
        return frames
    last: TracebackType | None = None
    for entry in reversed(entries[of_user[0] : of_user[-1] + 1]):
        last = TracebackType(last, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return last


def users_line(frames: TracebackType | None) -> str:
    """File and line of the user's program that made the call; empty if there is none."""
    of_user = [frame for frame in traceback.extract_tb(frames) if _is_users_frame(frame)]
    return f"{of_user[-1].filename}, line {of_user[-1].lineno}" if of_user else ""


def traceback_of(error: BaseException) -> str:
    """The text of the traceback; empty for an error that Penstock itself found, whose message is complete."""
    frames = error.__traceback__
    if any(map(_is_users_frame, traceback.extract_tb(frames))):  # else the frames of Penstock tell where it was
        frames = from_users_code(frames)
    elif isinstance(error, PenstockError):
        return ""
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001 -- __str__ of an exception may raise anything
        return "".join(traceback.format_tb(error.__traceback__))


def _is_users_frame(frame: traceback.FrameSummary) -> bool:
    """Whether the code of a frame is neither Penstock's nor torch's nor of the standard library."""
    if frame.filename.startswith(_STANDARD):
        return "site-packages" in frame.filename
    return not _is_own_file(frame.filename) and not frame.filename.startswith((_TORCH, "<"))


def failure_cause(error: BaseException, program: Program, rank: int, status: RankStatus) -> FailureCause:
    """The failure of this rank, which was doing this."""
    position = program.position
    current = program.steps[position] if position >= 0 else None
    part = current.parts[program.progress.part] if current is not None else None
    kind, message, details = FailureKind.EXCEPTION, _last_line(error), traceback_of(error)
    if isinstance(error, KeyboardInterrupt):
        kind, message, details = FailureKind.INTERRUPTED, "KeyboardInterrupt", ""
    elif isinstance(error, TransportError):
        kind, details = FailureKind.TIMEOUT if error.timed_out else FailureKind.LOST, ""
        reason = "it did not come in time" if error.timed_out else "the connection broke"
        where = "had finished all its actions and waited" if program.finished else f"waited in {current}"
        if current is None:
            where = "waited before its first action"
        message = f"rank {rank} {where} for {status.awaited or 'other ranks'}, and {reason}"
    place = ""
    if current is None or program.finished:
        place = ", before its first action" if current is None else ", after its last action"
        current = part = None
    stage, microbatch = (None, None) if part is None else (part.stage, part.microbatch)
    action = "" if current is None else str(current)
    found = FailureCause(rank, kind, status.call_number, action, stage, microbatch, message, details)
    return replace(found, call_name=status.call_name, place=place)


def collective_cause(error: BaseException, name: str, rank: int, status: RankStatus) -> FailureCause:
    """The failure of this rank in a call outside of steps, which fails the next step of all ranks."""
    kind = FailureKind.INTERRUPTED if isinstance(error, KeyboardInterrupt) else FailureKind.EXCEPTION
    message, details = _last_line(error), traceback_of(error)
    return FailureCause(rank, kind, status.call_number + 1, "", None, None, message, details, call_name=name)


def _last_line(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # noqa: BLE001 -- __str__ of an exception may raise anything
        return type(error).__name__


def failure_report(
    cause: FailureCause,
    statuses: Mapping[int, RankStatus],
    schedules: Mapping[str, Schedule],
    members: tuple[int, ...],
    ended: Mapping[int, Ended],
) -> StepFailedError:
    """The error that every rank of the pipeline raises; `members` are its world ranks.

    `ended` are its ranks whose process has ended or cannot be reached.
    """
    label = _label(cause, members)
    lines = [f"{cause.call_name} failed{cause_summary(cause, members)}"]
    culprit = None
    if cause.members != members:
        cause = replace(cause, rank=-1)
    elif cause.kind is FailureKind.TIMEOUT and not cause.process:
        culprit = _blocking_rank(cause, statuses, schedules)
    if culprit is not None:
        lines.append(f"  the cause is {_label(culprit, members)}, which {culprit.message}")
    if statuses:
        status_lines = _status_lines(cause, statuses, schedules, ended)
        lines += ["  what each rank was doing:", *(f"    {line}" for line in status_lines)]
    if cause.details:
        lines += [f"  traceback on {label}:", *(f"    {line}" for line in cause.details.splitlines())]
    found = culprit or cause
    return StepFailedError(
        "\n".join(lines),
        None if found.rank < 0 else found.rank,
        found.action or None,
        found.stage,
        found.microbatch,
        found.kind,
        found.details,
        found.world_rank,
        found.reporter,
    )


def _blocking_rank(
    cause: FailureCause, statuses: Mapping[int, RankStatus], schedules: Mapping[str, Schedule]
) -> FailureCause | None:
    """The rank that the waits of a rank lead to, and what it does instead; None if that is not known."""
    rank, seen = cause.rank, set[int]()
    while rank not in seen and (status := statuses.get(rank)) is not None and status.awaited is not None:
        seen.add(rank)
        if status.awaited.peer is None:
            return None
        rank = status.awaited.peer
    if rank in seen:
        return None
    found = replace(cause, rank=rank, world_rank=cause.members[rank], action="", stage=None, microbatch=None)
    if status is None:
        return replace(found, message="does not answer")
    if status.mode not in schedules:
        return replace(found, message=_outside(status))
    step = schedules[status.mode].ranks[rank][max(status.position, 0)]
    stage, microbatch = step.parts[0].stage, step.parts[0].microbatch
    message = f"is computing, in {step}"
    return replace(found, message=message, action=str(step), stage=stage, microbatch=microbatch)


def _outside(status: RankStatus) -> str:
    """What a rank does that runs no list of actions."""
    if status.mode == "outside":
        return f"runs neither step nor eval, after {status.call_name}"
    return f"is in {status.mode}, after {status.call_name}"


def collective_failure(
    name: str, monitor: FailureMonitor | None, timeout: timedelta, error: Exception
) -> PipelineError:
    """The error of a call outside of steps whose messages failed."""
    rank, cause = (0, None) if monitor is None else (monitor.rank, monitor.lost_rank())
    if monitor is not None and cause is not None:
        return PipelineError(f"{name} failed{cause_summary(cause, monitor.members)}")
    return PipelineError(
        f"{name} failed on rank {rank}: every rank must call it, but another rank did not within "
        f"{timeout.total_seconds():g} s, or is gone ({first_line(error)})"
    )


def cause_summary(cause: FailureCause, members: tuple[int, ...]) -> str:
    """Which rank failed, and why, to follow `failed`."""
    message = cause.message.replace("\n", "\n  ")
    return f"{_where(cause, _label(cause, members))}\n  {message}"


def _label(cause: FailureCause, members: tuple[int, ...]) -> str:
    """The rank that failed, for the ranks of the pipeline `members`."""
    if cause.rank < 0:
        return f"world rank {cause.world_rank}"
    if cause.members != members:
        pipeline = f"another pipeline, of world ranks {listed(cause.members)}"
        return f"world rank {cause.world_rank} (rank {cause.rank} of {pipeline})"
    return rank_name(cause.rank, cause.world_rank)


def _where(cause: FailureCause, label: str) -> str:
    if cause.kind is FailureKind.TIMEOUT:
        return f": {label} " + ("does not answer" if cause.process else "waited too long")
    if cause.kind is FailureKind.LOST:
        return f": {label} " + ("has ended" if cause.process else "lost the connection to another rank")
    if cause.stage is None:
        return f" on {label}{cause.place}"
    microbatch = "" if cause.microbatch is None else f", microbatch {cause.microbatch}"
    return f" on {label}, stage {cause.stage}{microbatch}, in {cause.action}"


def _status_lines(
    cause: FailureCause,
    statuses: Mapping[int, RankStatus],
    schedules: Mapping[str, Schedule],
    ended: Mapping[int, Ended],
) -> list[str]:
    """One line for each rank: the actions around the current one, which is in brackets."""
    modes = {status.mode for status in statuses.values()} & schedules.keys()
    lines = []
    for rank in range(schedules["step"].num_ranks):
        status = statuses.get(rank)
        if status is None:
            is_cause = rank == cause.rank and cause.kind is FailureKind.LOST and cause.process
            verb = ended[rank].verb if rank in ended else "has ended" if is_cause else "does not answer"
            lines.append(f"rank {rank}   {verb}")
            continue
        if status.mode not in schedules:
            lines.append(f"rank {rank}   {_outside(status)}")
            continue
        other_call = "" if status.call_number == cause.call_number else f"already in {status.call_name}: "
        mode = f"in {status.mode}: " if len(modes) > 1 else ""
        around = excerpt(schedules[status.mode].ranks[rank], status.position)
        lines.append(f"rank {rank}   {other_call}{mode}{around}{_note(rank, cause, status)}")
    return lines


def _note(rank: int, cause: FailureCause, status: RankStatus) -> str:
    if rank == cause.rank and cause.kind in (FailureKind.EXCEPTION, FailureKind.INTERRUPTED):
        return "   <-- here"
    if status.awaited:
        return f"   waits for {status.awaited}"
    return "   is computing" if cause.kind is FailureKind.TIMEOUT else ""
