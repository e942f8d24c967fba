"""The events of a job that the watch reports: a message, the end of a process, a second that has passed."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Ended", "Listener", "end_message"]


class Ended:
    """How the process of a rank ended; `process` names it, `reason` is empty if it said nothing.

    With `network_error` the network gave up the connection to it, and nobody knows whether the process runs.
    """

    def __init__(self, rank: int, process: str, reason: str, network_error: str = "") -> None:
        self.rank, self.process, self.reason, self.network_error = rank, process, reason, network_error

    @property
    def verb(self) -> str:
        """What the rank does, to follow its name."""
        return "does not answer" if self.network_error else "has ended"

    def __str__(self) -> str:
        if self.network_error:
            error = self.network_error
            return (
                f"the connection to its process ({self.process}) broke ({error}): its host or the network fails"
            )
        how = f"has ended: {self.reason}" if self.reason else "ended without a message: killed, or crashed"
        return f"its process ({self.process}) {how}"


def end_message(ended: Ended) -> dict[str, Any]:
    """The broadcast that says so."""
    return {"type": "end", "id": f"{ended.rank}/end", **vars(ended)}


class Listener(Protocol):
    """Receives the events of the job, on the thread of the watch."""

    def on_message(self, message: dict[str, Any]) -> None:
        """A message from another rank."""

    def on_end(self, ended: Ended) -> None:
        """The process of another rank has ended."""

    def on_beat(self) -> None:
        """A second has passed."""
