"""Heartbeats of other ranks: how long each is silent, without the time this process was suspended itself."""

from __future__ import annotations

import time
from collections.abc import Iterable

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
