"""What an uncaught failure of a step and other errors of Penstock print, and in which order the ranks exit.

The rank that reported the failure prints the report, with the original traceback once. Every other rank prints
one line and exits after that rank, because a launcher takes the process that ends first for the root cause. Of
another error of Penstock, from the import of the runtime on, each rank of a job prints the message and the line
of the user's program, without a traceback: it cannot know whether the others have the same error.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from penstock.errors import PenstockError, StepFailedError
from penstock.processes import has_ended, local_pid
from penstock.runtime.failure.detector import FailureDetector
from penstock.runtime.failure.report import from_users_code, only_users_code, users_line

_EXIT_SECONDS = 15.0
"""How long a rank waits for the exit of the one that reports."""
_LAUNCHER_SECONDS = 0.5
"""torchrun looks for processes that ended five times in this time."""

DetectorOfProcess = Callable[[], FailureDetector | None]


def install(detector_of_process: DetectorOfProcess) -> None:
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
    place = users_line(frames)
    _print(rank, [*text.splitlines(), *([f"  called at {place}"] if place else [])])
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
                raised.__traceback__ = only_users_code(raised.__traceback__)
                raised.__cause__, raised.__suppress_context__ = None, True
            else:
                raised.__traceback__ = from_users_code(raised.__traceback__)
            get_error_handler().record_exception(raised)


def _wait_for_exit(detector: FailureDetector, reporter: int) -> None:
    """Wait until the launcher of the rank that reports has seen its end, if that can be known."""
    end = time.monotonic() + _EXIT_SECONDS
    while _is_running(detector, reporter) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(_LAUNCHER_SECONDS)


def _is_running(detector: FailureDetector, rank: int) -> bool:
    if rank not in detector.ended:
        return True
    name = detector.ended[rank].process  # the process says that it ends before it does
    return local_pid(name) is not None and not has_ended(name)
