"""Promises of the passes, as text in and text out."""

from __future__ import annotations

import itertools

import pytest

import penstock
from penstock import Placement, Schedule, ScheduleError
from penstock.lowering import (
    DEFAULT_PASSES,
    AddCommunication,
    AddGradReduction,
    AddSharding,
    DeferReceives,
    MergeBackward,
    Pass,
    SplitBackward,
    lower,
)
from penstock.validation import SendModel


def after(schedule_pass: Pass, text: str) -> str:
    """The text of the schedule after one pass."""
    return " | ".join(str(schedule_pass(Schedule.parse(text))).split("\n"))


def test_split_backward_makes_i_and_w_of_every_b() -> None:
    assert after(SplitBackward(), "0F0 0F1 0B0 0B1") == "0F0 0F1 0I0 0W0 0I1 0W1"


def test_split_backward_keeps_the_input_gradient_in_the_pair() -> None:
    text = "0F0 1F0 (0F1;1B0)OVERLAP_F_B 1F1 0B0 1B1 0B1"
    split = "0F0 1F0 (0F1;1I0)OVERLAP_F_B 1W0 1F1 0I0 0W0 1I1 1W1 0I1 0W1"
    assert after(SplitBackward(), text) == split
    assert after(MergeBackward(), split) == text


def test_merge_backward_leaves_an_i_alone_whose_w_comes_later() -> None:
    assert after(MergeBackward(), "0F0 0F1 0I0 0I1 0W0 0W1") == "0F0 0F1 0I0 0I1 0W0 0W1"
    assert after(MergeBackward(), "0F0 0F1 0I0 0W0 0I1 0W1") == "0F0 0F1 0B0 0B1"
    assert after(MergeBackward(), "0F0 1F0 1I0 0I0 0W0 1W0") == "0F0 1F0 1I0 0B0 1W0"


def test_sharding_holds_the_next_stages_only() -> None:
    assert after(AddSharding(2), "0F0 1F0 2F0 2B0 1B0 0B0") == (
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD"
    )


def test_sharding_of_five_stages_looks_three_ahead() -> None:
    """The example of torch's behaviour."""
    short = {"UNSHARD": "U", "RESHARD": "R"}
    text = after(AddSharding(), "0F0 1F0 2F0 3F0 4F0 4B0 3B0 2B0 1B0 0B0")
    for long, letter in short.items():
        text = text.replace(long, letter)
    assert text == ("0U 1U 2U 0F0 0R 3U 1F0 1R 4U 2F0 3F0 4F0 4B0 4R 1U 3B0 3R 0U 2B0 2R 1B0 1R 0B0 0R")


def test_both_stages_of_a_pair_are_held_even_beyond_the_look_ahead() -> None:
    lowered = after(AddSharding(1), "0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 1F1 1B1 0B1")
    assert "1RESHARD 0UNSHARD 1UNSHARD" not in lowered
    assert "0UNSHARD (0F1;1B0)OVERLAP_F_B" in lowered


def test_gradients_are_reduced_right_after_the_last_backward() -> None:
    assert after(AddGradReduction(), "0F0 1F0 1I0 0B0 1W0") == ("0F0 1F0 1I0 0B0 0REDUCE_GRAD 1W0 1REDUCE_GRAD")


def test_without_backwards_there_is_nothing_to_reduce() -> None:
    assert after(AddGradReduction(), "0F0 0F1") == "0F0 0F1"


def test_a_value_is_sent_at_once_and_received_at_that_moment() -> None:
    assert after(AddCommunication(), "0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1") == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 | "
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )


def test_neighbours_on_one_rank_hand_over_without_messages() -> None:
    lowered = after(AddCommunication(), "0F0 3F0 3B0 0B0 | 1F0 2F0 2B0 1B0")
    assert "1SEND_F0" not in lowered
    assert "2SEND_B0" not in lowered
    assert lowered.count("SEND") == lowered.count("RECV") == 4


def test_messages_of_a_pair_follow_the_whole_pair() -> None:
    text = "0F0 0F1 0B0 0B1 | 1F0 (1F1;1B0)OVERLAP_F_B 1B1"
    assert "(1F1;1B0)OVERLAP_F_B 1SEND_B0" in after(AddCommunication(), text)


def test_receives_move_past_work_they_are_not_for_but_not_past_sends() -> None:
    text = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 | "
    text += "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    assert after(DeferReceives(), text).endswith("| 1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1")
    assert after(DeferReceives(past_sends=True), text).endswith(
        "| 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )


FAMILIES = [name for name in penstock.families() if name != "forward-only"]


@pytest.mark.parametrize("name", FAMILIES)
def test_deferred_receives_are_as_safe_as_their_docstring_says(name: str) -> None:
    for ranks, microbatches in itertools.product((1, 2, 3, 4), (1, 2, 5, 8)):
        lowered = lower(penstock.build(name, ranks=ranks, microbatches=microbatches))
        assert penstock.validate(DeferReceives()(lowered)) == []
        assert penstock.validate(DeferReceives(past_sends=True)(lowered), send_model="edge-streams") == []


def test_receives_past_sends_can_hang_on_one_stream_and_the_proof_says_so() -> None:
    lowered = DeferReceives(past_sends=True)(lower(penstock.build("1f1b", ranks=2, microbatches=4)))
    (violation,) = penstock.validate(lowered)
    assert violation.code == "deadlock"
    assert violation.send_models == SendModel.PAIR_STREAMS.and_stricter


@pytest.mark.parametrize("name", FAMILIES)
def test_lowering_keeps_the_compute_order_and_its_input(name: str) -> None:
    schedule = penstock.build(name, ranks=3, microbatches=5)
    before = str(schedule)
    lowered = lower(schedule, (*DEFAULT_PASSES, DeferReceives()))
    assert str(schedule) == before
    compute = [[step for step in row if step.kind.is_compute] for row in lowered.ranks]
    assert compute == [list(row) for row in schedule.ranks]


@pytest.mark.parametrize("name", FAMILIES)
def test_split_and_merge_are_inverse_where_i_and_w_stand_together(name: str) -> None:
    schedule = penstock.build(name, ranks=2, microbatches=3)
    split = SplitBackward()(schedule)
    assert penstock.validate(split) == []
    assert MergeBackward()(split) == MergeBackward()(schedule)


def test_the_trace_shows_the_schedule_after_every_pass() -> None:
    seen: list[tuple[str, int]] = []
    lower(
        penstock.build("1f1b", ranks=2, microbatches=2), trace=lambda name, s: seen.append((name, s.num_steps))
    )
    assert seen == [("add-sharding", 12), ("add-reduce-grad", 14), ("add-communication", 22)]


@pytest.mark.parametrize("again", DEFAULT_PASSES)
def test_a_pass_refuses_to_put_in_twice(again: Pass) -> None:
    lowered = lower(penstock.build("1f1b", ranks=2, microbatches=2))
    with pytest.raises(ScheduleError, match=f"{again.name}: the schedule already has"):
        again(lowered)


def test_deferring_receives_that_are_not_there_is_refused() -> None:
    with pytest.raises(ScheduleError, match="run add-communication first"):
        DeferReceives()(penstock.build("1f1b", ranks=2, microbatches=2))


def test_a_look_ahead_of_nothing_is_refused() -> None:
    with pytest.raises(ScheduleError, match="max_active_stages must be at least 1"):
        AddSharding(0)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0F0 0B0 0F1 0B1 | 1F1 1B1 1F0 1B0", "deadlock"),
        ("0F0 0F0 0B0 | 1F0", "duplicate-action"),
    ],
)
def test_a_schedule_with_faults_is_refused_with_its_report(text: str, code: str) -> None:
    for passes in (DEFAULT_PASSES, (AddSharding(),), ()):
        with pytest.raises(ScheduleError, match=rf"error\[{code}\]"):
            lower(Schedule.parse(text), passes)


def test_a_receive_behind_its_use_is_refused_and_not_lost() -> None:
    schedule = Schedule.parse("0F0 0SEND_F0 | 1F0 1RECV_F0")
    with pytest.raises(ScheduleError, match=r"error\[used-before-received\]"):
        lower(schedule, [DeferReceives()])
    with pytest.raises(ScheduleError, match=r"error\[used-before-received\]"):
        DeferReceives()(schedule)


@pytest.mark.parametrize("name", FAMILIES)
def test_sharding_may_come_after_communication(name: str) -> None:
    schedule = penstock.build(name, ranks=2, microbatches=4)
    for most in (1, 2, 3):
        passes = (AddGradReduction(), AddCommunication(), AddSharding(most))
        assert penstock.validate(lower(schedule, passes)) == []


def test_lowering_works_on_uneven_placements() -> None:
    uneven = Schedule.parse(
        "0F0 1F0 4F0 4B0 1B0 0B0 | 2F0 3F0 3B0 2B0", Placement.custom({0: [0, 1, 4], 1: [2, 3]})
    )
    lowered = lower(uneven)
    assert penstock.validate(lowered) == []
    assert [str(step) for step in lowered.ranks[1] if step.kind.is_communication] == [
        "2RECV_F0",
        "3SEND_F0",
        "3RECV_B0",
        "2SEND_B0",
    ]
