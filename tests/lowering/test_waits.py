"""Promises of the passes for waits, of the look-ahead of add-sharding, and of `lower(torch=...)`."""

from __future__ import annotations

from itertools import product

import pytest

import penstock
from penstock import Placement, Schedule, ScheduleError
from penstock.lowering import TORCH_PASSES, AddReduceWaits, AddSendWaits, AddSharding, lower
from tests.oracles.torch_schedules import as_rows, built, built_schedule, torch_schedules
from tests.support.grids import is_full, small
from tests.support.passes import after

VERSION = "2.15" if hasattr(torch_schedules, "_add_wait_send") else "2.13"
"""Of the installed torch, as far as its lists differ."""

SENT = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0I1 0W1 | "
SENT += "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"


def test_a_send_is_waited_for_where_its_end_is_proved_or_at_the_end_of_the_list() -> None:
    assert after(AddSendWaits(), SENT) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0WAIT_SEND_F0 0RECV_B1 0I1 0WAIT_SEND_F1 0W1 | "
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_SEND_B0 1WAIT_SEND_B1"
    )


def test_without_backwards_activations_too_are_waited_for_at_the_end() -> None:
    text = "0F0 0SEND_F0 0F1 0SEND_F1 | 1RECV_F0 1F0 1RECV_F1 1F1"
    assert after(AddSendWaits(), text) == text.replace(" |", " 0WAIT_SEND_F0 0WAIT_SEND_F1 |")


def test_a_backward_in_a_pair_is_followed_by_the_wait_after_the_pair() -> None:
    text = "0F0 0SEND_F0 0RECV_B0 (0F1;0B0)OVERLAP_F_B 0SEND_F1 0RECV_B1 0B1 | "
    text += "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    assert "(0F1;0B0)OVERLAP_F_B 0WAIT_SEND_F0 0SEND_F1" in after(AddSendWaits(), text)


def test_waits_are_added_once_and_only_to_sends() -> None:
    with pytest.raises(ScheduleError, match="the schedule already has WAIT_SEND_F, WAIT_SEND_B"):
        AddSendWaits()(AddSendWaits()(Schedule.parse(SENT)))
    with pytest.raises(ScheduleError, match="no sends; run add-communication first"):
        AddSendWaits()(penstock.build("1f1b", ranks=2, microbatches=2))
    alone = penstock.build("1f1b", ranks=1, microbatches=2)
    assert AddSendWaits()(alone) == alone


REDUCED = "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0RESHARD"


@pytest.mark.parametrize(
    ("deferred", "expected"),
    [
        (False, "0F0 1F0 1B0 1REDUCE_GRAD 1WAIT_REDUCE_GRAD 0B0 0REDUCE_GRAD 0WAIT_REDUCE_GRAD 0RESHARD"),
        (True, "0F0 1F0 1B0 1REDUCE_GRAD 0B0 1WAIT_REDUCE_GRAD 0REDUCE_GRAD 0RESHARD 0WAIT_REDUCE_GRAD"),
    ],
)
def test_a_reduction_is_waited_for_at_once_or_before_the_next(deferred: bool, expected: str) -> None:  # noqa: FBT001
    assert after(AddReduceWaits(deferred), REDUCED) == expected
    assert after(AddReduceWaits(deferred), "0F0 1F0 1B0 0B0") == "0F0 1F0 1B0 0B0"


def test_waits_for_reductions_are_added_once() -> None:
    with pytest.raises(ScheduleError, match="the schedule already has WAIT_REDUCE_GRAD"):
        AddReduceWaits()(AddReduceWaits()(Schedule.parse(REDUCED)))


def test_the_look_ahead_unshards_later_and_holds_as_long() -> None:
    text = "0F0 1F0 2F0 2B0 1B0 0B0"
    assert after(AddSharding(3), text) == (
        "0UNSHARD 1UNSHARD 2UNSHARD 0F0 1F0 2F0 2B0 2RESHARD 1B0 1RESHARD 0B0 0RESHARD"
    )
    assert after(AddSharding(3, lookahead=(1,)), text) == (
        "0UNSHARD 0F0 1UNSHARD 1F0 2UNSHARD 2F0 2B0 2RESHARD 1B0 1RESHARD 0B0 0RESHARD"
    )
    assert after(AddSharding(3, lookahead=(3,)), text) == after(AddSharding(3), text)
    assert AddSharding(3, lookahead="auto").lookahead_of_ranks(3) == (2, 3, 3)


@pytest.mark.parametrize("lookahead", ["none", (0,), (4,), (True,), (1.0,)])
def test_a_look_ahead_that_makes_no_sense_is_refused(lookahead: object) -> None:
    with pytest.raises(ScheduleError, match="lookahead"):
        AddSharding(3, lookahead=lookahead)  # type: ignore[arg-type]


def test_a_look_ahead_is_given_for_every_rank() -> None:
    with pytest.raises(ScheduleError, match="lookahead has 1 numbers, but the schedule has 2 ranks"):
        AddSharding(3, lookahead=(1,))(penstock.build("1f1b", ranks=2, microbatches=2))


def test_the_passes_of_a_version_are_chosen_by_its_name() -> None:
    schedule = penstock.build("1f1b", ranks=2, microbatches=2)
    assert lower(schedule, torch="2.13") == lower(schedule, torch="2.14") == lower(schedule)
    assert penstock.validate(lower(schedule, torch="2.15")) == []
    with pytest.raises(ScheduleError, match=r"torch must be one of 2\.13, 2\.14, 2\.15 \(given '2\.16'\)"):
        lower(schedule, torch="2.16")
    with pytest.raises(ScheduleError, match="give one of the two"):
        lower(schedule, TORCH_PASSES["2.15"], torch="2.15")


FAMILIES_OF_TORCH = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("name", FAMILIES_OF_TORCH)
@small(lambda p: p <= 3)
def test_the_lists_are_those_of_the_installed_torch(name: str, p: int) -> None:
    sizes = product(range(1, 5), range(1, 17)) if is_full() else product((1, 2), (4, 6))
    compared = 0
    for v, m in sizes:
        try:
            theirs = built(name, p, v, m)
        except ValueError:  # torch refuses these sizes
            continue
        hosts = theirs.stage_index_to_group_rank
        placement = Placement(tuple(hosts[stage] for stage in range(len(hosts))))
        rows = [list(map(penstock.parse_action, row)) for row in as_rows(theirs.pipeline_order)]
        lowered = lower(Schedule(rows, placement, m), torch=VERSION)
        assert [list(map(str, row)) for row in lowered.ranks] == as_rows(theirs.pipeline_order_with_comms)
        assert lowered == built_schedule(theirs, m)
        compared += 1
    assert compared or (p > 3 and not is_full())
