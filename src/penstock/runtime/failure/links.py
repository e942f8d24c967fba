"""Connections between the watches of two ranks: lines of JSON over TCP, sent and received without blocking."""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from typing import Any

__all__ = ["Link", "connect_link", "listening_socket", "neighbours"]

_CONNECT_SECONDS = 5.0
_LONGEST_LINE = 2**24
_SIOCGIFADDR = 0x8915  # the request of Linux for the address of an interface


class Link:
    """One connection to another rank. It is closed by the other end, by an error, or by `close`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None
        """The world rank at the other end, once it has introduced itself."""
        self.is_open = True
        self._received = bytearray()
        self._unsent = bytearray()
        connection.settimeout(0)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

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
        except OSError:
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
        except OSError:
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

    def close(self) -> None:
        """End the connection."""
        self.is_open = False
        self.connection.close()


def listening_socket(store: Any) -> tuple[socket.socket, str]:
    """A socket at which other ranks can connect to this process, and its address for them."""
    listener = socket.socket()
    try:
        host = _own_address(store)
        listener.bind((host, 0))
    except OSError:  # an unknown name or interface, or a host without IPv4
        host = socket.gethostname()
        listener.bind(("", 0))
    listener.listen(128)
    listener.settimeout(0)
    return listener, f"{host}:{listener.getsockname()[1]}"


def connect_link(address: str) -> Link | None:
    """A link to the rank at `host:port`; None if it does not answer."""
    host, port = address.rsplit(":", 1)
    try:
        return Link(socket.create_connection((host, int(port)), _CONNECT_SECONDS))
    except (OSError, ValueError):
        return None


def _own_address(store: Any) -> str:
    """The address of this host in the network of the job: of gloo's interface, or of the route to the store."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        import fcntl  # noqa: PLC0415 -- not on every system

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "host"):
        return "127.0.0.1"  # a store in a file or in memory: all ranks are on this host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))
        return str(probe.getsockname()[0])


def neighbours(rank: int, size: int) -> set[int]:
    """The ranks of the world that differ by a power of two, in a ring."""
    steps = (2**power for power in range(size.bit_length()))
    return {(rank + sign * step) % size for step in steps for sign in (1, -1)} - {rank}
