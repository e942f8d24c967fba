"""Promise: a pipeline is told that another rank expects it as a replica peer only if no other can be meant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.runtime.failure.detector import FailureDetector
from penstock.runtime.session.replica_peers import PeerRecords, PipelineRecord, peer_records
from tests.runtime.failure.test_monitor import linked_detectors, until

GROUP = (0, 1)


def pipeline(records: PeerRecords, *groups: tuple[int, ...], stages: str = "same") -> PipelineRecord:
    """A pipeline of this process, with these groups of replicas."""
    made = PipelineRecord(stages, 60)
    made.groups = dict.fromkeys(groups, True)
    records.add(made)
    return made


@contextmanager
def two_ranks() -> Iterator[tuple[list[FailureDetector], list[PeerRecords]]]:
    with linked_detectors(2) as detectors:
        yield detectors, [peer_records(detector) for detector in detectors]


def test_a_pipeline_without_replicas_is_told_who_expects_it() -> None:
    with two_ranks() as (_, (first, second)):
        alone = pipeline(second)
        answer = first.absent_peers(pipeline(first, GROUP), GROUP)
        assert answer.startswith("world rank 1 trains the same stages in a pipeline that was created without")
        assert "world rank 0 trains the same stages and expects this rank" in second.problem(alone)
        assert "has waited 60 s" in second.problem(alone)


def test_other_stages_other_replicas_and_a_connected_replica_are_not_meant() -> None:
    with two_ranks() as (_, (first, second)):
        others = [pipeline(second, stages="other"), pipeline(second, (1, 2))]
        assert first.absent_peers(pipeline(first, GROUP), GROUP) == ""
        assert [second.problem(each) for each in others] == ["", ""]
    with two_ranks() as (_, (first, second)):
        alone, replica = pipeline(second), pipeline(second, GROUP)
        second.connected(replica)
        assert "world rank 1 has not closed its pipeline" in first.absent_peers(pipeline(first, GROUP), GROUP)
        assert [second.problem(each) for each in (alone, replica)] == ["", ""]


def test_a_later_pipeline_is_meant_only_if_the_rank_that_waited_has_ended() -> None:
    with two_ranks() as (detectors, (first, second)):
        first.absent_peers(pipeline(first, GROUP), GROUP)
        later = pipeline(second)
        assert second.problem(later) == ""
        detectors[0].close("it has exited")
        until(lambda: 0 in detectors[1].ended)
        assert "expects this rank" in second.problem(later)


def test_a_rank_that_connects_again_expects_nobody_any_more() -> None:
    with two_ranks() as (_, (first, second)):
        alone, waiting = pipeline(second), pipeline(first, GROUP)
        first.absent_peers(waiting, GROUP)
        assert second.problem(alone)
        first.connected(pipeline(first))
        until(lambda: second.problem(alone) == "")


def test_ranks_that_closed_a_connection_answer() -> None:
    with linked_detectors(3) as detectors:
        records = [peer_records(detector) for detector in detectors]
        records[1].closed("one")
        assert records[0].closed_by("one", (0, 1, 2)) == [1]
        assert records[2].closed_by("two", (0, 1, 2)) == []
        assert "but world rank 0 had not" in records[1].noticed_close((0, 1, 2))
        assert records[2].noticed_close((0, 1, 2)) == ""
        records[1].connected(pipeline(records[1], (0, 1, 2)))
        assert records[1].noticed_close((0, 1, 2)) == ""
