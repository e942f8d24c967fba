"""Orders that a search starts from."""

from __future__ import annotations

import pytest

import penstock
from penstock import Costs, Placement, build, simulate
from penstock.search.problem import Problem
from penstock.search.seeds import _caps, grouped_schedules


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


def test_activations_in_flight_can_fill_the_memory_in_proportion_to_how_long_they_are_held() -> None:
    problem = Problem(Placement.v(4), 16, Costs(), 8)
    *_, filled, exceeding, _, _, _ = _caps(problem)
    # rank 0 holds an activation of stage 0 for 17 and of stage 7 for 3; rank 3 of stages 3 and 4 for 11 and 9
    assert filled.tolist() == [7, 6, 5, 4, 4, 3, 2, 1]
    assert exceeding.tolist() == [7, 6, 6, 5, 4, 3, 2, 2]
