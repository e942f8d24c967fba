"""Promise: a process without the key learns and changes nothing, and no bytes end the thread of a detector."""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest

from penstock.runtime.failure import detector
from penstock.runtime.failure import links as job_events
from penstock.runtime.failure.detector import FailureDetector
from penstock.runtime.failure.links import RankStatus, check_message
from penstock.traces.diagnose.rank_state import Wait, WaitKind
from tests.runtime.failure.test_monitor import CAUSE, until

STATUS = asdict(RankStatus("step", 1, 2, Wait(WaitKind.RECEIVE, "the losses", 0)))
SENT_CAUSE = {**asdict(CAUSE), "members": [0, 1]}


@contextmanager
def detector_of(
    rank: int, key: str = "key", listener: socket.socket | None = None
) -> Iterator[FailureDetector]:
    made = FailureDetector(rank, key, f"process {rank}", listener or socket.create_server(("127.0.0.1", 0)))
    yield made
    made.close("the test is over")


def address_of(watched: FailureDetector) -> tuple[str, int]:
    return "127.0.0.1", watched._listener.getsockname()[1]


def link(source: FailureDetector, target: FailureDetector) -> None:
    host, port = address_of(target)
    assert source.link(target.rank, f"{host}:{port}")


def answer_to(stranger: socket.socket, data: bytes) -> bytes:
    """All that a stranger is told, until the end of its connection."""
    stranger.settimeout(20)
    told = b""
    try:
        stranger.sendall(data)
        while got := stranger.recv(2**12):
            told += got
    except ConnectionError:  # what it has sent is not read any more
        pass
    return told


HELLO = json.dumps({"type": "hello", "key": "other", "rank": 1, "process": "", "to": 0}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.0\n\n",
        HELLO + b"\n",
        b"0" * 64 + b"\n" + b"0" * 64 + HELLO + b"\n",
        b"[" * 200_000 + b"\n",
        b"0" * 64 + b"\n" + b"[" * 200_000 + b"\n",
        b"\xff\xfe\x00\n",
        b"0" * 2**20,
    ],
)
def test_a_stranger_is_told_a_nonce_and_changes_nothing(data: bytes) -> None:
    with detector_of(0) as first, detector_of(1) as second:
        link(second, first)
        until(lambda: first.linked() == {1} and second.linked() == {0})
        with socket.create_connection(address_of(first)) as stranger:
            told = answer_to(stranger, data)
        assert len(told) in (0, 65)
        assert b"key" not in told
        assert first._thread.is_alive()
        assert (first.linked(), first.ended, set(first.processes)) == ({1}, {}, {0, 1})


def test_detectores_with_other_keys_do_not_link() -> None:
    with detector_of(0) as first, detector_of(1, "other") as second:
        link(second, first)
        until(lambda: not second._links)
        until(lambda: not first._links)
        assert (set(first.processes), set(second.processes)) == ({0}, {1})


def test_silent_strangers_are_few_and_do_not_keep_a_rank_out() -> None:
    with detector_of(0) as first, detector_of(1) as second, ExitStack() as strangers:
        for _ in range(detector._MOST_UNKNOWN + 50):
            strangers.enter_context(socket.create_connection(address_of(first)))
        until(lambda: len(first._links) == detector._MOST_UNKNOWN)
        link(second, first)
        until(lambda: first.linked() == {1} and second.linked() == {0})
        assert len(first._links) == detector._MOST_UNKNOWN
        assert not first.ended


def test_a_silent_stranger_is_dropped_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "_INTRODUCTION_SECONDS", 0.5)
    with detector_of(0) as first, socket.create_connection(address_of(first)) as stranger:
        assert len(answer_to(stranger, b"")) == 65
        until(lambda: not first._links)


def test_a_rank_does_not_wait_for_ever_for_one_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "_INTRODUCTION_SECONDS", 0.5)
    with detector_of(0) as first, socket.create_server(("127.0.0.1", 0)) as silent:
        first.timeout = 1
        assert first.link(1, f"127.0.0.1:{silent.getsockname()[1]}")
        until(lambda: not first._links)
        assert not first.ended


class Exhausted(socket.socket):
    """A listener of a process that has no descriptors left, as often as `failures` says."""

    failures = 2
    calls = 0

    def accept(self) -> tuple[socket.socket, Any]:
        Exhausted.calls += 1
        if Exhausted.calls <= self.failures:
            raise OSError(errno.EMFILE, "")
        return super().accept()


def test_a_process_without_descriptors_tries_again_each_second() -> None:
    listener = Exhausted()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    with detector_of(0, listener=listener) as first, detector_of(1) as second:
        began = time.monotonic()
        link(second, first)
        until(lambda: first.linked() == {1})
        assert time.monotonic() > began + 0.9  # the second failure is a beat after the first one
        assert Exhausted.calls == 3


MESSAGES: list[dict[str, Any]] = [
    {"type": "aborted", "rank": 1, "id": "1/1"},
    {"type": "answer", "question": "", "rank": 1, "text": ""},
    {"type": "broken", "question": "", "rank": 1, "group": [0, 1], "connection": ""},
    {"type": "cause", "connection": "", "cause": SENT_CAUSE},
    {"type": "end", "rank": 1, "process": "", "reason": "", "network_error": ""},
    {"type": "silence", "rank": 1, "process": "", "seconds": 1.5},
    {"type": "state", "rank": 1},
    {"type": "status", "connection": "", "rank": 1, "status": STATUS},
    {
        "type": "unmet",
        "question": "",
        "rank": 1,
        "group": [],
        "stages": "",
        "seconds": 60,
        "are_replicas": True,
    },
    {"type": "withdrawn", "rank": 1, "stages": ""},
]


def test_all_messages_of_this_version_are_known() -> None:
    assert [message["type"] for message in MESSAGES] == sorted(job_events._SHAPES)
    for message in MESSAGES:
        check_message(message)


WRONG = [None, [], {}, 1.5, float("nan"), 10**400, "no such text", [[1]], {"rank": 1}]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: str(message["type"]))
def test_a_message_with_a_field_of_another_type_is_refused(message: dict[str, Any]) -> None:
    for name, value in message.items():
        others = [each for each in WRONG if type(each) is not type(value)]
        if name in ("group", "cause", "status"):
            others = [*others, {}, [[1]]]
        for other in others:
            if name == "seconds" and other == 1.5:
                continue
            with pytest.raises(ValueError, match="not a message"):
                check_message(message | {name: other})
        with pytest.raises(ValueError, match="not a message"):
            check_message({key: each for key, each in message.items() if key != name} | {"more": 1})


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"[]",
        b"1",
        b"\xff\xfe",
        b"{",
        b'{"type": []}',
        b'{"type": "other"}',
        b'{"type": "end", "id": [], "rank": 0, "process": "", "reason": "", "network_error": ""}',
        b'{"type": "end", "rank": [], "process": "", "reason": "", "network_error": ""}',
        b'{"type": "silence", "rank": 0, "process": "", "seconds": 1' + b"0" * 400 + b"}",
        b'{"type": "cause", "connection": "", "cause": {"members": 1}}',
        b"x" * (2**24 + 1),
    ],
    ids=range(13),
)
def test_no_line_of_a_rank_ends_the_thread(text: bytes) -> None:
    """The line has a seal: it is what a rank with an error would send."""
    with detector_of(0) as first, detector_of(1) as second:
        link(second, first)
        until(lambda: first.linked() == {1} and second.linked() == {0})
        with second._lock, mock.patch("penstock.runtime.failure.links.json.dumps") as dumps:
            dumps.return_value.encode.return_value = text
            next(iter(second._links.values())).send({"type": "state"})
        second._wake()
        until(lambda: 1 in first.ended)
        assert first.ended[1].network_error == "invalid message"
        assert first._thread.is_alive()
        with detector_of(2) as third:
            link(third, first)
            until(lambda: 2 in first.linked())


def test_a_stranger_cannot_hold_up_the_thread() -> None:
    with detector_of(0) as first, detector_of(1) as second:
        link(second, first)
        until(lambda: first.linked() == {1} and second.linked() == {0})
        with ExitStack() as strangers:
            for _ in range(20):
                stranger = strangers.enter_context(socket.create_connection(address_of(first)))
                stranger.sendall(b"0" * 64 + b"\n" + b"0" * 100)
            second.send({"type": "aborted", "rank": 1})
            until(lambda: first.aborted_by == 1)
