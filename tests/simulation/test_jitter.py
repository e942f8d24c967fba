"""Promises of the Monte-Carlo: seeded, centred, and slower with a straggler."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock import CostsError, ScheduleError
from penstock.simulation.jitter import simulate_with_jitter

SCHEDULE = penstock.build("1f1b", ranks=4, microbatches=8)


def test_the_same_seed_gives_the_same_answer() -> None:
    assert (
        simulate_with_jitter(SCHEDULE, seed=3, runs=20).makespans.tolist()
        == simulate_with_jitter(SCHEDULE, seed=3, runs=20).makespans.tolist()
    )
    assert (
        simulate_with_jitter(SCHEDULE, seed=4, runs=20).mean
        != simulate_with_jitter(SCHEDULE, seed=3, runs=20).mean
    )


def test_without_jitter_nothing_varies() -> None:
    assert set(simulate_with_jitter(SCHEDULE, jitter=0, runs=5).makespans.tolist()) == {33.0}


def test_jitter_makes_waiting_longer_and_quantiles_are_in_order() -> None:
    spread = simulate_with_jitter(SCHEDULE, jitter=0.2, runs=100)
    assert spread.mean > 33
    assert spread.quantile(0.05) < spread.quantile(0.5) < spread.quantile(0.95)


def test_a_straggler_slows_all() -> None:
    assert simulate_with_jitter(SCHEDULE, jitter=0, stragglers={2: 1.5}, runs=1).mean > 1.3 * 33


@pytest.mark.parametrize("wrong", [{"jitter": -1}, {"runs": 0}, {"stragglers": {9: 2}}, {"stragglers": {0: 0}}])
def test_invalid_numbers_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(CostsError):
        simulate_with_jitter(SCHEDULE, **wrong)


def test_an_invalid_schedule_is_rejected() -> None:
    with pytest.raises(ScheduleError):
        simulate_with_jitter(penstock.Schedule.parse("0F0 0F0"))
