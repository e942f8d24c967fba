"""When a rank was last heard: measures the silence of the others, without the time it was suspended itself."""

from __future__ import annotations

import time
from collections.abc import Iterable

__all__ = ["SILENT_SECONDS", "Heartbeats"]

SILENT_SECONDS = 2.5
"""Two heartbeats are missing."""
_LATE_SECONDS = 1.0
"""A loop that is later than this was suspended, and knows nothing about the time in between."""


class Heartbeats:
    """The times of the last heartbeats; one thread at a time uses it."""

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}
        self._looked = time.monotonic()
        self._announced: set[int] = set()

    def look(self, due: float) -> float:
        """Measure silences until now, when what has arrived is read; it was to be read by `due`."""
        now = time.monotonic()
        if now > max(self._looked, due) + _LATE_SECONDS:
            self._heard = {rank: heard + now - self._looked for rank, heard in self._heard.items()}
        self._looked = now
        return now

    def hear(self, rank: int) -> None:
        """A rank has sent something."""
        self._heard[rank] = time.monotonic()

    def learn(self, rank: int, seconds: float) -> None:
        """Another rank says that it has heard nothing from this one for so long; 0 if it hears it again."""
        self._heard[rank] = time.monotonic() - seconds
        if not seconds:
            del self._heard[rank]

    def silence(self, rank: int) -> float:
        """Seconds since the last heartbeat; 0 if nothing is known of the rank."""
        return max(0.0, self._looked - self._heard.get(rank, self._looked))

    def news(self, ranks: Iterable[int], timeout: float) -> dict[int, float]:
        """The ranks that have become silent since the last call, and 0 for those that are heard again."""
        found = {}
        for rank in ranks:
            seconds = self.silence(rank)
            if (seconds > min(timeout, SILENT_SECONDS)) != (rank in self._announced):
                self._announced ^= {rank}
                found[rank] = seconds if rank in self._announced else 0.0
        return found
