"""Promises of recompute, as text in and text out."""

from __future__ import annotations

import pytest

import penstock
from penstock import Costs, Schedule, ScheduleError, simulate, validate
from penstock.lowering import DEFAULT_PASSES, Policy, Recompute, lower
from tests.support.passes import FAMILIES, after


def test_every_microbatch_is_recomputed_directly_before_its_backward() -> None:
    assert after(Recompute(), "0F0 0F1 0B0 0I1 0W1") == "0F0 0F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0I1 0W1"


def test_an_overlapped_pair_comes_after_the_recomputation_that_its_backward_needs() -> None:
    text = "0F0 (0F1;0B0)OVERLAP_F_B 0B1"
    assert after(Recompute(), text) == "0F0 0RECOMPUTE0 (0F1;0B0)OVERLAP_F_B 0RECOMPUTE1 0B1"


def test_stages_and_policy_choose() -> None:
    text = "0F0 0F1 0F2 0B0 0B1 0B2 | 1F0 1B0 1F1 1B1 1F2 1B2"
    first = "0F0 0F1 0F2 0RECOMPUTE0 0B0 0B1 0RECOMPUTE2 0B2"
    assert after(Recompute(stages=(0,), policy=Policy(every=2)), text) == f"{first} | 1F0 1B0 1F1 1B1 1F2 1B2"
    # on stage 1, no microbatch waits for its backward
    assert after(Recompute(policy=Policy(longer=0)), text).endswith("| 1F0 1B0 1F1 1B1 1F2 1B2")
    assert after(Recompute(policy=Policy(longer=2)), text) == text


def test_policies_can_follow_each_other() -> None:
    once = after(Recompute(policy=Policy(every=2)), "0F0 0F1 0B0 0B1")
    assert after(Recompute(), once) == "0F0 0F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1"


def test_without_backwards_there_is_nothing_to_recompute() -> None:
    assert after(Recompute(), "0F0 0F1") == "0F0 0F1"


def test_a_stage_that_does_not_exist_is_named() -> None:
    with pytest.raises(ScheduleError, match="recompute: there is no stage 2: the schedule has stages 0 to 0"):
        Recompute(stages=(2,))(Schedule.parse("0F0 0B0"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_valid_and_holds_checkpoints_only(family: str) -> None:
    schedule = penstock.build(family, ranks=3, microbatches=5)
    recomputed = Recompute()(schedule)
    for passes in ((), DEFAULT_PASSES):
        assert validate(lower(recomputed, passes)) == []
    costs = Costs(activation=10, checkpoint=1, activation_freed_by_input=10)
    plain, less = (max(simulate(each, costs).peak_memory) for each in (schedule, recomputed))
    assert less == 10 - 1 + plain / 10  # one whole activation, and a checkpoint of each
