"""Promise: a connection that the network gives up is told apart from one that the other process ends."""

from __future__ import annotations

import errno
from typing import Any
from unittest import mock

import pytest

from penstock.runtime.failure.links import Link
from tests.runtime.failure.test_monitor import linked_watches, monitor_of, until


def link_with(**effects: Any) -> Link:
    """A link whose connection does this at each call."""
    return Link(mock.Mock(**{f"{name}.side_effect": effect for name, effect in effects.items()}))


@pytest.mark.parametrize(
    ("number", "text"),
    [(errno.ETIMEDOUT, "Connection timed out"), (errno.EHOSTUNREACH, "No route to host")],
)
def test_an_error_of_the_network_is_kept_whichever_call_gets_it(number: int, text: str) -> None:
    error = OSError(number, "")
    receiving = link_with(recv=error)
    assert receiving.receive() == []
    sending = link_with(send=error, recv=[b""])  # the system gives an error once
    sending.send(None)
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
    with linked_watches(3) as watches:
        monitors = [monitor_of(watch, 3, []) for watch in watches[:2]]
        watches[0].lose(2, "process 2", "Connection timed out")
        until(lambda: 2 in watches[1].ended)
        for monitor in monitors:
            cause = monitor.wait_for_cause(20)
            assert cause is not None
            assert (cause.rank, cause.kind) == (2, "timeout")
            assert cause.message == (
                "the connection to its process (process 2) broke (Connection timed out): its host or the "
                "network fails"
            )
            assert monitor.ended()[2].verb == "does not answer"
