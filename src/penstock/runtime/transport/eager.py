"""Short messages in host memory, over TCP connections between all ranks, sent without waiting for the receive.

gloo sends a message once its receive is posted, and moves it with a thread of its own: on one host that takes
several times as long as a socket. A short message is therefore sent eagerly, as MPI calls it: the network keeps
it until it is received. Long messages stay with gloo, whose thread moves them while a rank computes.

    | tag | length | bytes |   | tag | length | bytes | ...
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from penstock.runtime.transport.network import connect, listening_socket, without_delay
from penstock.runtime.transport.transport_errors import Pending, TransportError

EAGER_BYTES = 2**16
"""The longest message that is sent eagerly."""

_HEADER = struct.Struct("<qq")
_HELLO = struct.Struct("<32sq")
_HELLO_SECONDS = 5.0  # a rank sends it at once; a program that scans ports may send nothing
_BUFFER_BYTES = 4 * EAGER_BYTES


def _timed_out(seconds: float) -> TransportError:
    return TransportError(f"Timed out after {seconds:g} s", timed_out=True)


def host_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on a CPU."""
    array: Any = tensor.numpy()
    return memoryview(array.reshape(-1).view("uint8"))


class EagerMessages:
    """The connections of one rank to all others. `key` is known to these ranks only."""

    def __init__(self, store: Store, rank: int, size: int, key: str, timeout: timedelta) -> None:
        self._connections: dict[int, _Connection] = {}
        seconds = timeout.total_seconds()
        listener, address = listening_socket(store)
        store.set(f"{rank}", address)
        try:
            with listener:
                listener.settimeout(seconds)
                for peer in range(rank):
                    connection = connect(store.get(f"{peer}").decode(), seconds)
                    self._add(peer, connection, seconds)
                    connection.sendall(_HELLO.pack(key.encode(), rank))
                while len(self._connections) < size - 1:
                    self._accept(listener, key, seconds)
        except OSError as error:
            self.close()
            raise TransportError(f"a connection to another rank could not be made ({error})") from error
        except RuntimeError:  # of the store
            self.close()
            raise

    def _accept(self, listener: socket.socket, key: str, seconds: float) -> None:
        connection = without_delay(listener.accept()[0])
        connection.settimeout(min(seconds, _HELLO_SECONDS))
        hello = b""
        with suppress(OSError):
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        if len(hello) == _HELLO.size and (said := _HELLO.unpack(hello))[0] == key.encode():
            self._add(said[1], connection, seconds)
        else:  # not a rank of this pipeline
            connection.close()

    def _add(self, peer: int, connection: socket.socket, seconds: float) -> None:
        connection.settimeout(None)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)  # 0 is none
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._connections[peer] = _Connection(connection, peer, seconds)

    def send(self, data: memoryview, peer: int, tag: int) -> Pending:
        """Send bytes; their memory can be used again at once."""
        return self._connections[peer].send(tag, data)

    def receive(self, target: memoryview, peer: int, tag: int) -> Pending:
        """Receive as many bytes as the target has; messages with the same tag arrive in order."""
        return _Pending(partial(self._connections[peer].receive, tag, target))

    def abort(self) -> None:
        """End every wait, here and on the other ranks; any thread may call it."""
        for connection in list(self._connections.values()):
            connection.abort()

    def close(self) -> None:
        """End and release the connections; what was sent still arrives."""
        self.abort()
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()


class _Pending:
    """A message whose `wait` is the given function."""

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


_SENT = _Pending(lambda: None)  # the network has taken the message, and its memory can be used again


class _Connection:
    """The connection to one peer."""

    def __init__(self, connection: socket.socket, peer: int, seconds: float) -> None:
        self.socket = connection
        self._peer, self._seconds = peer, seconds
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0
        """The part of the buffer that is received and not taken."""
        self._early: defaultdict[int, deque[bytes]] = defaultdict(deque)
        """Messages that were received before they were waited for, by tag."""
        self._unsent: deque[_Unsent] = deque()
        """What the network did not take at once; a thread sends it."""
        self._lock = threading.Lock()

    # --- sending -----------------------------------------------------------------------------------

    def send(self, tag: int, data: memoryview) -> Pending:
        """Send a message, in order."""
        header = _HEADER.pack(tag, len(data))
        with self._lock:
            sent = 0 if self._unsent else self._sent(header, data)
            if sent == len(header) + len(data):
                return _SENT
            rest = _Unsent(memoryview(header + data)[sent:], self._seconds)
            self._unsent.append(rest)
            if len(self._unsent) == 1:
                threading.Thread(target=self._send_rest, name="penstock-send", daemon=True).start()
            return rest

    def _sent(self, header: bytes, data: memoryview) -> int:
        """Send what the network takes at once; return the number of bytes."""
        try:
            return self.socket.sendmsg([header, data], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from error

    def _send_rest(self) -> None:
        while True:
            first = self._unsent[0]
            try:
                self.socket.sendall(first.data)
            except OSError as error:
                first.error = error
            first.is_sent.set()
            with self._lock:
                self._unsent.popleft()
                if not self._unsent:
                    return

    # --- receiving ---------------------------------------------------------------------------------

    def receive(self, tag: int, target: memoryview) -> None:
        """Wait for the next message with this tag."""
        early = self._early.get(tag)
        data = early.popleft() if early else self._next(tag)
        if len(data) != len(target):
            raise TransportError(
                f"rank {self._peer} sent {len(data)} bytes with tag {tag}, and this rank waits for "
                f"{len(target)} bytes"
            )
        target[:] = data

    def _next(self, tag: int) -> memoryview:
        """The next message with this tag from the network; those before it are early."""
        while True:
            self._fill(_HEADER.size)
            received, length = _HEADER.unpack_from(self._buffer, self._begin)
            if not 0 <= length <= EAGER_BYTES:
                raise TransportError(f"rank {self._peer} sent something else than a short message")
            self._fill(_HEADER.size + length)
            begin = self._begin + _HEADER.size
            data = self._buffer[begin : begin + length]
            self._begin = begin + length
            if received == tag:
                return data
            self._early[received].append(bytes(data))

    def _fill(self, needed: int) -> None:
        """Receive until the buffer has this many bytes."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin + needed > len(self._buffer):
            rest = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        while self._end - self._begin < needed:
            self._end += self._received()

    def _received(self) -> int:
        try:
            count = self.socket.recv_into(self._buffer[self._end :])
        except BlockingIOError as error:
            raise _timed_out(self._seconds) from error
        except OSError as error:
            raise self._lost(error) from error
        if not count:
            raise self._lost("closed by the other end")
        return count

    def _lost(self, why: object) -> TransportError:
        return TransportError(f"the connection to rank {self._peer} broke: {why}")

    def abort(self) -> None:
        """End every wait on both ends."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class _Unsent:
    """A message, or the rest of one, that a thread sends; it has a copy of the bytes."""

    def __init__(self, data: memoryview, seconds: float) -> None:
        self.data, self._seconds = data, seconds
        self.is_sent = threading.Event()
        self.error: OSError | None = None

    def wait(self) -> None:
        """Wait until the network has taken it."""
        if not self.is_sent.wait(self._seconds):
            raise _timed_out(self._seconds)
        if self.error is not None:
            raise TransportError(f"a message could not be sent: {self.error}") from self.error
