"""Promise: the first failure is the cause on all ranks, and every rank sends its status once."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from penstock.errors import FailureKind
from penstock.runtime.failure.detector import FailureDetector
from penstock.runtime.failure.links import FailureCause, RankStatus
from penstock.runtime.failure.monitor import FailureMonitor

CAUSE = FailureCause(1, FailureKind.EXCEPTION, 3, "ValueError: wrong", "Traceback", "1F0", 1, 0)


@contextmanager
def linked_detectors(count: int) -> Iterator[list[FailureDetector]]:
    """Detectors of this process that are linked with each other."""
    detectors: list[FailureDetector] = []
    for rank in range(count):
        listener = socket.create_server(("127.0.0.1", 0))
        detectors.append(FailureDetector(rank, "key", f"process {rank}", listener))
        for earlier in detectors[:-1]:
            earlier.link(rank, f"127.0.0.1:{listener.getsockname()[1]}")
    until(lambda: all(len(detector.linked()) == count - 1 for detector in detectors))
    yield detectors
    for detector in detectors:
        detector.close("the test is over")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def monitor_of(detector: FailureDetector, members: int | Sequence[int], failures: list[int]) -> FailureMonitor:
    status = RankStatus("step", 3, detector.rank, None)
    fail = lambda: failures.append(detector.rank)  # noqa: E731
    ranks = range(members) if isinstance(members, int) else members
    return FailureMonitor(detector, "one", ranks, 60, lambda: status, fail, fail)


def test_the_first_published_cause_wins_and_all_send_their_status() -> None:
    failures: list[int] = []
    with linked_detectors(3) as detectors:
        monitors = [monitor_of(detector, 3, failures) for detector in detectors]
        assert monitors[1].wait_for_cause(0) is None
        published = monitors[1].publish_cause(CAUSE)
        assert (published.world_rank, published.members, published.reporter) == (1, (0, 1, 2), 1)
        assert monitors[2].wait_for_cause(20) == published
        assert monitors[2].publish_cause(replace(CAUSE, rank=2)) == published
        wanted = published, {rank: RankStatus("step", 3, rank, None) for rank in range(3)}
        assert [monitor.settled() for monitor in monitors] == [wanted] * 3
        assert sorted(failures) == [0, 1, 2]


def test_of_two_causes_at_once_all_ranks_choose_the_same() -> None:
    with linked_detectors(3) as detectors:
        monitors = [monitor_of(detector, 3, []) for detector in detectors]
        for monitor, kind in zip(monitors, (FailureKind.TIMEOUT, FailureKind.EXCEPTION, FailureKind.EXCEPTION)):
            monitor.publish_cause(replace(CAUSE, kind=kind, rank=monitor.detector.rank))
        chosen = [monitor.settled()[0] for monitor in monitors]
        assert len(set(chosen)) == 1
        assert chosen[0] is not None


def test_another_connection_of_the_same_ranks_is_not_affected() -> None:
    with linked_detectors(2) as detectors:
        monitors = [monitor_of(detector, 2, []) for detector in detectors]
        status = RankStatus("outside", 0, 0, None)
        other = FailureMonitor(detectors[1], "two", range(2), 60, lambda: status, lambda: None, lambda: None)
        monitors[0].publish_cause(CAUSE)
        assert monitors[1].wait_for_cause(20) is not None
        assert other.wait_for_cause(0) is None


def test_a_process_that_ends_without_a_message_is_the_cause_at_once_and_one_that_exits_later() -> None:
    with linked_detectors(4) as detectors:
        monitors = [monitor_of(detector, 4, []) for detector in detectors[:3]]
        detectors[2].close("it has exited")
        until(lambda: 2 in detectors[0].ended and 2 in detectors[1].ended)
        assert monitors[0].wait_for_cause(0) is None
        monitors[0].begin()
        cause = monitors[1].wait_for_cause(20)
        assert cause is not None
        assert (cause.rank, cause.kind) == (2, "lost")
        assert cause.message == "its process (process 2) has ended: it has exited"


def test_silence_is_measured_and_named() -> None:
    with linked_detectors(2) as detectors:
        monitor = monitor_of(detectors[0], 2, [])
        with detectors[1]._lock:  # its thread cannot send
            until(lambda: detectors[0].silence(1) > 3)
            blamed = monitor.blamed(replace(CAUSE, kind=FailureKind.TIMEOUT, rank=0, message="rank 0 waited"))
        assert (blamed.rank, blamed.kind, blamed.process) == (1, "timeout", "process 1")
        seconds = re.search(r"no heartbeat from its process \(process 1\) for (\d+) s", blamed.message)
        assert seconds is not None
        assert int(seconds[1]) >= 3
        assert blamed.message.endswith("; rank 0 waited")
        until(lambda: detectors[0].silence(1) < 3)


def test_a_silent_rank_of_another_pipeline_is_named_and_precedes_the_timeout_of_this_pipeline() -> None:
    with linked_detectors(3) as detectors:
        monitor = monitor_of(detectors[0], (0, 1), [])
        waited = replace(CAUSE, kind=FailureKind.TIMEOUT, rank=0, message="rank 0 waited")
        assert monitor.blamed(waited) is waited
        with detectors[2]._lock:  # its thread cannot send
            until(lambda: detectors[0].silence(2) > 3)
            blamed = monitor.blamed(waited)
        assert (blamed.rank, blamed.world_rank, blamed.kind) == (-1, 2, "timeout")
        monitor.publish_cause(waited)
        monitor.on_message({"type": "cause", "connection": "one", "cause": asdict(blamed)})
        assert monitor.cause == blamed


def monitor_of_step(detector: FailureDetector, step: int) -> FailureMonitor:
    status = RankStatus("step", step, 0, None)
    return FailureMonitor(detector, "two", (0, 1), 60, lambda: status, lambda: None, lambda: None)


def test_a_failure_of_another_pipeline_that_came_before_the_step_explains_a_broken_connection() -> None:
    with linked_detectors(3) as detectors:
        elsewhere = monitor_of(detectors[2], (2,), [])
        here, later = (monitor_of_step(detectors[0], step) for step in (3, 4))
        published = elsewhere.publish_cause(replace(CAUSE, rank=0))
        until(lambda: detectors[0].last_cause[1] != {})
        here.begin()  # its step has begun after the message
        assert here.wait_for_cause(0) is None
        assert here.missed_cause() == published
        assert here.settled()[0] == published
        assert later.missed_cause() is None
        assert monitor_of_step(detectors[0], 3).missed_cause() is None  # a new connection


def test_a_peer_that_has_exited_is_blamed_and_any_other_rank_only_if_it_crashed() -> None:
    with linked_detectors(3) as detectors:
        monitor = monitor_of(detectors[0], (0, 1), [])
        broken = replace(CAUSE, kind=FailureKind.LOST, rank=0, message="the connection broke")
        detectors[2].close("it has exited")
        until(lambda: 2 in detectors[0].ended)
        assert monitor.blamed(broken) is broken
        monitor.replica_peers = [2]
        blamed = monitor.blamed(broken)
        assert (blamed.rank, blamed.world_rank, blamed.kind) == (-1, 2, "lost")
        assert "it has exited" in blamed.message
