"""The watch of this process: started with its first pipeline, ended with the process or its world group."""

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
from contextlib import suppress
from datetime import timedelta
from multiprocessing import util as processes
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock.errors import PipelineError
from penstock.processes import has_ended, process_name
from penstock.runtime.failure import uncaught
from penstock.runtime.failure.links import neighbours
from penstock.runtime.failure.watch import JobWatch
from penstock.runtime.transport.addresses import listening_socket
from penstock.runtime.transport.process_groups import abort_process_groups
from penstock.runtime.transport.stores import (
    THREAD_NAME,
    StoreSilentError,
    call_within,
    open_connections,
    store_connection,
    unwrapped,
)
from penstock.runtime.transport.transport_errors import TransportError, transport_errors

# Ends abandoned calls of torch before the interpreter ends, so that the process keeps its exit code.
#
# A call to the job's store that takes too long, or whose partner has ended, is abandoned on its thread
# (`transport/bounded.py`). If it returns while the interpreter ends, such as when the store's host ends too,
# Python before 3.14 ends the thread inside of C++ code, and that aborts the process.


_END_SECONDS = 2.0  # that calls to the store need; others, such as of gloo, wait longer and are left
_DESCRIPTOR = re.compile(r"\bfd=([0-9]+)")


def end_abandoned_calls() -> None:
    """End the connections to the store on which calls still wait, and wait for their threads."""
    calls = [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
    if not calls:
        return
    for descriptor in _store_descriptors():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    end = time.monotonic() + _END_SECONDS
    for call in calls:
        call.join(max(0.0, end - time.monotonic()))


def _store_descriptors() -> Iterator[int]:
    """The sockets of Penstock's own connections to the store, which only their descriptions tell."""
    for store in open_connections():
        if (found := _DESCRIPTOR.search(repr(unwrapped(store)))) is not None:
            yield int(found[1])


T = TypeVar("T")

_PREFIX = "penstock/watch"
_LINK_SECONDS = 5.0
_START_SECONDS = 5.0
_ABORT_SECONDS = 3.5
"""After a failed step, a rank that is blocked in a collective has aborted its groups by then."""
_current: list[tuple[weakref.ref[Any], JobWatch]] = []


def current_watch() -> JobWatch | None:
    """The watch of this process; None if there is none yet, or none for this world."""
    world: Any = dist.group.WORLD
    if _current and (world is None or _current[0][0]() is not world):
        _current.pop()[1].close("it has left the process group")
    return _current[0][1] if _current else None


def watch_of_job(timeout: timedelta) -> JobWatch:
    """The watch of this process, started if there is none; raises if the job's store does not answer."""
    if (watch := current_watch()) is not None:
        return watch
    try:
        return _within(timeout, _start)
    except TransportError as error:
        raise PipelineError(str(error)) from error


def watch_of_others(timeout: timedelta) -> JobWatch | None:
    """The watch for a pipeline that needs no other rank; None if there are none, or the store is silent."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    try:
        return watch_of_job(min(timeout, timedelta(seconds=_START_SECONDS)))
    except PipelineError:
        return None


def link_members(watch: JobWatch, members: Sequence[int], timeout: timedelta) -> None:
    """Link the ranks of a pipeline, all of which have started their watch."""
    if set(members) - {watch.rank} - watch.linked():
        _within(timeout, lambda: _link_members(watch, members))


def abort_groups() -> None:
    """Abort all process groups of this process, and tell the other ranks, which cannot use them any more."""
    abort_process_groups()
    if (watch := current_watch()) is not None and watch.aborted_by is None:
        watch.aborted_by = watch.rank
        watch.send({"type": "aborted", "rank": watch.rank})


def raise_if_aborted(watch: JobWatch, members: Sequence[int]) -> None:
    """Raise if a pipeline that shares collectives with others cannot go on after a failed step."""
    if dist.get_world_size() == len(members):
        return
    while watch.aborted_by is None and time.monotonic() < watch.failed_at + _ABORT_SECONDS:
        time.sleep(0.02)
    if watch.aborted_by is not None:
        raise PipelineError(
            f"world rank {watch.aborted_by} was in a collective when a step failed, and has aborted its "
            "process groups: a pipeline with data or tensor parallelism cannot go on after that; end the "
            "processes and start again from a checkpoint"
        )


def _within(timeout: timedelta, call: Callable[[], T]) -> T:
    """The result of a call that needs the job's store; raises a `TransportError` if it does not answer."""
    try:
        return call_within(timeout.total_seconds(), call)
    except (TransportError, TimeoutError) as error:
        raise StoreSilentError(error) from error


def _start() -> JobWatch:
    """Start the watch: publish its address and link its neighbours."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with transport_errors():
        store = store_connection("connect")
        key = store.compare_set(f"{_PREFIX}/key", "", secrets.token_hex(32)).decode()
    listener, address = listening_socket(store)
    watch = JobWatch(rank, key, process := process_name(), listener)
    _current[:] = [(weakref.ref(dist.group.WORLD), watch)]
    atexit.register(_close)
    uncaught.install(current_watch)
    processes.Finalize(None, _close, exitpriority=100)  # its children do not run atexit
    with transport_errors():
        store.set(f"{_PREFIX}/{rank}", f"{address} {process}")
    for other in sorted(neighbours(rank, size)):
        _link(watch, store, other)  # one that starts later links this rank
    return watch


def _link_members(watch: JobWatch, members: Sequence[int]) -> None:
    with transport_errors():
        store = store_connection("connect")
    for other in members:
        if other > watch.rank and other not in watch.linked():
            _link(watch, store, other)
    end = time.monotonic() + _LINK_SECONDS
    while set(members) - {watch.rank} - watch.linked() - set(watch.ended) and time.monotonic() < end:
        time.sleep(0.005)


def _link(watch: JobWatch, store: Store, rank: int) -> None:
    """Link a rank whose watch has started, or learn that its process has ended since."""
    key = f"{_PREFIX}/{rank}"
    with transport_errors():
        published = store.get(key).decode() if store.check([key]) else None
    if published is not None:
        address, process = published.split(" ", 1)
        if not watch.link(rank, address) and has_ended(process):
            watch.lose(rank, process)


# --- the end of this process ---------------------------------------------------------------------------


def _close() -> None:
    """Before the interpreter ends, because a thread that still runs then may abort the process."""
    if _current:
        error = getattr(sys, "last_value", None)  # of the exception that ends this process
        why = "" if error is None else ", after " + "".join(traceback.format_exception_only(error)).strip()
        _current.pop()[1].close(f"it has exited{why}")


def _forget() -> None:
    """In a forked child."""
    if _current:
        _current.pop()[1].forget()


os.register_at_fork(after_in_child=_forget)
atexit.register(end_abandoned_calls)  # what is registered later is called earlier
