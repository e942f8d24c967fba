"""Connections between the watches of two ranks: lines of JSON over TCP, sent and received without blocking."""

from __future__ import annotations

import errno
import json
import os
import socket
from typing import Any

from penstock.runtime.transport.addresses import connect, without_delay

__all__ = ["Link", "connect_link", "neighbours"]

_CONNECT_SECONDS = 5.0
_LONGEST_LINE = 2**24
_NETWORK_ERRORS = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
"""Of a connection whose packets are lost. The end of a process ends or resets its connections."""


class Link:
    """One connection to another rank. It is closed by the other end, by an error, or by `close`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None
        """The world rank at the other end, once it has introduced itself."""
        self.is_open = True
        self.network_error = ""
        """Why the network gave up the connection, if it did."""
        self._received = bytearray()
        self._unsent = bytearray()
        without_delay(connection).settimeout(0)

    @property
    def has_unsent(self) -> bool:
        """Whether something is left to send."""
        return bool(self._unsent)

    def send(self, message: dict[str, Any] | None) -> None:
        """Send a message, or a heartbeat; what the network does not take now is sent by `flush`."""
        self._unsent += (b"" if message is None else json.dumps(message).encode()) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much as the network takes now."""
        try:
            while self._unsent and self.is_open:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(error)
            self._unsent.clear()  # the end of the connection is noticed when it is read

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived; `is_open` is false if they are the last ones."""
        try:
            while self.is_open:
                data = self.connection.recv(2**16)
                self.is_open = bool(data)
                self._received += data
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(error)
            self.is_open = False
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        if len(rest) > _LONGEST_LINE:
            self.is_open = False
        try:
            return [message for line in lines if line and isinstance(message := json.loads(line), dict)]
        except ValueError:  # not another rank
            self.is_open = False
            return []

    def _fail(self, error: OSError) -> None:
        """Keep an error of the network, which the system gives only once."""
        if error.errno in _NETWORK_ERRORS:
            self.network_error = os.strerror(error.errno)

    def close(self) -> None:
        """End the connection."""
        self.is_open = False
        self.connection.close()


def connect_link(address: str) -> Link | None:
    """A link to the rank at `host:port`; None if it does not answer."""
    try:
        return Link(connect(address, _CONNECT_SECONDS))
    except (OSError, ValueError):
        return None


def neighbours(rank: int, size: int) -> set[int]:
    """The ranks of the world that differ by a power of two, in a ring."""
    steps = (2**power for power in range(size.bit_length()))
    return {(rank + sign * step) % size for step in steps for sign in (1, -1)} - {rank}
