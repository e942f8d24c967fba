"""Promises of defer-receives, as text in and text out."""

from __future__ import annotations

import itertools

import pytest

import penstock
from penstock import Schedule, ScheduleError
from penstock.lowering import (
    DeferReceives,
    lower,
)
from penstock.validation import SendModel
from tests.support.grids import thinned
from tests.support.passes import FAMILIES, after


def test_receives_move_past_work_they_are_not_for_but_not_past_sends() -> None:
    text = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 | "
    text += "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    assert after(DeferReceives(), text).endswith("| 1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1")
    assert after(DeferReceives(past_sends=True), text).endswith(
        "| 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_deferred_receives_are_as_safe_as_their_docstring_says(name: str) -> None:
    for ranks, microbatches in thinned(itertools.product((1, 2, 3, 4), (1, 2, 5, 8)), 3):
        lowered = lower(penstock.build(name, ranks=ranks, microbatches=microbatches))
        assert penstock.validate(DeferReceives()(lowered)) == []
        assert penstock.validate(DeferReceives(past_sends=True)(lowered), send_model="edge-streams") == []


def test_receives_past_sends_can_deadlock_on_one_stream_and_validation_reports_it() -> None:
    lowered = DeferReceives(past_sends=True)(lower(penstock.build("1f1b", ranks=2, microbatches=4)))
    (violation,) = penstock.validate(lowered)
    assert violation.code == "deadlock"
    assert violation.send_models == SendModel.PAIR_STREAMS.and_stricter


def test_deferring_receives_that_are_not_there_is_rejected() -> None:
    with pytest.raises(ScheduleError, match="run add-communication first"):
        DeferReceives()(penstock.build("1f1b", ranks=2, microbatches=2))


def test_a_receive_behind_its_use_is_rejected_and_not_lost() -> None:
    schedule = Schedule.parse("0F0 0SEND_F0 | 1F0 1RECV_F0")
    with pytest.raises(ScheduleError, match=r"error\[used-before-received\]"):
        lower(schedule, [DeferReceives()])
    with pytest.raises(ScheduleError, match=r"error\[used-before-received\]"):
        DeferReceives()(schedule)


def test_stages_between_which_no_message_goes_have_no_receives_to_defer() -> None:
    apart = penstock.build("gpipe", graph=penstock.StageGraph(2, ()), ranks=2, microbatches=2)
    lowered = lower(apart)
    assert DeferReceives()(lowered) == lowered
    assert penstock.simulate(lowered, send_model="rendezvous").makespan == penstock.simulate(apart).makespan
