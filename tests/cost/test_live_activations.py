"""Peaks from counts of live activations equal simulated ones."""

from __future__ import annotations

import penstock
from penstock import Costs
from penstock.cost.memory import live_activations
from penstock.families import families


def test_peaks_equal_those_of_the_simulator() -> None:
    for name in families():
        if name == "forward-only":
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
