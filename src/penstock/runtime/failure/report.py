"""The report of a failed step, the same on all ranks, and what an uncaught failure prints.

The report says which rank failed, where, why, and what every rank was doing. If the failure is not caught, the
rank that reported it prints the report, with the original traceback once. Every other rank prints one line and
exits after that rank, because a launcher takes the process that ends first for the root cause. Of another error
of Penstock, from the import of the runtime on, each rank of a job prints the message and the line of the user's
program, without a traceback: it cannot know whether the others have the same error.
"""

from __future__ import annotations

import io
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from penstock.arguments import listed
from penstock.errors import FailureKind, PenstockError, PipelineError, StepFailedError
from penstock.ir.schedule import Schedule
from penstock.processes import has_ended, local_pid
from penstock.runtime.failure.detector import FailureDetector
from penstock.runtime.failure.links import Ended, FailureCause, RankStatus
from penstock.runtime.failure.monitor import FailureMonitor
from penstock.runtime.program.program import Program
from penstock.runtime.transport.network import first_line
from penstock.runtime.transport.process_groups import rank_name
from penstock.runtime.transport.transport_errors import TransportError
from penstock.traces.diagnose.rank_state import excerpt

# --- tracebacks, without the frames of Penstock that lead to the user's code, or follow it ---------------

_PENSTOCK = str(Path(__file__).parents[2]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def _entries(frames: TracebackType | None) -> Iterator[tuple[TracebackType, str]]:
    """Yield the entries of a traceback, each with its file."""
    while frames is not None:
        yield frames, frames.tb_frame.f_code.co_filename
        frames = frames.tb_next


def _is_users_file(name: str) -> bool:
    """Return whether a file is neither Penstock's nor torch's nor of the standard library."""
    if name.startswith(_STANDARD):
        return "site-packages" in name
    return not name.startswith((_PENSTOCK, _TORCH, "<"))


def _from_users_code(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame on that is not Penstock's; all of it if there is none."""
    return next((entry for entry, file in _entries(frames) if not file.startswith(_PENSTOCK)), frames)


def _only_users_code(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of the user's code to the last; all of it if there is none."""
    entries = list(_entries(frames))
    of_user = [i for i, (_, file) in enumerate(entries) if _is_users_file(file)]
    if not of_user:
        return frames
    last: TracebackType | None = None
    for entry, _ in reversed(entries[of_user[0] : of_user[-1] + 1]):
        last = TracebackType(last, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return last


def traceback_of(error: BaseException) -> str:
    """Return the text of the traceback; empty for an error that Penstock found, whose message is complete."""
    frames = error.__traceback__
    if any(_is_users_file(file) for _, file in _entries(frames)):  # else Penstock's frames tell where it was
        frames = _from_users_code(frames)
    elif isinstance(error, PenstockError):
        return ""
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001 -- __str__ of an exception may raise anything
        return "".join(traceback.format_tb(error.__traceback__))


# --- the report ----------------------------------------------------------------------------------------


def failure_cause(error: BaseException, program: Program, rank: int, status: RankStatus) -> FailureCause:
    """Return the failure of this rank, which was doing this."""
    position = program.position
    current = program.steps[position] if position >= 0 else None
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
    found = FailureCause(rank, kind, status.call_number, message, details, call_name=status.call_name)
    if current is None or program.finished:
        return replace(found, place=f", {'before its first' if current is None else 'after its last'} action")
    part = current.parts[program.progress.part]
    return replace(found, action=str(current), stage=part.stage, microbatch=part.microbatch)


def collective_cause(error: BaseException, name: str, rank: int, status: RankStatus) -> FailureCause:
    """Return the failure of this rank in a call outside of steps, which fails the next step of all ranks."""
    kind = FailureKind.INTERRUPTED if isinstance(error, KeyboardInterrupt) else FailureKind.EXCEPTION
    message, details = _last_line(error), traceback_of(error)
    return FailureCause(rank, kind, status.call_number + 1, message, details, call_name=name)


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
    """Return the error that every rank of the pipeline raises; `members` are its world ranks.

    `ended` are its ranks whose process has ended or cannot be reached.
    """
    label = _label(cause, members)
    lines = [f"{cause.call_name} failed{_summary(cause, members)}"]
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
    """Return the rank that the waits of a rank lead to, and what it does instead; None if that is not known."""
    rank, seen = cause.rank, set[int]()
    while rank not in seen and (status := statuses.get(rank)) is not None and status.awaited is not None:
        seen.add(rank)
        if status.awaited.peer is None:
            return None
        rank = status.awaited.peer
    if rank in seen:
        return None
    found = replace(cause, rank=rank, world_rank=cause.members[rank], action="", stage=None, microbatch=None)
    if status is None or status.mode not in schedules:
        return replace(found, message="does not answer" if status is None else _outside(status))
    action = schedules[status.mode].ranks[rank][max(status.position, 0)]
    first, message = action.parts[0], f"is computing, in {action}"
    return replace(found, message=message, action=str(action), stage=first.stage, microbatch=first.microbatch)


def _outside(status: RankStatus) -> str:
    if status.mode == "outside":
        return f"runs neither step nor eval, after {status.call_name}"
    return f"is in {status.mode}, after {status.call_name}"


def collective_failure(
    name: str, monitor: FailureMonitor | None, timeout: timedelta, error: Exception
) -> PipelineError:
    """Return the error of a call outside of steps whose messages failed."""
    rank, cause = (0, None) if monitor is None else (monitor.rank, monitor.lost_rank())
    if monitor is not None and cause is not None:
        return PipelineError(f"{name} failed{_summary(cause, monitor.members)}")
    return PipelineError(
        f"{name} failed on rank {rank}: every rank must call it, but another rank did not within "
        f"{timeout.total_seconds():g} s, or is gone ({first_line(error)})"
    )


def _summary(cause: FailureCause, members: tuple[int, ...]) -> str:
    """Return which rank failed, and why, to follow `failed`."""
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


# --- uncaught failures ---------------------------------------------------------------------------------

_EXIT_SECONDS = 15.0  # how long a rank waits for the exit of the one that reports
_LAUNCHER_SECONDS = 0.5  # torchrun looks for processes that ended five times in this time


def install(detector_of_process: Callable[[], FailureDetector | None]) -> None:
    """From now on print uncaught errors of Penstock this way; everything else as before."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, StepFailedError) and error.reporter is not None and dist.is_initialized():
            report_uncaught(error, frames, detector_of_process())
        elif isinstance(error, PenstockError) and (rank := _rank_of_process()) is not None:
            _report(rank, f"{kind.__name__}: {error}", error, frames)
        else:
            before(kind, error, frames)

    sys.excepthook = hook


def report_uncaught(
    error: StepFailedError, frames: TracebackType | None, detector: FailureDetector | None
) -> None:
    """Print the failure: in full on the rank that reported it, else as one line, and wait for that rank."""
    rank = dist.get_rank()
    if error.reporter == rank:
        _report(rank, error.report, error.__cause__ or error, frames)
        return
    first, *others = error.report.splitlines()
    reason = f": {others[0].strip()}" if others else ""
    _print(rank, [f"{first}{reason} (the report is printed by world rank {error.reporter})"])
    if detector is not None and error.reporter is not None:
        _wait_for_exit(detector, error.reporter)


def _report(rank: int, text: str, error: BaseException, frames: TracebackType | None) -> None:
    """Print an error in full, and give it to torchrun, whose summary shows it."""
    places = [f"{file}, line {entry.tb_lineno}" for entry, file in _entries(frames) if _is_users_file(file)]
    _print(rank, [*text.splitlines(), *(f"  called at {place}" for place in places[-1:])])
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        _record(error)


def _rank_of_process() -> int | None:
    """The rank in the job, also before it has a process group; None if this process is none of a job."""
    if dist.is_initialized():
        return dist.get_rank()
    given = os.environ.get("RANK", "")
    return int(given) if given.isdecimal() else None


def _print(rank: int, lines: list[str]) -> None:
    """Print lines with the rank; torch's hook, if it called this one, collects them and adds it itself."""
    prefix = "" if isinstance(sys.stderr, io.StringIO) else f"[rank{rank}]: "
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in lines))
    sys.stderr.flush()


def _record(error: BaseException) -> None:
    with suppress(OSError):
        try:
            raise error  # noqa: TRY301 -- it is formatted as the current exception
        except BaseException as raised:  # noqa: BLE001 -- which has any type
            if isinstance(raised, PenstockError):  # its message is complete
                raised.__traceback__ = _only_users_code(raised.__traceback__)
                raised.__cause__, raised.__suppress_context__ = None, True
            else:
                raised.__traceback__ = _from_users_code(raised.__traceback__)
            get_error_handler().record_exception(raised)


def _wait_for_exit(detector: FailureDetector, reporter: int) -> None:
    """Wait until the launcher of the rank that reports has seen its end, if that can be known."""
    end = time.monotonic() + _EXIT_SECONDS
    while time.monotonic() < end:
        ended = detector.ended.get(reporter)  # the process says that it ends before it does
        if ended is not None and (local_pid(ended.process) is None or has_ended(ended.process)):
            break
        time.sleep(0.02)
    time.sleep(_LAUNCHER_SECONDS)
