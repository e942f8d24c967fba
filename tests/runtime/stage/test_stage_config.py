"""Promise: an output is sent as it is only where nothing can change it before the send."""

from __future__ import annotations

import pytest

import penstock
from penstock import Schedule, lower
from penstock.ir.kinds import Kind
from penstock.runtime.stage.microbatch import microbatches_with, sends_at_once


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "interleaved-1f1b", "zbv", "zb-h2"])
def test_lowered_schedules_send_each_output_right_after_its_forward(family: str) -> None:
    schedule = lower(penstock.build(family, ranks=3, microbatches=4))
    hosts = schedule.placement.stage_to_rank
    for stage in range(schedule.num_stages - 1):
        assert sends_at_once(schedule, stage) == (hosts[stage] != hosts[stage + 1])


LATE = {
    "a forward between": "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "another order": "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1",
    "a backward between": "0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1",
    "an overlapped pair": "0F0 0SEND_F0 0RECV_B0 (0F1;0B0)OVERLAP_F_B 0SEND_F1 0RECV_B1 0B1",
}


def of_rows(first: str) -> Schedule:
    second = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    return Schedule([first, second])


@pytest.mark.parametrize("row", LATE.values(), ids=LATE)
def test_an_output_that_waits_for_its_send_is_not_sent_as_it_is(row: str) -> None:
    assert not sends_at_once(of_rows(row), 0)


def test_receives_between_do_not_count() -> None:
    assert sends_at_once(of_rows("0F0 0RECV_B0 0SEND_F0 0F1 0SEND_F1 0B0 0RECV_B1 0B1"), 0)


def test_the_microbatches_of_a_kind_are_found_by_stage() -> None:
    schedule = of_rows("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0B1")
    assert microbatches_with(Kind.I, schedule, 0) == {0}
    assert microbatches_with(Kind.I, schedule, 1) == frozenset()
