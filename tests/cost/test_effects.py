"""Promises of memory effects: what a microbatch holds between its passes follows from the table of kinds."""

from __future__ import annotations

import pytest

from penstock import Costs, Schedule, simulate
from penstock.cost.effects import held_bytes
from penstock.cost.memory import counting_activations, exceeds
from penstock.ir.kinds import Kind
from penstock.search.driver import recomputed_costs

COSTS = Costs(forward=2, activation=20, checkpoint=6, offloadable=11)


@pytest.mark.parametrize(
    ("steps", "policy"),
    [
        ("0F0 0F1 0B1 0B0", ()),
        ("0F0 0F1 0B1 0RECOMPUTE0 0B0", (Kind.RECOMPUTE,)),
        ("0F0 0OFFLOAD0 0F1 0RELOAD0 0B1 0B0", (Kind.OFFLOAD,)),
        ("0F0 0OFFLOAD0 0F1 0RELOAD0 0B1 0RECOMPUTE0 0B0", (Kind.RECOMPUTE, Kind.OFFLOAD)),
    ],
)
def test_held_bytes_are_those_of_a_timeline_between_forward_and_backward(
    steps: str, policy: tuple[Kind, ...]
) -> None:
    (memory,) = simulate(Schedule.parse(steps), COSTS).memory
    second = int((memory.times == 2).nonzero()[0][-1])  # F of the second microbatch has taken its activation
    (held,) = held_bytes(COSTS, 1, policy)
    assert memory.activations[second] == held + 20


def test_recomputed_costs_have_the_seconds_of_a_schedule_with_recompute_actions() -> None:
    costs = Costs(forward=2, forward_all_to_all=1, backward_input=3, backward_weight=4, launch_overhead=0.5)
    again = recomputed_costs(costs, 1)
    for plain, recomputed in (
        ("0F0 0B0", "0F0 0RECOMPUTE0 0B0"),
        ("0F0 0I0 0W0", "0F0 0RECOMPUTE0 0I0 0W0"),
    ):
        expected = simulate(Schedule.parse(recomputed), costs).makespan
        assert simulate(Schedule.parse(plain), again).makespan == expected


def test_recomputed_costs_hold_the_checkpoint() -> None:
    assert recomputed_costs(COSTS, 2).activation == (6, 6)


def test_counted_activations_leave_the_seconds_alone() -> None:
    counted = counting_activations(Costs(forward=3, activation=7, activation_freed_by_input=2, parameters=100))
    schedule = Schedule.parse("0F0 0F1 0B0 0B1")
    assert simulate(schedule, counted).peak_memory == (2,)
    assert simulate(schedule, counted).makespan == simulate(schedule, Costs(forward=3)).makespan


def test_rounding_does_not_exceed_a_limit() -> None:
    assert not exceeds(0.1 + 0.2, 0.3)
    assert exceeds(0.3001, 0.3)
