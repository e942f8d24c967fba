"""Writes the state files of this process, from a thread of its own.

The main thread of a rank that hangs is blocked in torch, where Python runs no signal handlers. So the signal is
handled by `faulthandler`, in C: it writes to a pipe, which wakes the thread. That thread also notices that a
step makes no progress, because a backend may end the process later without a word (NCCL's watchdog does).
"""

from __future__ import annotations

import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import PipelineError
from penstock.formats import write_text
from penstock.processes import process_name
from penstock.traces.diagnose.rank_state import RankState, dump_state, state_file_name

STATE_DIR = "PENSTOCK_STATE_DIR"
_SIGNAL = "PENSTOCK_STATE_SIGNAL"
_AFTER = "PENSTOCK_STATE_AFTER"
_BEAT_SECONDS = 1.0
_MAX_CALLS = 30
_MAX_CHARACTERS = 4000
_FLUSH_SECONDS = 5.0


class StateSource(Protocol):
    """One pipeline of this process."""

    def rank_state(self) -> RankState:
        """What this rank does; called on another thread."""

    def ask_others(self) -> None:
        """Ask the other ranks for their states too, if they can be asked."""


def state_folder(given: str | os.PathLike[str] | None) -> Path | None:
    """The folder of the argument `state_dir=`, or else of the environment; created if it does not exist."""
    text = given if given is not None else os.environ.get(STATE_DIR, "")
    if not str(text):
        return None
    name = "state_dir=" if given is not None else STATE_DIR
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipelineError(f"{name} {folder} is not a folder that can be written: {error.strerror}") from None
    return folder


def register_states(source: StateSource, folder: Path) -> None:
    """Write the states of this pipeline to the folder from now on, as long as it exists."""
    if not _writers:
        _writers.append(_Writer())
    _writers[0].add(source, folder)


def request_states(reason: str, state: RankState | None = None, source: StateSource | None = None) -> None:
    """Write the states soon; with a source, only its state, as it is given. Any thread may call it."""
    for writer in _writers:
        writer.requests.put((reason, source, state))
        writer.wake()


def flush_states() -> None:
    """Wait until the requested states are written."""
    for writer in _writers:
        writer.flush(_FLUSH_SECONDS)


class _Files:
    """The state files of one source."""

    def __init__(self, source: StateSource, folder: Path, number: int) -> None:
        self.source, self.folder, self.number = weakref.ref(source), folder, number
        """`number` is that of the pipeline, among those with the same folder."""
        self.progress: object = None
        self.since = 0.0
        """When the last progress was made."""
        self.outdated: tuple[object, Path] | None = None
        """The progress at which a stall or a failure was written, and the file."""


class _Writer:
    """The thread of this process."""

    def __init__(self) -> None:
        self.requests: queue.Queue[tuple[str, StateSource | None, RankState | None]] = queue.Queue()
        self._files: list[_Files] = []
        self._after = _seconds_of(os.environ.get(_AFTER, "60"))
        self._read_end, self._write_end = os.pipe()
        self._waker, self._woken = socket.socketpair()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)  # a signal handler must not block
        _register_signal(self._write_end)
        threading.Thread(target=self._run, name="penstock-states", daemon=True).start()

    def add(self, source: StateSource, folder: Path) -> None:
        self._files = [files for _, files in self._alive()]
        used = {files.number for files in self._files if files.folder == folder}
        number = next(number for number in range(len(used) + 1) if number not in used)
        self._files.append(_Files(source, folder, number))

    def wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b".")

    def flush(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.requests.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._read_end, self._woken.fileno()], [], [], _BEAT_SECONDS)
            if self._woken.fileno() in ready:
                self._woken.recv(2**12)
            if self._read_end in ready and _drain(self._read_end):
                self._write_all("signal")
                for source, _ in self._alive():
                    with suppress(Exception):
                        source.ask_others()
            while not self.requests.empty():
                reason, only, state = self.requests.get()
                try:
                    self._write_all(reason, only, state)
                finally:
                    self.requests.task_done()
            self._check_progress()

    def _alive(self) -> list[tuple[StateSource, _Files]]:
        found = ((files.source(), files) for files in self._files)
        return [(source, files) for source, files in found if source is not None]

    def _write_all(self, reason: str, only: StateSource | None = None, state: RankState | None = None) -> None:
        for source, files in self._alive():
            if only is None or source is only:
                with suppress(Exception):  # a diagnosis must never harm the run
                    file = _write(state or source.rank_state(), files, reason)
                    if state is not None:
                        files.outdated = _progress_of(source.rank_state()), file

    def _check_progress(self) -> None:
        """Write the state of a pipeline that is at the same place for long; remove it if it goes on."""
        for source, files in self._alive():
            with suppress(Exception):
                state = source.rank_state()
                progress, now = _progress_of(state), time.monotonic()
                if progress != files.progress or state.mode == "outside":
                    files.progress, files.since = progress, now
                elif now - files.since > self._after and files.outdated is None:
                    file = _write(state, files, f"no progress for {now - files.since:.0f} s")
                    files.outdated = progress, file
                if state.runs and files.outdated is not None and files.outdated[0] != progress:
                    files.outdated[1].unlink(missing_ok=True)
                    files.outdated = None


_writers: list[_Writer] = []
os.register_at_fork(after_in_child=_writers.clear)


def _progress_of(state: RankState) -> object:
    return state.mode, state.step_number, state.position, state.awaits


def _write(state: RankState, files: _Files, reason: str) -> Path:
    known = replace(
        state,
        pipeline=files.number,
        process=process_name(),
        job="/".join(os.environ.get(name, "") for name in _JOB),
        reason=reason,
        written_at=time.time(),
        stacks=_stacks(),
        error=state.error[:_MAX_CHARACTERS],
    )
    file = files.folder / state_file_name(known)
    write_text(dump_state(known), file)
    return file


_JOB = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
"""The same on all processes of one launch, and other ones after a restart."""


def _stacks() -> dict[str, tuple[str, ...]]:
    """The innermost calls of each thread of Python."""
    frames: dict[int, Any] = sys._current_frames()  # noqa: SLF001 -- the documented way
    found = {}
    for thread in threading.enumerate():
        if thread.ident in frames and thread is not threading.current_thread():
            stack = traceback.extract_stack(frames[thread.ident])
            calls = reversed(stack[-_MAX_CALLS:])
            found[thread.name] = tuple(f"{call.name} ({call.filename}:{call.lineno})" for call in calls)
    return found


def _drain(descriptor: int) -> bool:
    """Read all that is there; false if there was nothing."""
    found = False
    with suppress(BlockingIOError):
        while os.read(descriptor, 2**16):
            found = True
    return found


def _register_signal(descriptor: int) -> None:
    """Let the signal write to this descriptor; a handler that exists already is called after it."""
    name = os.environ.get(_SIGNAL, "SIGUSR1").upper()
    number = getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None)
    if not isinstance(number, signal.Signals):
        raise PipelineError(f"{_SIGNAL} is {name}, which is no signal; use for example SIGUSR1 or SIGUSR2")
    if hasattr(faulthandler, "register"):  # not on Windows
        has_handler = signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN)
        faulthandler.register(number, descriptor, all_threads=False, chain=has_handler)


def _seconds_of(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise PipelineError(f"{_AFTER} must be a number of seconds above 0 (given {text!r})")
    return seconds
