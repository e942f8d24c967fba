"""Promises of timelines: their memory, and a period that is known or None."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Costs, CostsError, Kind, Schedule, ScheduleError, simulate
from tests.support.grids import examples
from tests.support.random_costs import random_costs
from tests.support.random_schedules import random_valid

seeds = st.integers(min_value=0, max_value=2**32)


@settings(max_examples=examples(300), deadline=None)
@given(seeds)
def test_memory_returns_to_where_it_was_and_peaks_where_a_count_says(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_valid(rng)
    timeline = simulate(schedule, random_costs(rng, schedule.num_stages))
    for memory in timeline.memory:
        assert memory.total[-1] == memory.fixed
    if not schedule.table.has(Kind.B, Kind.I) or schedule.table.has(Kind.RECOMPUTE, Kind.OFFLOAD):
        return
    for rank, row in enumerate(schedule.ranks):
        live = peak = 0
        for part in (part for step in row for part in step.parts):
            live += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(part.kind, 0)
            peak = max(peak, live)
        assert timeline.memory[rank].activations.max() == peak


def test_parameters_gradients_and_optimizer_state_are_always_there() -> None:
    costs = Costs(parameters=(5, 7), gradients=1, optimizer_state=10, activation=2, activation_freed_by_input=1)
    timeline = simulate(Schedule.parse("0F0 0I0 0W0 | 1F0 1I0 1W0"), costs)
    assert timeline.peak_memory == (5 + 1 + 10 + 2, 7 + 1 + 10 + 2)
    assert timeline.memory[0].total.tolist() == [18, 17, 16]


def test_a_period_is_known_only_if_it_was_asked_for() -> None:
    schedule = penstock.build("1f1b", ranks=2, microbatches=4)
    assert simulate(schedule).period is None
    assert simulate(schedule, with_period=True).period == 15  # iterations do not overlap
    with pytest.raises(CostsError, match="the period of this timeline is unknown"):
        simulate(schedule).bubble("period")


def test_a_timeline_is_data_over_the_schedule_that_was_given() -> None:
    schedule = penstock.build("1f1b", ranks=2, microbatches=4)
    timeline = simulate(schedule, Costs(bandwidth=10, activation_message=5, gradient_message=5))
    assert timeline.schedule is schedule
    assert timeline.begin is not None
    assert len(timeline.messages) == 8
    assert all(not callable(value) for value in vars(timeline).values())


def test_send_models_that_block_need_a_lowered_schedule() -> None:
    schedule = penstock.build("1f1b", ranks=2, microbatches=4)
    for options in ({"send_model": "rendezvous"}, {"blocking_receives": True}):
        with pytest.raises(ScheduleError, match="has no SEND and RECV actions to block; lower it first"):
            simulate(schedule, **options)
        assert simulate(penstock.lower(schedule), **options).makespan >= 15


def test_the_repr_is_one_line() -> None:
    timeline = simulate(penstock.build("1f1b", ranks=4, microbatches=8))
    assert repr(timeline) == "<Timeline 1f1b: makespan 33 units, 27.3% idle, peak memory 4 activations>"
