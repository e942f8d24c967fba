"""Promises of the rules on actions."""

from __future__ import annotations

import penstock
from penstock import Placement, Schedule


def test_work_of_swapped_ranks_is_on_the_wrong_rank_and_nothing_raises() -> None:
    lowered = penstock.lower(penstock.build("1f1b", ranks=2, microbatches=2))
    found = penstock.validate(Schedule(lowered.ranks[::-1], lowered.placement, 2))
    assert {violation.code for violation in found} == {"wrong-rank"}


def test_missing_microbatches_are_named_in_one_short_line() -> None:
    schedule = Schedule.parse(" ".join(f"0F{k}" for k in range(0, 100, 2)), Placement.loop(1), 100)
    (violation,) = penstock.validate(schedule)
    assert violation.message.endswith("microbatches 1, 3, 5, 7, 9, 11, 13, 15, ... (50 ranges)")
