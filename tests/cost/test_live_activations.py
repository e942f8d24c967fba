"""Peaks from counts of live activations equal simulated ones."""

from __future__ import annotations

import pytest

import penstock
from penstock import Costs, Schedule
from penstock.cost.memory import live_activations
from penstock.errors import UnhandledKindError
from penstock.families import families


def test_peaks_equal_those_of_the_simulator() -> None:
    for name in families():
        if name in ("forward-only", "po-h"):  # copies to the host have to be simulated
            continue
        schedule = penstock.build(name, ranks=3, microbatches=7)
        n = schedule.num_stages
        costs = Costs(
            activation=tuple(range(10, 10 + n)),
            activation_freed_by_input=tuple(range(n)),
            parameters=tuple(range(5, 5 + n)),
        )
        counted = [each.peak(costs, n) for each in live_activations(schedule.table)]
        assert counted == list(penstock.simulate(schedule, costs).peak_memory), name


def test_peaks_of_recomputed_microbatches_equal_those_of_the_simulator() -> None:
    schedule = Schedule.parse("0F0 0F1 0F2 0RECOMPUTE0 0B0 0B1 0RECOMPUTE2 0I2 0F3 0W2 0B3")
    for checkpoint in (0, 2, 7):
        costs = Costs(activation=7, checkpoint=checkpoint, activation_freed_by_input=3)
        (live,) = live_activations(schedule.table)
        assert (live.peak(costs, 1),) == penstock.simulate(schedule, costs).peak_memory


def test_what_copies_to_the_host_free_only_a_clock_shows() -> None:
    with pytest.raises(UnhandledKindError, match="OFFLOAD"):
        live_activations(Schedule.parse("0F0 0OFFLOAD0 0RELOAD0 0B0").table)
