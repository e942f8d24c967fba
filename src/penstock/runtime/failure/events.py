"""The events of a job that a watch tells its listeners: messages, ended processes, and the passing of time."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Ended", "Listener", "end_message"]


class Ended:
    """How the process of a rank ended; `process` names it, `reason` is empty if it said nothing."""

    def __init__(self, rank: int, process: str, reason: str) -> None:
        self.rank, self.process, self.reason = rank, process, reason

    def __str__(self) -> str:
        how = f"has ended: {self.reason}" if self.reason else "ended without a message: killed, or crashed"
        return f"its process ({self.process}) {how}"


def end_message(ended: Ended) -> dict[str, Any]:
    """The message to all ranks that a process has ended."""
    return {"type": "end", "id": f"{ended.rank}/end", **vars(ended)}


class Listener(Protocol):
    """Receives the events of the job, on the thread of the watch."""

    def on_message(self, message: dict[str, Any]) -> None:
        """A message from another rank."""

    def on_end(self, ended: Ended) -> None:
        """The process of another rank has ended."""

    def on_beat(self) -> None:
        """A second has passed."""
