"""Promise: schedules that were searched for train with the gradients of one process."""

from __future__ import annotations

import pytest

from penstock import Costs, Schedule, search
from tests.support.grids import thinned
from tests.support.pool import Pools
from tests.support.reference import Case, problems_of, run_cases

UNEQUAL = Costs(
    forward=(3, 1, 2, 4),
    backward_input=(2, 2, 2, 5),
    backward_weight=(1, 2, 1, 3),
    latency=0.2,
    activation=2,
    activation_freed_by_input=1,
)


def searched(ranks: int, *, split: bool, placement: str = "any", limit: float | None = None) -> Schedule:
    found = search(
        ranks=ranks,
        microbatches=6,
        stages_per_rank=4 // ranks,
        placement=placement,
        costs=UNEQUAL,
        memory_limit=limit,
        split=split,
        moves=20_000,
    )
    return found.schedule


@pytest.mark.full
def test_on_two_ranks_with_two_stages_each(pools: Pools) -> None:
    schedules = [
        searched(2, split=split, placement=placement, limit=limit)
        for split, placement, limit in ((True, "v", 6), (True, "loop", 8), (False, "v", 8), (True, "any", None))
    ]
    assert len(set(schedules)) > 2
    cases = [Case(schedule, task) for schedule in schedules for task in ("mlp", "transformer")]
    cases = thinned(cases, 3)
    assert not problems_of(cases, pools(2).run(run_cases, cases))


def test_on_four_ranks_with_a_stage_each(pools: Pools) -> None:
    cases = [Case(searched(4, split=split, limit=8), "transformer") for split in (True, False)]
    assert not problems_of(cases, pools(4).run(run_cases, cases))
