"""The failure detector of this process: its start and end, and what it says of ranks lost outside of steps."""

from __future__ import annotations

import atexit
import os
import re
import secrets
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import util as processes
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.processes import CALL_THREAD, has_ended, process_name
from penstock.runtime.config import ExecutionConfig
from penstock.runtime.failure import report
from penstock.runtime.failure.detector import FailureDetector
from penstock.runtime.failure.links import Listener, neighbours
from penstock.runtime.transport.network import (
    StoreSilentError,
    call_within,
    listening_socket,
    open_connections,
    store_connection,
    unwrapped,
)
from penstock.runtime.transport.process_groups import abort_process_groups, rank_name
from penstock.runtime.transport.transport_errors import TransportError, transport_errors

T = TypeVar("T")

_PREFIX = "penstock/failure-detector"
_LINK_SECONDS = 5.0
_START_SECONDS = 5.0
_ABORT_SECONDS = 3.5  # a rank that is blocked in a collective has aborted its groups by then, after a failure
_current: list[tuple[weakref.ref[Any], FailureDetector]] = []


def current_detector() -> FailureDetector | None:
    """Return the detector of this process; None if there is none yet, or none for this world."""
    world: Any = dist.group.WORLD
    if _current and (world is None or _current[0][0]() is not world):
        _current.pop()[1].close("it has left the process group")
    return _current[0][1] if _current else None


def detector_of_job(timeout: timedelta) -> FailureDetector:
    """Return the detector of this process, started if there is none; raise if the store does not answer."""
    if (detector := current_detector()) is not None:
        return detector
    try:
        return _within(timeout, _start)
    except TransportError as error:
        raise PipelineError(str(error)) from error


def detector_of_others(timeout: timedelta) -> FailureDetector | None:
    """Return the detector for a pipeline of one rank; None if the job has no others, or the store is silent."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    try:
        return detector_of_job(min(timeout, timedelta(seconds=_START_SECONDS)))
    except PipelineError:
        return None


def link_members(detector: FailureDetector, members: Sequence[int], timeout: timedelta) -> None:
    """Link the ranks of a pipeline, all of which have started their failure detector."""
    others = set(members) - {detector.rank}
    if others <= detector.linked():
        return

    def link() -> None:
        with transport_errors():
            store = store_connection("connect")
        for other in sorted(others - detector.linked()):
            if other > detector.rank:
                _link(detector, store, other)
        end = time.monotonic() + _LINK_SECONDS
        while others - detector.linked() - set(detector.ended) and time.monotonic() < end:
            time.sleep(0.005)

    _within(timeout, link)


def abort_groups() -> None:
    """Abort all process groups of this process, and tell the other ranks, which cannot use them any more."""
    abort_process_groups()
    if (detector := current_detector()) is not None and detector.aborted_by is None:
        detector.aborted_by = detector.rank
        detector.send({"type": "aborted", "rank": detector.rank})


def raise_if_aborted(detector: FailureDetector, members: Sequence[int]) -> None:
    """Raise if a pipeline that shares collectives with others cannot go on after a failed step."""
    if dist.get_world_size() == len(members):
        return
    while detector.aborted_by is None and time.monotonic() < detector.failed_at + _ABORT_SECONDS:
        time.sleep(0.02)
    if detector.aborted_by is not None:
        raise PipelineError(
            f"world rank {detector.aborted_by} was in a collective when a step failed, and has aborted its "
            "process groups: a pipeline with data or tensor parallelism cannot go on after that; end the "
            "processes and start again from a checkpoint"
        )


def _within(timeout: timedelta, call: Callable[[], T]) -> T:
    try:
        return call_within(timeout.total_seconds(), call)
    except (TransportError, TimeoutError) as error:
        raise StoreSilentError(error) from error


def _start() -> FailureDetector:
    """Start the detector: publish its address and link its neighbours."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with transport_errors():
        store = store_connection("connect")
        key = store.compare_set(f"{_PREFIX}/key", "", secrets.token_hex(32)).decode()
    listener, address = listening_socket(store)
    detector = FailureDetector(rank, key, process := process_name(), listener)
    _current[:] = [(weakref.ref(dist.group.WORLD), detector)]
    atexit.register(_close)
    report.install(current_detector)
    processes.Finalize(None, _close, exitpriority=100)  # its children do not run atexit
    with transport_errors():
        store.set(f"{_PREFIX}/{rank}", f"{address} {process}")
    for other in sorted(neighbours(rank, size)):
        _link(detector, store, other)  # one that starts later links this rank
    return detector


def _link(detector: FailureDetector, store: Store, rank: int) -> None:
    """Link a rank whose detector has started, or learn that its process has ended since."""
    key = f"{_PREFIX}/{rank}"
    with transport_errors():
        published = store.get(key).decode() if store.check([key]) else None
    if published is not None:
        address, process = published.split(" ", 1)
        if not detector.link(rank, address) and has_ended(process):
            detector.lose(rank, process)


# --- ranks lost in collectives of torch.distributed, and while ranks connect -----------------------------

_NOTICE_SECONDS = 2.5  # how long the end of a process may take to be known here
_CLOSE_SECONDS = 2.0  # how long its connections may take to end; a process that it forked may keep them open


@contextmanager
def guarded_collective(members: Sequence[int]) -> Iterator[None]:
    """Abort the process groups of this process if a rank ends or is silent; then the collective raises."""
    detector = current_detector()
    if detector is None:
        yield
        return
    guard = _Guard(detector, members)
    try:
        yield
    finally:
        detector.remove_listener(guard)


class _Guard(Listener):
    """Listens to the failure detector during one collective."""

    def __init__(self, detector: FailureDetector, members: Sequence[int]) -> None:
        self._detector, self._members = detector, [rank for rank in members if rank != detector.rank]
        self._aborted = False
        self._lost_at: float | None = None
        detector.add_listener(self)

    def on_beat(self) -> None:
        """Abort if a rank is lost."""
        detector, now = self._detector, time.monotonic()
        if self._lost_at is None and any(rank in detector.ended for rank in self._members):
            self._lost_at = now + _CLOSE_SECONDS
        is_silent = any(detector.silence(rank) > detector.timeout for rank in self._members)
        if not self._aborted and (is_silent or (self._lost_at is not None and now > self._lost_at)):
            self._aborted = True
            abort_groups()


def describe_lost_ranks(members: Sequence[int], *, of_pipeline: bool = True) -> str:
    """Return which of these world ranks have ended or do not answer, after a collective with them has failed.

    They are numbered as the ranks of a pipeline, or else by world rank alone. Those that exited by themselves
    are named only if there are no others.
    """
    detector = current_detector()
    if detector is None:
        return ""
    end = time.monotonic() + _NOTICE_SECONDS
    while not (lost := detector.lost(members)) and time.monotonic() < end:
        time.sleep(0.02)
    blamed = [rank for rank in lost if rank not in detector.ended or not detector.ended[rank].reason]
    texts = []
    for rank in blamed or lost:
        name = rank_name(members.index(rank), rank) if of_pipeline else f"world rank {rank}"
        texts.append(f"{name} {'does not answer' if lost[rank].is_silent else 'has ended'}: {lost[rank].text}")
    return "; ".join(texts)


@contextmanager
def connecting(
    config: ExecutionConfig,
    peers: Sequence[int] | None = None,
    reason: Callable[[str], str] = lambda lost: lost,
) -> Iterator[None]:
    """Name the rank that is lost if the job's store or a connection fails inside.

    `peers` are the world ranks that this rank connects to, by default those of the pipeline. `reason` adds why
    peers have not connected to what is known of lost ranks.
    """
    members = config.members if peers is None else peers
    others = "the others" if peers is None else "those of other pipelines that train the same stages"
    try:
        yield
    except TransportError as error:
        why = describe_lost_ranks(members, of_pipeline=peers is None)
        if not isinstance(error, StoreSilentError):
            why = reason(why)
        raise PipelineError(
            f"rank {config.rank} of the pipeline could not connect to {others} (world ranks "
            f"{listed(members)}) within {config.timeout.total_seconds():g} s: {why or error}"
        ) from error


def raise_if_ended(members: Sequence[int]) -> None:
    """Raise if a process has ended that the pipeline needs."""
    detector = current_detector()
    if detector is not None and any(member in detector.ended for member in members):
        raise TransportError(describe_lost_ranks(members))


# --- the end of this process ---------------------------------------------------------------------------

_END_SECONDS = 2.0  # that calls to the store need; others, such as of gloo, wait longer and are left
_DESCRIPTOR = re.compile(r"\bfd=([0-9]+)")


def end_abandoned_calls() -> None:
    """End the connections to the store on which abandoned calls still wait, and wait for their threads.

    If such a call returned while the interpreter ends, such as when the store's host ends too, Python before
    3.14 would end the thread inside of C++ code, and that aborts the process: it would lose its exit code.
    """
    calls = [thread for thread in threading.enumerate() if thread.name == CALL_THREAD]
    if not calls:
        return
    for store in open_connections():
        if (found := _DESCRIPTOR.search(repr(unwrapped(store)))) is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(int(found[1]))) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    end = time.monotonic() + _END_SECONDS
    for call in calls:
        call.join(max(0.0, end - time.monotonic()))


def _close() -> None:
    """Close the detector before the interpreter ends: a thread that still runs then may abort the process."""
    if _current:
        error = getattr(sys, "last_value", None)  # of the exception that ends this process
        why = "" if error is None else ", after " + "".join(traceback.format_exception_only(error)).strip()
        _current.pop()[1].close(f"it has exited{why}")


def _forget() -> None:
    if _current:
        _current.pop()[1].forget()


os.register_at_fork(after_in_child=_forget)
atexit.register(end_abandoned_calls)  # what is registered later is called earlier
