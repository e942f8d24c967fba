"""Promise: the first published cause is the cause on all ranks, and every rank publishes its status once."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed import HashStore  # type: ignore[attr-defined]

from penstock.runtime.failure.monitor import FailureCause, FailureMonitor, RankStatus

CAUSE = FailureCause(1, "exception", 3, "1F0", 1, 0, "ValueError: wrong", "Traceback")


def monitor_of(store: HashStore, rank: int, failures: list[int]) -> FailureMonitor:
    status = RankStatus("step", 3, rank, "")
    return FailureMonitor(store, rank, 2, lambda: status, lambda: failures.append(rank))


def test_the_first_published_cause_wins() -> None:
    store = HashStore()
    first, second = (monitor_of(store, rank, []) for rank in (0, 1))
    assert first.read_cause() is None
    assert first.publish_cause(CAUSE) == CAUSE
    assert second.publish_cause(replace(CAUSE, rank=0)) == CAUSE
    assert second.wait_for_cause(0) == CAUSE
    for monitor in (first, second):
        monitor.stop()


def test_ranks_that_publish_no_status_are_left_out() -> None:
    store = HashStore()
    monitor = monitor_of(store, 1, [])
    monitor.publish_status()
    assert monitor.statuses(0) == {1: RankStatus("step", 3, 1, "")}
    monitor.stop()
