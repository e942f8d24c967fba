"""Replies of a worker on its pipe: the kind, a line feed, and the text as it is: JSON is encoded once."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection

STOPPED_EARLY = "stopped before a schedule was found"
"""The error of a search that the user stops too early."""


@dataclass(frozen=True)
class Reply:
    """A part of the answer of a worker: JSON text, or an error of the request."""

    kind: str
    """`result`, `progress`, `error` (of the user), `memory`, `failure` (ours)."""
    text: str

    @classmethod
    def of_bytes(cls, sent: bytes) -> Reply:
        """What `send_reply` sent."""
        kind, _, text = sent.decode().partition("\n")
        return cls(kind, text)


def send_reply(connection: Connection, kind: str, text: str) -> None:
    """Send a reply from the worker to the server."""
    connection.send_bytes(f"{kind}\n{text}".encode())
