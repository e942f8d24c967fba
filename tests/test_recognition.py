"""Promise: a schedule of a family is recognized, and of any other the nearest and the first difference."""

from __future__ import annotations

from itertools import product

import pytest

from penstock import Kind, Placement, Schedule, StageGraph, build, families, lower, recognize
from penstock.errors import BuildError
from penstock.formats import dumps, reads
from penstock.lowering import MergeBackward, SplitBackward
from tests.support.grids import small

FEW = (1, 2, 3, 7, 8, 16)
OTHERS = tuple(m for m in range(1, 17) if m not in FEW)


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("counts", [FEW, OTHERS], ids=["few", "others"])
@small(lambda p, counts: p == 3 and counts == FEW)
def test_every_family_is_recognized_from_its_csv(family: str, p: int, counts: tuple[int, ...]) -> None:
    for v, m in product(range(1, 4), counts):
        try:
            schedule = build(family, ranks=p, microbatches=m, stages_per_rank=v)
        except BuildError:
            continue  # not with so many stages per rank
        assert family in recognize(reads(dumps(schedule, "csv"), "csv")).families


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "dualpipev", "interleaved-overlap"])
def test_lowered_split_and_merged_schedules_are_recognized(family: str) -> None:
    schedule = build(family, ranks=4, microbatches=8)
    for other in (lower(schedule), SplitBackward()(schedule), MergeBackward()(schedule)):
        assert family in recognize(other).families


def test_groups_unequal_stages_and_graphs_are_recognized() -> None:
    grouped = build("interleaved-1f1b", ranks=4, microbatches=16, group=6)
    assert recognize(grouped).families == ("interleaved-1f1b",)
    assert recognize(grouped).groups == {"interleaved-1f1b": 6}
    assert str(recognize(grouped)).startswith("interleaved-1f1b group=6 (p=4")
    unequal = build("interleaved-1f1b", ranks=3, microbatches=6, stages_per_rank=[1, 2, 1])
    assert str(recognize(unequal)) == "interleaved-1f1b (p=3, v=1,2,1, m=6)"
    graph = StageGraph.parse("0>1,1>2,0>2")
    assert recognize(build("zb-h1", ranks=3, microbatches=6, graph=graph)).families == ("zb-h1",)


def swapped(schedule: Schedule, rank: int, step: int) -> Schedule:
    rows = [list(row) for row in schedule.ranks]
    rows[rank][step : step + 2] = reversed(rows[rank][step : step + 2])
    return Schedule(rows, schedule.placement, schedule.microbatches)


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("p", [3, 4, 8])
@small(lambda p: p == 4)
def test_a_single_swap_is_located(family: str, p: int) -> None:
    schedule = build(family, ranks=p, microbatches=16).only(kind for kind in Kind if kind.is_compute)
    for rank, step in ((0, 0), (2, 14), (p - 1, 10), (1, len(schedule.ranks[1]) - 2)):
        changed = swapped(schedule, rank, step)
        found = recognize(changed)
        assert found.families == ()
        assert found.nearest == family
        assert found.first is not None
        assert (found.first.rank, found.first.step) == (rank, step)
        assert found.first.found == str(changed.ranks[rank][step])
        assert found.first.expected == str(schedule.ranks[rank][step])


def test_the_step_of_a_difference_is_that_of_the_lowered_schedule() -> None:
    lowered = lower(swapped(build("1f1b", ranks=2, microbatches=4), 0, 3))
    first = recognize(lowered).first
    assert first is not None
    assert (first.rank, str(lowered.ranks[0][first.step])) == (0, first.found)
    assert str(first).startswith("rank 0, step ")


def test_a_placement_or_a_length_that_no_family_has_is_said() -> None:
    reverse = Schedule(["1F0 1B0", "0F0 0B0"], Placement((1, 0)))
    assert str(recognize(reverse)) == "no known family has this placement (p=2, v=1, m=1)"
    missing = Schedule(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1"])
    first = recognize(missing).first
    assert first is not None
    assert (first.rank, first.step, first.found, first.expected) == (1, 3, "", "1B1")
