"""Orders that a search starts from."""

from __future__ import annotations

import pytest

import penstock
from penstock import Costs, Placement, build, simulate
from penstock.search.problem import Problem
from penstock.search.seeds import grouped_schedules


def test_interleaved_families_are_starts_with_several_groups() -> None:
    found = {schedule.name for schedule in grouped_schedules(Problem(Placement.loop(4, 2), 16, Costs()))}
    assert {f"interleaved-1f1b group={n}" for n in (6, 8, 16)} <= found
    assert {f"interleaved-zero-bubble group={n}" for n in (2, 6, 8, 16)} <= found
    assert list(grouped_schedules(Problem(Placement.loop(4), 16, Costs()))) == []
    assert list(grouped_schedules(Problem(Placement.v(4), 16, Costs()))) == []


@pytest.mark.parametrize("split", [False, True])
def test_without_moves_the_result_is_as_good_as_every_group(*, split: bool) -> None:
    costs = Costs(latency=1)
    result = penstock.search(
        ranks=4, microbatches=16, stages_per_rank=2, placement="loop", costs=costs, moves=0, split=split
    )
    name = "interleaved-zero-bubble" if split else "interleaved-1f1b"
    for group in (6, 8, 16):
        made = build(name, ranks=4, microbatches=16, stages_per_rank=2, group=group)
        assert result.value <= simulate(made, costs).makespan + 1e-9
