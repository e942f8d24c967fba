"""Promises of offload, as text in and text out."""

from __future__ import annotations

import pytest

import penstock
from penstock import Costs, ScheduleError, simulate, validate
from penstock.lowering import DEFAULT_PASSES, Offload, Policy, Recompute, lower
from tests.support.passes import FAMILIES, after

STACK = "0F0 0F1 0F2 0B2 0B1 0B0"


def test_what_lives_long_is_offloaded_after_its_forward_and_reloaded_one_step_ahead() -> None:
    text = "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD1 0B2 0RELOAD0 0B1 0B0"
    assert after(Offload(), STACK) == text


def test_reloads_are_as_far_ahead_as_asked_for() -> None:
    none = "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0B2 0RELOAD1 0B1 0RELOAD0 0B0"
    assert after(Offload(ahead=0), STACK) == none
    # microbatch 1 would be back before anything is computed without it
    assert after(Offload(ahead=2), STACK) == "0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0B2 0B1 0B0"
    assert after(Offload(ahead=9), STACK) == STACK


def test_stages_and_policy_choose() -> None:
    assert after(Offload(policy=Policy(longer=3)), STACK) == "0F0 0OFFLOAD0 0F1 0F2 0B2 0RELOAD0 0B1 0B0"
    assert after(Offload(stages=(0,), policy=Policy(every=2)), STACK) == after(
        Offload(policy=Policy(longer=3)), STACK
    )


def test_a_recomputed_microbatch_is_reloaded_before_its_recomputation_in_either_order_of_passes() -> None:
    both = "0F0 0OFFLOAD0 0F1 0F2 0RECOMPUTE2 0B2 0RECOMPUTE1 0B1 0RELOAD0 0RECOMPUTE0 0B0"
    offload = Offload(policy=Policy(every=4), ahead=0)
    assert after(offload, after(Recompute(), STACK)) == both
    assert after(Recompute(), after(offload, STACK)) == both


def test_ahead_is_a_number_of_steps() -> None:
    with pytest.raises(ScheduleError, match=r"ahead must be a whole number of at least 0 \(given -1\)"):
        Offload(ahead=-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_valid_and_holds_less_or_the_same(family: str) -> None:
    schedule = penstock.build(family, ranks=3, microbatches=5)
    plain = simulate(schedule)
    for passes in ([Offload()], [Recompute(), Offload(ahead=2)], [Offload(ahead=0), Recompute()]):
        changed = lower(schedule, passes)
        assert validate(lower(changed, DEFAULT_PASSES)) == []
        assert max(simulate(changed, Costs()).peak_memory) <= max(plain.peak_memory)
    assert simulate(lower(schedule, [Offload()])).makespan == plain.makespan
