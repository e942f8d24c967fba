"""Promise: both ends of a link prove that they know the key; a lost network is told from an ended process."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from penstock.runtime.failure.links import Identity, Link
from tests.runtime.failure.test_monitor import linked_detectors, monitor_of, until

ONE, TWO = Identity(1, "the key", "process 1"), Identity(2, "the key", "process 2")


def link_with(**effects: Any) -> Link:
    """A link whose connection does this at each call."""
    connection = mock.Mock(**{f"{name}.side_effect": effect for name, effect in effects.items()})
    return Link(connection, ONE)


@pytest.mark.parametrize(
    ("number", "text"),
    [(errno.ETIMEDOUT, "Connection timed out"), (errno.EHOSTUNREACH, "No route to host")],
)
def test_an_error_of_the_network_is_kept_whichever_call_gets_it(number: int, text: str) -> None:
    error = OSError(number, "")
    receiving = link_with(recv=error)
    assert receiving.receive() == []
    sending = link_with(send=error, recv=[b""])  # the system gives an error once
    sending.flush()
    assert sending.receive() == []
    for link in (receiving, sending):
        assert not link.is_open
        assert link.network_error == text


@pytest.mark.parametrize("effect", [[b""], ConnectionResetError(errno.ECONNRESET, "")])
def test_the_end_of_a_process_is_no_error_of_the_network(effect: Any) -> None:
    link = link_with(recv=effect)
    link.receive()
    assert not link.is_open
    assert not link.network_error


def test_a_rank_that_the_network_does_not_reach_is_not_said_to_have_ended() -> None:
    with linked_detectors(3) as detectors:
        monitors = [monitor_of(detector, 3, []) for detector in detectors[:2]]
        detectors[0].lose(2, "process 2", "Connection timed out")
        until(lambda: 2 in detectors[1].ended)
        for monitor in monitors:
            cause = monitor.wait_for_cause(20)
            assert cause is not None
            assert (cause.rank, cause.kind) == (2, "timeout")
            assert cause.message == (
                "the connection to its process (process 2) broke (Connection timed out): its host or the "
                "network fails"
            )
            assert monitor.ended()[2].verb == "does not answer"


# --- authentication ------------------------------------------------------------------------------------


class Wire:
    """A connecting end and a listening end; what they send passes through the test."""

    def __init__(self, connecting: Identity = ONE, listening: Identity = TWO, expected: int = 2) -> None:
        self._sockets = [socket.socketpair() for _ in range(2)]
        self.ends = [
            Link(self._sockets[0][0], connecting, expected),
            Link(self._sockets[1][0], listening),
        ]
        self.sent: list[list[bytes]] = [[], []]
        for _, outer in self._sockets:
            outer.settimeout(0)

    def take(self, end: int) -> list[bytes]:
        """The lines that an end has sent since."""
        self.ends[end].flush()
        try:
            lines = self._sockets[end][1].recv(2**20).splitlines(keepends=True)
        except (BlockingIOError, ConnectionResetError):
            lines = []
        self.sent[end] += lines
        return lines

    def give(self, end: int, *lines: bytes) -> list[Any]:
        """What an end makes of these lines."""
        self._sockets[end][1].settimeout(20)
        self._sockets[end][1].sendall(b"".join(lines))
        self._sockets[end][1].settimeout(0)
        return self.ends[end].receive()

    def introduce(self) -> tuple[int | None, int | None]:
        """Exchange all lines; gives who each end takes the other for."""
        for _ in range(3):
            for end in (0, 1):
                if (lines := self.take(end)) and self.ends[1 - end].is_open:
                    assert self.give(1 - end, *lines) == []
        return self.ends[0].rank, self.ends[1].rank

    def close(self) -> None:
        for inner, outer in self._sockets:
            inner.close()
            outer.close()


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    """Makes wires, and closes them after the test."""
    made: list[Wire] = []

    def make(*args: Any) -> Wire:
        made.append(Wire(*args))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_two_ends_with_the_key_know_each_other_and_never_send_it(wire: Callable[..., Wire]) -> None:
    one = wire()
    assert one.introduce() == (2, 1)
    assert [end.process for end in one.ends] == ["process 2", "process 1"]
    for sender in (0, 1):
        one.ends[sender].send({"type": "state", "rank": 1})
        one.ends[sender].send(None)
        assert one.give(1 - sender, *one.take(sender)) == [{"type": "state", "rank": 1}, None]
    assert all(b"the key" not in line for lines in one.sent for line in lines)
    assert [len(lines[0]) for lines in one.sent] == [65, 65]
    again = wire()
    again.introduce()
    assert not {line for lines in one.sent for line in lines} & {line for lines in again.sent for line in lines}


@pytest.mark.parametrize(
    ("connecting", "listening", "expected", "lines_sent"),
    [
        (ONE._replace(key="other"), TWO, 2, [2, 1]),
        (ONE, TWO._replace(key="other"), 2, [2, 1]),
        (ONE, TWO, 3, [2, 1]),  # another rank than the one that was meant
        (ONE, ONE, 1, [2, 1]),  # itself
    ],
)
def test_an_end_without_the_key_or_with_another_rank_is_told_only_a_nonce(
    wire: Callable[..., Wire], connecting: Identity, listening: Identity, expected: int, lines_sent: list[int]
) -> None:
    one = wire(connecting, listening, expected)
    assert one.introduce() == (None, None)
    assert not one.ends[1].is_open
    assert [len(lines) for lines in one.sent] == lines_sent


@pytest.mark.parametrize("end", [0, 1])
def test_an_end_does_not_take_its_own_lines_for_those_of_a_rank(wire: Callable[..., Wire], end: int) -> None:
    one = wire(ONE, TWO)
    for _ in range(3):
        if (lines := one.take(end)) and one.ends[end].is_open:
            one.give(end, *lines)
    assert one.ends[end].rank is None
    assert len(one.sent[end]) == 2 - end  # a listening end says nothing but its nonce


def test_an_end_does_not_take_the_lines_of_one_listener_for_those_of_another(wire: Callable[..., Wire]) -> None:
    """Two listening ends, each of which is told what the other one says."""
    first, second = wire(ONE, ONE), wire(ONE, TWO)
    for here, there in ((first, second), (second, first)):
        there.give(1, *here.take(1))
    assert first.take(1) == second.take(1) == []
    assert first.ends[1].rank is second.ends[1].rank is None


def test_recorded_lines_are_of_no_use_in_another_connection(wire: Callable[..., Wire]) -> None:
    recorded, other = wire(), wire()
    recorded.introduce()
    for end in (0, 1):
        other.give(end, *recorded.sent[1 - end])
        assert other.ends[end].rank is None
        assert not other.ends[end].is_open


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0], lines[0]],
        lambda lines: [lines[1]],
        lambda lines: [lines[0].replace(b"1", b"2")],
        lambda lines: [lines[0], b"\n"],  # a heartbeat without a seal
        lambda lines: [lines[0], b"[" * 200_000 + b"\n"],
        lambda lines: [lines[0], b"\xff" * 100 + b"\n"],
    ],
)
def test_a_line_that_is_repeated_left_out_altered_or_forged_ends_the_link(
    wire: Callable[..., Wire], change: Callable[[list[bytes]], list[bytes]]
) -> None:
    one = wire()
    one.introduce()
    for rank in (1, 1):
        one.ends[0].send({"rank": rank})
    assert one.give(1, *change(one.take(0))) in ([], [{"rank": 1}])
    assert not one.ends[1].is_open
    assert one.ends[1].network_error == "invalid message"


@pytest.mark.parametrize(
    "line",
    [b"\n", b"GET / HTTP/1.0\n", b"[" * 4000 + b"\n", b"\xff\xfe\n", b"A" * 64 + b"\n", b"0" * 5000]
    + [b"0" * 64 + b"\n" + second for second in (b"\n", b"{}\n", b"0" * 64 + b"{}\n", b"0" * 4097)],
)
@pytest.mark.parametrize("end", [0, 1])
def test_bytes_of_a_stranger_end_the_connection(wire: Callable[..., Wire], end: int, line: bytes) -> None:
    one = wire()
    one.give(end, line)
    while one.ends[end].is_open:
        assert one.ends[end].receive() == []
        one.give(end, b"0")  # a line that goes on
    assert one.ends[end].rank is None


@pytest.mark.parametrize(
    "introduction",
    [
        {"rank": [], "to": 2, "process": ""},
        {"rank": True, "to": 2, "process": ""},
        {"rank": 1, "to": 2, "process": 3},
        {"rank": 1, "to": 2},
        {"rank": 1, "to": "2", "process": ""},
        {},
    ],
)
def test_an_introduction_has_two_ranks_and_a_name(wire: Callable[..., Wire], introduction: Any) -> None:
    one = wire()
    with mock.patch.object(Link, "_introduce", lambda self, _: self.send(introduction)):
        assert one.introduce() == (None, None)
    assert not one.ends[1].is_open
