"""Promises of deadlock detection: the shortest cycle, and the send models under which it exists."""

from __future__ import annotations

import penstock
from penstock import Schedule
from penstock.lowering import DeferReceives
from penstock.validation import SendModel, report


def test_a_deadlock_that_torch_accepts_is_reported_with_its_cycle() -> None:
    schedule = Schedule.parse("0F0 0B0 0F1 0B1 | 1F1 1B1 1F0 1B0")
    found = penstock.validate(schedule)
    first, *rest = report(schedule, found).split("\n")
    assert first == (
        "error[deadlock] rank 0, step 1, 0B0: ranks 0 and 1 wait for each other in a cycle, "
        "under every send model"
    )
    assert rest == [
        "  rank 0, step 1: 0B0 waits for 1B0 (rank 1, step 3): it needs the result of this",
        "  rank 1, step 0: 1F1 waits for 0F1 (rank 0, step 2): it needs the result of this",
        "  try: on rank 0, move 0F1 before 0B0",
        "    rank 0 | 0F0 [0B0] [0F1] 0B1",
        "    rank 1 | [1F1] 1B1 1F0 [1B0]",
    ]
    assert found[0].send_models == tuple(SendModel)


ONE_STREAM = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 | 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
)


def test_a_deadlock_on_one_stream_is_none_with_a_stream_per_edge() -> None:
    schedule = Schedule.parse(ONE_STREAM)
    (violation,) = penstock.validate(schedule)
    assert violation.send_models == SendModel.PAIR_STREAMS.and_stricter
    assert violation.suggestion == "on rank 0, move 0RECV_B0 before 0SEND_F1"
    assert penstock.validate(schedule, send_model="edge-streams") == []
    text = report(schedule, [violation])
    assert (
        "0RECV_B0 waits for 0SEND_F1 (rank 0, step 3): it is ahead of it in the stream of the two ranks" in text
    )
    assert "rank 0 | 0F0 0SEND_F0 0F1 [0SEND_F1] [0RECV_B0] 0B0 0RECV_B1 0B1" in text


def test_the_shortest_cycle_is_shown() -> None:
    lowered = penstock.lower(penstock.build("interleaved-1f1b", ranks=8, microbatches=16))
    (violation,) = penstock.validate(DeferReceives(past_sends=True)(lowered))
    assert len(violation.cycle) == 4
