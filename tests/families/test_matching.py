"""Promises of matching families: they have the given placement, and train."""

from __future__ import annotations

import pytest

import penstock
from penstock import Kind, Placement
from penstock.families.registry import offloading_schedules, schedule_on, training_families


@pytest.mark.parametrize("name", list(penstock.families()))
def test_a_family_trains_if_its_schedules_have_backwards(name: str) -> None:
    schedule = penstock.build(name, ranks=2, microbatches=4)
    assert penstock.families()[name].trains == schedule.table.has(Kind.B, Kind.I)


def test_families_with_a_fixed_number_of_stages_per_rank_match_only_that_number() -> None:
    one, two = ({each.name for each in training_families(Placement.loop(2, count))} for count in (1, 2))
    assert "1f1b" in one - two
    assert "zbv" in two - one
    assert "interleaved-1f1b" in one & two


def test_a_schedule_on_another_placement_is_none() -> None:
    assert schedule_on("zbv", Placement.v(3), 4) == penstock.build("zbv", ranks=3, microbatches=4)
    assert schedule_on("zbv", Placement.loop(3, 2), 4) is None
    assert schedule_on("1f1b", Placement.loop(3, 2), 4) is None


def test_unequal_stages_per_rank_match() -> None:
    placement = Placement.loop(3, [1, 2, 1])
    found = schedule_on("interleaved-1f1b", placement, 3)
    assert found is not None
    assert found.placement == placement


def test_families_that_offload_by_themselves_are_found() -> None:
    assert [each.name for each in offloading_schedules(Placement.loop(2, 2), 4)] == ["po-h"]
    assert not list(offloading_schedules(Placement.v(2), 4))
