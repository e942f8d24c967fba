"""The failure detector: one per process; it notices the end or silence of any rank of the job.

The detectors are connected to each other directly; the job's store is needed only to exchange their addresses,
so they work while its host does not answer. Each sends a heartbeat every second. If a process ends, its links
end, and its neighbours report that to all others, as they do if it is silent. A broadcast is forwarded from
link to link:

    0 --- 1   every rank has links to the ranks of its pipelines, and to those that differ by 1, 2, 4, 8 ... in
    |  X  |   the world, so that a message reaches all ranks in few hops even if some of them have ended
    3 --- 2

A process that connects without the key of the job is told a nonce, changes nothing, and is soon dropped.
"""

from __future__ import annotations

import math
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from penstock.runtime.failure.links import (
    Ended,
    Identity,
    Link,
    Listener,
    check_message,
    end_message,
)
from penstock.runtime.transport.network import connect
from penstock.traces.diagnose.rank_state import LostRank

# Heartbeats of other ranks: how long each is silent, without the time this process was suspended itself.


SILENT_SECONDS = 2.5
"""Two heartbeats are missing."""
_LATE_SECONDS = 1.0
"""A loop that is later than this was suspended, and knows nothing about the time in between."""


class Heartbeats:
    """The times of the last heartbeats; one thread at a time uses it."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._measured = time.monotonic()
        self._announced: set[int] = set()

    def measure(self, due: float) -> float:
        """Measure silences until now; heartbeats are read next, and were to be read by `due`."""
        now = time.monotonic()
        if now > max(self._measured, due) + _LATE_SECONDS:
            self._last = {rank: last + now - self._measured for rank, last in self._last.items()}
        self._measured = now
        return now

    def received(self, rank: int) -> None:
        """A message or heartbeat of a rank has arrived."""
        self._last[rank] = time.monotonic()

    def reported(self, rank: int, seconds: float) -> None:
        """Another rank reports that it has received nothing from this one for so long; 0 if it has again."""
        self._last[rank] = time.monotonic() - seconds
        if not seconds:
            del self._last[rank]

    def silence(self, rank: int) -> float:
        """Seconds since the last heartbeat; 0 if nothing is known of the rank."""
        return max(0.0, self._measured - self._last.get(rank, self._measured))

    def changes(self, ranks: Iterable[int], timeout: float) -> dict[int, float]:
        """The ranks that have become silent since the last call, and 0 for those that are silent no more."""
        found = {}
        for rank in ranks:
            seconds = self.silence(rank)
            if (seconds > min(timeout, SILENT_SECONDS)) != (rank in self._announced):
                self._announced ^= {rank}
                found[rank] = seconds if rank in self._announced else 0.0
        return found


_CONNECT_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_CLOSE_SECONDS = 10.0  # the thread ends at once, unless the machine is busy
_INTRODUCTION_SECONDS = 20.0  # a rank proves in milliseconds that it has the key, unless the machine is busy
_MOST_UNKNOWN = 128  # connections at once of which that is not known yet


class FailureDetector:
    """The detector of this process, whose name is `process`. `key` is known to the ranks of the job only."""

    def __init__(self, rank: int, key: str, process: str, listener: socket.socket) -> None:
        self.rank, self.process = rank, process
        self.processes: dict[int, str] = {rank: process}
        """The processes of the ranks that are or were linked."""
        self.ended: dict[int, Ended] = {}
        """The ranks whose process has ended or cannot be reached."""
        self.timeout = 300.0
        """Seconds without a heartbeat after which a rank is lost: those of the last pipeline."""
        self.aborted_by: int | None = None
        """The rank that aborted its process groups after a failed step, if one did."""
        self.failed_at = -math.inf
        """When a failure of a step became known here."""
        self.last_cause: tuple[float, dict[str, Any]] = (-math.inf, {})
        """When the last failure of another rank was received, and its message."""
        self.kept: Listener | None = None
        """A listener that exists as long as this detector."""
        self.active: Listener | None = None
        """The listener whose step was the last to begin."""
        self._own, self._listener = Identity(rank, key, process), listener
        listener.settimeout(0)
        self._heartbeats = Heartbeats()
        self._links: dict[socket.socket, Link] = {}
        self._forwarded: set[str] = set()
        self._count = 0
        self._lock = threading.RLock()
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._woken = socket.socketpair()
        self._woken.settimeout(0)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="penstock-detector", daemon=True)
        self._thread.start()

    # --- for other threads -------------------------------------------------------------------------

    def add_listener(self, listener: Listener) -> None:
        """Send all events to this listener, as long as it exists."""
        with self._lock:
            self._listeners.add(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Send it no more events."""
        with self._lock:
            self._listeners.discard(listener)

    def linked(self) -> set[int]:
        """The ranks with a link."""
        with self._lock:
            return {link.rank for link in self._links.values() if link.rank is not None}

    def link(self, rank: int, address: str) -> bool:
        """Connect to the failure detector of a rank at this address; false if nothing answers there."""
        try:
            link = Link(connect(address, _CONNECT_SECONDS), self._own, rank)
        except (OSError, ValueError):
            return False
        self._add(link)
        return True

    def lose(self, rank: int, process: str, network_error: str = "") -> None:
        """The process of a rank has ended without a message, or cannot be reached: tell all ranks."""
        ended = Ended(rank, process, "", network_error)
        with self._lock:
            self._forward(end_message(ended))
            self._wake()
        self._end(ended)

    def send(self, message: dict[str, Any], ranks: Iterable[int] | None = None) -> None:
        """Send to these linked ranks, or by default to all ranks of the job."""
        with self._lock:
            if ranks is None:
                self._count += 1
                self._forward(message | {"id": f"{self.rank}/{self._count}"})
            else:
                wanted = set(ranks)
                for link in self._links.values():
                    if link.rank in wanted:
                        wanted.discard(link.rank)
                        link.send(message)
            self._wake()

    def silence(self, rank: int) -> float:
        """Seconds since the last heartbeat of a rank; 0 if it is not linked and no other rank misses it."""
        with self._lock:
            return 0.0 if rank in self.ended else self._heartbeats.silence(rank)

    def lost(self, ranks: Iterable[int]) -> dict[int, LostRank]:
        """Return which of these ranks have ended or are silent, and how."""
        ended = {rank: self.ended[rank] for rank in ranks if rank in self.ended}
        found = {rank: LostRank(bool(each.network_error), str(each)) for rank, each in ended.items()}
        silent = [rank for rank in ranks if self.silence(rank) > SILENT_SECONDS]  # not of those that ended
        return found | {rank: LostRank(is_silent=True, text=self.describe_silence(rank)) for rank in silent}

    def describe_silence(self, rank: int) -> str:
        """Return how long a rank has been silent."""
        process = self.processes.get(rank, "unknown")
        return f"no heartbeat from its process ({process}) for {self.silence(rank):.0f} s"

    def close(self, reason: str) -> None:
        """Send all ranks that this process ends, and stop."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._forward(end_message(Ended(self.rank, self.process, reason)))
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def forget(self) -> None:
        """Close the descriptors in a forked child: they keep the connections of the parent alive."""
        self._stopped = True
        for each in (*self._links, self._listener, self._wake_up, self._woken):
            each.close()
        self._selector.close()

    # --- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        beat = time.monotonic()
        while not self._stopped:
            ready = self._selector.select(max(0.0, beat - time.monotonic()))
            with self._lock:
                now = self._heartbeats.measure(beat)
            for key, _ in ready:
                self._handle(key.fileobj)
            if now >= beat:
                beat = now + _BEAT_SECONDS
                self._beat()
        with self._lock:
            self.forget()

    def _handle(self, ready: Any) -> None:
        if ready is self._woken:
            with suppress(BlockingIOError):
                self._woken.recv(2**12)
            self._flush()
        elif ready is self._listener:
            self._accept()
        elif (link := self._links.get(ready)) is not None:
            self._read(link)

    def _accept(self) -> None:
        """Accept one connection; of too many that have not proved who they are, the oldest is dropped."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptors are left: the next beat tries again
            self._selector.unregister(self._listener)
            return
        with self._lock:
            self._add(Link(connection, self._own))
            unknown = [link for link in self._links.values() if link.rank is None and link.expected is None]
        if len(unknown) > _MOST_UNKNOWN:
            self._drop(unknown[0])

    def _beat(self) -> None:
        if self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ)
        with self._lock:
            for link in list(self._links.values()):
                if link.rank is not None:
                    link.send(None)
                elif self._is_overdue(link):
                    self._drop(link)
            silences = self._heartbeats.changes(self.linked() - set(self.ended), self.timeout)
            for rank, seconds in silences.items():  # the ranks without a link to it do not know
                about = {"rank": rank, "process": self.processes[rank], "seconds": seconds}
                self.send({"type": "silence", **about})
        self._flush()
        for listener in self._current_listeners():
            listener.on_beat()

    def _flush(self) -> None:
        with self._lock:
            for connection, link in self._links.items():
                link.flush()
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_unsent else 0)
                if connection not in self._selector.get_map():
                    self._selector.register(connection, events)
                elif self._selector.get_key(connection).events != events:
                    self._selector.modify(connection, events)

    def _is_overdue(self, link: Link) -> bool:
        """Whether the other end had time to prove who it is; a rank that this one calls may be suspended."""
        seconds = _INTRODUCTION_SECONDS if link.expected is None else max(_INTRODUCTION_SECONDS, self.timeout)
        return time.monotonic() > link.created_at + seconds

    def _read(self, link: Link) -> None:
        with self._lock:
            was_unknown = link.rank is None
            messages = link.receive()
            if link.rank is not None and (was_unknown or messages):
                self._heartbeats.received(link.rank)
            if link.rank is not None and was_unknown:  # it has proved that it is a rank of the job
                self.processes[link.rank] = link.process
                for ended in self.ended.values():
                    link.send(end_message(ended))
        try:
            for message in messages:
                if message is not None:
                    check_message(message)
                    self._receive(message, link)
        except (KeyError, TypeError, ValueError):  # not a message of this version
            link.reject()
        if not link.is_open:
            self._drop(link)
        self._flush()

    def _receive(self, message: dict[str, Any], link: Link) -> None:
        with self._lock:
            if "id" in message and not self._forward(message, link):
                return
        if message["type"] == "aborted":
            self.aborted_by = message["rank"]
        elif message["type"] == "end":
            self._end(Ended(*(message[name] for name in Ended._fields)))
        elif message["type"] == "silence":
            rank = message["rank"]
            with self._lock:
                if rank != self.rank and rank not in self.linked():
                    self.processes[rank] = message["process"]
                    self._heartbeats.reported(rank, message["seconds"])
        else:
            if message["type"] == "cause":
                self.last_cause = time.monotonic(), message
            for listener in self._current_listeners():
                listener.on_message(message)

    def _drop(self, link: Link) -> None:
        with self._lock:
            if link.connection in self._selector.get_map():
                self._selector.unregister(link.connection)
            del self._links[link.connection]
            link.close()
            if link.rank is None or link.rank in self.ended or self._stopped:
                return
        self.lose(link.rank, self.processes[link.rank], link.network_error)

    def _end(self, ended: Ended) -> None:
        if ended.rank not in self.ended:
            self.ended[ended.rank] = ended
            for listener in self._current_listeners():
                listener.on_end(ended)

    # --- with the lock -----------------------------------------------------------------------------

    def _add(self, link: Link) -> None:
        with self._lock:
            self._links[link.connection] = link
            self._wake()

    def _forward(self, message: dict[str, Any], source: Link | None = None) -> bool:
        """Send a broadcast over all links but its source; false if that was done before."""
        if message["id"] in self._forwarded:
            return False
        self._forwarded.add(message["id"])
        for link in self._links.values():
            if link is not source and link.rank is not None:
                link.send(message)
        return True

    def _current_listeners(self) -> list[Listener]:
        with self._lock:
            return list(self._listeners)

    def _wake(self) -> None:
        with suppress(OSError):  # closed
            self._wake_up.send(b".")
