"""Promise: wherever torch's constructors accept the arguments, orders and lowered orders equal torch's.

Idle slots are ignored. torch prints a wrong order for the last rank of 1F1B, so its single-stage schedules are
compared by the actions they execute. The order in which torch before 2.15 reshards several stages is arbitrary.
"""

from __future__ import annotations

import itertools

import pytest

import penstock
from penstock import Schedule
from penstock.lowering import DeferReceives, MergeBackward, lower

pytest.importorskip("torch", reason="this file compares with torch")

from tests.oracles import torch_schedules as torch
from tests.support.grids import small
from tests.support.schedule_rows import rows_of

RANKS = range(1, 9)
STAGES_PER_RANK = range(1, 4)
MICROBATCHES = (*range(1, 10), 12, 16, 17, 24)
SINGLE = ("GPipe", "1F1B")
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def reshards_sorted(rows: torch.Rows) -> torch.Rows:
    """Sort consecutive RESHARD actions, which torch before 2.15 takes from a set."""
    if torch.RELEASE >= (2, 15):
        return rows
    return [
        [
            text
            for is_reshard, run in itertools.groupby(row, key=lambda text: text.endswith("RESHARD"))
            for text in (sorted(run) if is_reshard else run)
        ]
        for row in rows
    ]


def assert_lowered_equal(schedule: Schedule) -> None:
    stage_to_rank = dict(enumerate(schedule.placement.stage_to_rank))
    theirs = torch.lowered(rows_of(schedule), stage_to_rank, schedule.microbatches)
    assert reshards_sorted(rows_of(lower(schedule, torch=torch.VERSION))) == reshards_sorted(theirs)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", SINGLE)
def test_single_stage_schedules_execute_in_the_order_of_torch(name: str, ranks: int) -> None:
    accepted = 0
    for microbatches in MICROBATCHES:
        try:
            theirs = torch.running_order(name, ranks, microbatches)
        except ValueError:
            continue
        accepted += 1
        ours = penstock.build(name, ranks=ranks, microbatches=microbatches)
        assert rows_of(ours) == theirs
        assert_lowered_equal(ours)
    assert accepted >= len([m for m in MICROBATCHES if m >= ranks])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MULTI)
@small(lambda ranks: ranks in {1, 2, 3})
def test_multi_stage_schedules_equal_those_of_torch(name: str, ranks: int) -> None:
    accepted = 0
    for stages_per_rank, microbatches in itertools.product(STAGES_PER_RANK, MICROBATCHES):
        try:
            theirs = torch.built(name, ranks, stages_per_rank, microbatches)
        except ValueError:
            continue
        accepted += 1
        ours = penstock.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        assert rows_of(ours) == torch.as_rows(theirs.pipeline_order)
        lowered = torch.as_rows(theirs.pipeline_order_with_comms)
        assert reshards_sorted(rows_of(lower(ours, torch=torch.VERSION))) == reshards_sorted(lowered)
    assert accepted >= len([m for m in MICROBATCHES if m % ranks == 0 and m >= 2 * ranks])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", MULTI)
@small(lambda ranks: ranks in {2, 3})
def test_deferred_receives_equal_those_of_torch_where_torch_keeps_channel_order(name: str, ranks: int) -> None:
    passes = (*torch.PASSES, DeferReceives(past_sends=True))
    for stages_per_rank, microbatches in itertools.product((1, 2, 3), (1, 2, 4, 6, 12)):
        try:
            theirs = torch.as_rows(
                torch.built(
                    name, ranks, stages_per_rank, microbatches, defer_pp_recv=True
                ).pipeline_order_with_comms
            )
        except ValueError:
            continue
        compute = penstock.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        ours = lower(compute, passes)
        assert penstock.validate(ours, send_model="edge-streams") == []
        in_torch = penstock.validate(
            Schedule(theirs, compute.placement, microbatches), send_model="edge-streams"
        )
        if not in_torch:
            assert reshards_sorted(rows_of(ours)) == reshards_sorted(theirs)
        else:
            assert {violation.code for violation in in_torch} == {"channel-order"}


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_merged_backwards_equal_those_of_torch(name: str) -> None:
    for ranks, microbatches in itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 8, 12)):
        schedule = penstock.build(name, ranks=ranks, microbatches=microbatches)
        assert rows_of(MergeBackward()(schedule)) == torch.merged(rows_of(schedule))


def test_deferred_receives_of_torch_deadlock_on_one_communicator() -> None:
    theirs = torch.built("Interleaved1F1B", 2, 1, 2, defer_pp_recv=True).pipeline_order_with_comms
    (violation,) = penstock.validate(Schedule(torch.as_rows(theirs)))
    assert violation.code == "deadlock"
    assert violation.send_models == penstock.SendModel.PAIR_STREAMS.and_stricter


def test_deferred_receives_of_torch_break_channel_order() -> None:
    """Rank 0 sends 0SEND_F2 before 3SEND_B0 to rank 1; rank 1 would receive the first as the second."""
    theirs = torch.built("ZBVZeroBubble", 2, 2, 3, defer_pp_recv=True).pipeline_order_with_comms
    found = penstock.validate(Schedule(torch.as_rows(theirs)), send_model="edge-streams")
    assert [str(violation.action) for violation in found if violation.code == "channel-order"] == ["2RECV_B0"]
