"""Promise: messages for all reach all ranks over few links, and strangers are not heard."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from penstock.runtime.failure.detector import FailureDetector
from penstock.runtime.failure.links import Ended, Listener, RankStatus, neighbours
from tests.runtime.failure.test_monitor import linked_detectors, until


class Recorder(Listener):
    """Keeps what it is told."""

    def __init__(self, detector: FailureDetector) -> None:
        self.messages: list[dict[str, Any]] = []
        self.ended: list[int] = []
        detector.add_listener(self)

    def on_message(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def on_end(self, ended: Ended) -> None:
        self.ended.append(ended.rank)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100, 1000])
def test_all_ranks_are_within_few_hops(size: int) -> None:
    reached, frontier, hops = {0}, {0}, 0
    while frontier:
        frontier = {other for rank in frontier for other in neighbours(rank, size)} - reached
        reached |= frontier
        hops += bool(frontier)
    assert len(reached) == size
    assert hops <= size.bit_length()
    assert all(rank in neighbours(other, size) for rank in range(size) for other in neighbours(rank, size))


def chain(count: int) -> tuple[list[FailureDetector], list[str]]:
    """Detectors that are linked only to the one before."""
    detectors, addresses = [], []
    for rank in range(count):
        listener = socket.create_server(("127.0.0.1", 0))
        detectors.append(FailureDetector(rank, "key", f"process {rank}", listener))
        addresses.append(f"127.0.0.1:{listener.getsockname()[1]}")
        if rank:
            detectors[rank].link(rank - 1, addresses[rank - 1])
    until(lambda: sum(len(detector.linked()) for detector in detectors) == 2 * (count - 1))
    return detectors, addresses


def test_a_broadcast_is_forwarded_once_and_so_is_the_end_of_a_process() -> None:
    detectors, addresses = chain(4)
    recorders = [Recorder(detector) for detector in detectors]
    detectors[1].link(3, addresses[3])  # a second way
    until(lambda: 3 in detectors[1].linked())
    detectors[0].send({"type": "withdrawn", "rank": 0, "stages": "x" * 100_000})
    until(lambda: all(len(recorder.messages) == 1 for recorder in recorders[1:]))
    detectors[0].send({"type": "withdrawn", "rank": 0, "stages": ""}, [1])
    until(lambda: len(recorders[1].messages) == 2)
    detectors[3].close("it has exited")
    until(lambda: all(recorder.ended == [3] for recorder in recorders[:3]))
    late = FailureDetector(4, "key", "process 4", socket.create_server(("127.0.0.1", 0)))
    late.link(0, addresses[0])
    until(lambda: 3 in late.ended)
    assert [len(recorder.messages) for recorder in recorders[:3]] == [0, 2, 1]
    for detector in (*detectors, late):
        detector.close("the test is over")


def test_the_silence_of_a_rank_is_known_without_a_link_to_it_and_so_is_its_end() -> None:
    detectors, _ = chain(3)
    for detector in detectors:
        detector.timeout = 1.5
    with detectors[0]._lock:  # its thread cannot send
        until(lambda: detectors[2].silence(0) > 1.5)
        assert detectors[2].describe_silence(0).startswith("no heartbeat from its process (process 0) for ")
        assert detectors[2].silence(1) < 1.5
    until(lambda: detectors[2].silence(0) == 0)
    for detector in detectors:
        detector.close("the test is over")


def test_the_status_of_a_rank_can_be_sent() -> None:
    with linked_detectors(2) as detectors:
        recorder = Recorder(detectors[1])
        status = vars(RankStatus("step", 1, 2, None))
        detectors[0].send({"type": "status", "connection": "one", "rank": 0, "status": status}, [1])
        until(lambda: bool(recorder.messages))
        assert RankStatus(**recorder.messages[0]["status"]) == RankStatus("step", 1, 2, None)
