"""Schedules become orders and back."""

from __future__ import annotations

import pytest

import penstock
from penstock import Action, Kind, Placement, Schedule, UnhandledKindError, build, lower
from penstock.search.problem import Problem
from penstock.search.seeds import family_builders, serial


def test_a_schedule_survives_the_conversion_to_tokens() -> None:
    problem = Problem(Placement.v(4), 8, penstock.Costs())
    for schedule in filter(None, (builder() for builder in family_builders(problem).values())):
        if schedule.name in ("v-half", "v-min", "zbv"):
            again = problem.fused_schedule(problem.order_of(schedule), "again", frozenset(range(8)))
            assert [list(map(str, row)) for row in again.ranks] == [
                list(map(str, row))
                for row in problem.fused_schedule(problem.order_of(again), "again", frozenset(range(8))).ranks
            ]


def test_where_b_is_shorter_an_order_can_have_b_and_also_i_directly_followed_by_its_w() -> None:
    problem = Problem(Placement.loop(2), 3, penstock.Costs(backward=1.5))
    schedule = Schedule.parse("0F0 0F1 0B0 0F2 0I1 0W1 0B2 | 1F0 1I0 1F1 1B1 1F2 1B2 1W0")
    again = problem.fused_schedule(problem.order_of(schedule), "again")
    assert again.ranks == schedule.ranks


def test_a_backward_is_fused_where_splitting_gains_nothing() -> None:
    problem = Problem(Placement.loop(1), 2, penstock.Costs())
    assert str(problem.schedule_of(serial(problem), "whole")[0].ranks[0][1]) == "0B0"


def test_communication_and_sharding_actions_are_skipped() -> None:
    problem = Problem(Placement.loop(2), 3, penstock.Costs())
    schedule = build("zb-h1", ranks=2, microbatches=3)
    assert problem.order_of(lower(schedule)).tolist() == problem.order_of(schedule).tolist()


REFUSED = (Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD)


def test_every_known_kind_of_action_is_ordered_or_skipped() -> None:
    problem = Problem(Placement.loop(1), 1, penstock.Costs())
    for kind in set(Kind) - {Kind.OVERLAP_F_B, *REFUSED}:  # an overlap has parts of other kinds
        problem.order_of(schedule_with(kind))


@pytest.mark.parametrize("kind", REFUSED, ids=str)
def test_memory_actions_are_refused(kind: Kind) -> None:
    with pytest.raises(UnhandledKindError, match=f"search does not handle actions of kind {kind}"):
        Problem(Placement.loop(1), 1, penstock.Costs()).order_of(schedule_with(kind))


def schedule_with(kind: Kind) -> Schedule:
    """One action of this kind."""
    return Schedule([[Action(kind, 0, 0 if kind.has_microbatch else None)]])
