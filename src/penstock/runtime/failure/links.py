"""Connections between the detectors of two ranks: authenticated lines of JSON over TCP, which never block.

Both ends know the key of the job and never send it. Each end sends a nonce, and both derive one key for each
direction from the key of the job, the two nonces and the direction. Every further line begins with its
HMAC-SHA256 under that key and its number, so that no line can be forged, altered, repeated, or sent back:

    connecting end                      listening end
    nonce                          -->
                                   <--  nonce
    HMAC {"rank", "to", "process"} -->
                                   <--  HMAC {"rank", "to", "process"}, once it has checked the other end's
    HMAC message                   <->  HMAC message
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from penstock.errors import FailureKind
from penstock.runtime.transport.network import without_delay
from penstock.traces.diagnose.rank_state import Wait

# The events that the failure detector reports: a message, the end of a process, a second that has passed.


@dataclass(frozen=True)
class FailureCause:
    """Why and where a step failed."""

    rank: int
    """The rank of the pipeline `members` that failed."""
    kind: FailureKind
    call_number: int
    """The number of the step or eval, in which both are counted."""
    message: str
    details: str = ""
    """The original traceback."""
    action: str = ""
    stage: int | None = None
    microbatch: int | None = None
    process: str = ""
    """The process of the rank, if it ended or does not answer."""
    members: tuple[int, ...] = ()
    """The world ranks of the pipeline."""
    world_rank: int = -1
    reporter: int = -1
    """The world rank that noticed it."""
    call_name: str = ""
    """The step, eval or collective for messages, in which only steps are counted."""
    place: str = ""
    """Where it failed if that is in no action, to follow the rank."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank is doing."""

    mode: str
    """`step`, `eval` or the name of a collective, or `outside` if it runs none of them."""
    call_number: int
    """The number of its current or last step or eval."""
    position: int
    """The position in its list."""
    awaited: Wait | None
    """What it waits for; None if it computes."""
    call_name: str = ""
    """Its current or last step or eval for messages."""


_LARGEST = 2**53
_QUESTION = {"question": str, "rank": int, "group": tuple[int, ...]}
_SHAPES: dict[str, dict[str, Any]] = {
    "aborted": {"rank": int},
    "answer": {"question": str, "rank": int, "text": str},
    "broken": {**_QUESTION, "connection": str},
    "cause": {"connection": str, "cause": FailureCause},
    "end": {"rank": int, "process": str, "reason": str, "network_error": str},
    "silence": {"rank": int, "process": str, "seconds": float},
    "state": {"rank": int},
    "status": {"connection": str, "rank": int, "status": RankStatus},
    "unmet": {**_QUESTION, "stages": str, "seconds": float, "are_replicas": bool},
    "withdrawn": {"rank": int, "stages": str},
}
"""The fields of each type of message."""


class Ended(NamedTuple):
    """How the process of a rank ended; `process` names it, `reason` is empty if it said nothing.

    With `network_error` the network gave up the connection to it, and nobody knows whether the process runs.
    """

    rank: int
    process: str
    reason: str
    network_error: str = ""

    @property
    def verb(self) -> str:
        """What the rank does, to follow its name."""
        return "does not answer" if self.network_error else "has ended"

    def __str__(self) -> str:
        if self.network_error:
            broke = f"the connection to its process ({self.process}) broke ({self.network_error})"
            return f"{broke}: its host or the network fails"
        how = f"has ended: {self.reason}" if self.reason else "ended without a message: killed, or crashed"
        return f"its process ({self.process}) {how}"


def end_message(ended: Ended) -> dict[str, Any]:
    """Return the broadcast that says so."""
    return {"type": "end", "id": f"{ended.rank}/end", **ended._asdict()}


def check_message(message: dict[str, Any]) -> None:
    """Raise a ValueError unless a message has a known type, and the fields of that type."""
    kind = message.get("type")
    shape = _SHAPES.get(kind) if isinstance(kind, str) else None
    fields = {name: value for name, value in message.items() if name not in ("type", "id")}
    if shape is None or not _fits(fields, shape) or not isinstance(message.get("id", ""), str):
        raise ValueError("not a message of this version")


def _fits(value: Any, wanted: Any) -> bool:
    """Return whether a value of JSON can be read as this type, or has the keys of this dict with its types."""
    if isinstance(wanted, UnionType):
        return any(_fits(value, each) for each in get_args(wanted))
    if is_dataclass(wanted):
        return _fits(value, get_type_hints(wanted))
    if isinstance(wanted, dict):
        is_object = isinstance(value, dict) and value.keys() == wanted.keys()
        return is_object and all(_fits(value[name], wanted[name]) for name in wanted)
    if get_origin(wanted) is tuple:
        return isinstance(value, list) and all(_fits(each, get_args(wanted)[0]) for each in value)
    if issubclass(wanted, Enum):
        return isinstance(value, str) and value in {each.value for each in wanted}
    if type(value) in (int, float) and not -_LARGEST < value < _LARGEST:  # nor NaN
        return False
    if wanted is float:
        return type(value) in (int, float)
    return type(value) is wanted  # True is no int


class Listener:
    """Receives the events of the job, on the thread of the failure detector; handles none by default."""

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a message from another rank."""

    def on_end(self, ended: Ended) -> None:
        """Handle the end of another rank's process."""

    def on_beat(self) -> None:
        """Handle that a second has passed."""


_LONGEST_LINE = 2**24
_LONGEST_INTRODUCTION = 2**12
"""Of an end that has not proved that it knows the key."""
_READ_BYTES = 2**18
_NONCE = re.compile(rb"[0-9a-f]{64}")
_SEAL_BYTES = 64
_NETWORK_ERRORS = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
"""Of a connection whose packets are lost. The end of a process ends or resets its connections."""


class Identity(NamedTuple):
    """Who this process is: its world rank, the key that only the ranks of the job know, and its name."""

    rank: int
    key: str
    process: str


class _Direction:
    """The lines of one direction of a connection, sealed with its key and in their order."""

    def __init__(self, key: str, name: str, nonces: tuple[str, str]) -> None:
        self._key = hmac.digest(key.encode(), " ".join(["penstock link", name, *nonces]).encode(), "sha256")
        self._count = 0

    def seal(self, text: bytes) -> bytes:
        """The seal of the next line."""
        self._count += 1
        return hmac.digest(self._key, b"%d %b" % (self._count, text), "sha256").hex().encode()


class Link:
    """One connection to another rank. It is closed by the other end, by an error, or by `close`.

    `expected` is the world rank that this process has connected to; None if the other end has connected.
    """

    def __init__(self, connection: socket.socket, own: Identity, expected: int | None = None) -> None:
        self.connection, self.expected = connection, expected
        self.rank: int | None = None
        """The world rank at the other end, once it has proved that it knows the key."""
        self.process = ""
        """The name of its process, from then on."""
        self.is_open = True
        self.network_error = ""
        """Why the network gave up the connection, if it did."""
        self.created_at = time.monotonic()
        self._own, self._nonce = own, secrets.token_hex(32)
        self._directions: tuple[_Direction, _Direction] | None = None
        """Of what is sent and of what is received, once the nonce of the other end is known."""
        self._received = bytearray()
        self._unsent = bytearray(self._nonce.encode() + b"\n")
        without_delay(connection).settimeout(0)

    @property
    def has_unsent(self) -> bool:
        """Whether something is left to send."""
        return bool(self._unsent)

    def send(self, message: dict[str, Any] | None) -> None:
        """Send a message, or a heartbeat; what the network does not take now is sent by `flush`."""
        assert self._directions is not None, "the other end is known"
        text = b"" if message is None else json.dumps(message).encode()
        self._unsent += self._directions[0].seal(text) + text + b"\n"
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

    def receive(self) -> list[dict[str, Any] | None]:
        """Messages and heartbeats that have arrived; `is_open` is false if they are the last ones."""
        messages: list[dict[str, Any] | None] = []
        try:
            data = self.connection.recv(_LONGEST_INTRODUCTION if self.rank is None else _READ_BYTES)
        except BlockingIOError:
            return messages
        except OSError as error:
            self._fail(error)
            data = b""
        self.is_open = bool(data)
        self._received += data
        lines = []
        if b"\n" in data:
            *lines, self._received = self._received.split(b"\n")
        try:
            for line in lines:
                self._take(bytes(line), messages)
            self._check_length(self._received)
        except ValueError:
            self.reject()
        return messages

    def reject(self) -> None:
        """End the connection after something that no rank sends."""
        self.is_open = False
        self.network_error = self.network_error or "invalid message"

    def close(self) -> None:
        """End the connection."""
        self.is_open = False
        self.connection.close()

    def _fail(self, error: OSError) -> None:
        """Keep an error of the network, which the system gives only once."""
        if error.errno in _NETWORK_ERRORS:
            self.network_error = os.strerror(error.errno)

    # --- lines; a ValueError ends the connection -----------------------------------------------------

    def _check_length(self, line: bytes | bytearray) -> None:
        if len(line) > (_LONGEST_INTRODUCTION if self.rank is None else _LONGEST_LINE):
            raise ValueError("a line is too long")

    def _take(self, line: bytes, messages: list[dict[str, Any] | None]) -> None:
        """Check a line before anything in it is used, and add its message."""
        self._check_length(line)
        if self._directions is None:
            self._take_nonce(line)
            return
        seal, text = line[:_SEAL_BYTES], line[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._directions[1].seal(text)):
            raise ValueError("a line is not from the other end, or not the next one")
        try:
            message = json.loads(text) if text else None
        except RecursionError as error:
            raise ValueError("a message is nested too deeply") from error
        if message is not None and not isinstance(message, dict):
            raise ValueError("a message is an object")
        if self.rank is None:
            self._take_introduction(message or {})
        else:
            messages.append(message)

    def _take_nonce(self, line: bytes) -> None:
        if not _NONCE.fullmatch(line):
            raise ValueError("a nonce has 64 hexadecimal digits")
        listens = self.expected is None
        nonces = (line.decode(), self._nonce) if listens else (self._nonce, line.decode())
        to, back = (_Direction(self._own.key, f"{name} listener", nonces) for name in ("to", "from"))
        self._directions = (back, to) if listens else (to, back)
        if self.expected is not None:
            self._introduce(self.expected)

    def _take_introduction(self, message: dict[str, Any]) -> None:
        rank, to, process = (message.get(name) for name in ("rank", "to", "process"))
        if type(rank) is not int or type(to) is not int or type(process) is not str:
            raise ValueError("an introduction has two ranks and a name")
        if to != self._own.rank or rank == to or self.expected not in (None, rank):
            raise ValueError("the other end is not the rank that was meant, or means another one")
        if self.expected is None:
            self._introduce(rank)
        self.rank, self.process = rank, process

    def _introduce(self, to: int) -> None:
        self.send({"rank": self._own.rank, "to": to, "process": self._own.process})


def neighbours(rank: int, size: int) -> set[int]:
    """The ranks of the world that differ by a power of two, in a ring."""
    steps = (2**power for power in range(size.bit_length()))
    return {(rank + sign * step) % size for step in steps for sign in (1, -1)} - {rank}
