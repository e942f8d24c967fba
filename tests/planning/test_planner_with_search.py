"""Plans with the real search."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

import penstock
from penstock.planning import plan
from tests.support.planning_models import decoder


@pytest.mark.parametrize("bandwidth", [None, 50.0])
def test_a_search_is_never_worse_and_its_options_are_valid_and_fit(bandwidth: float | None) -> None:
    model = replace(decoder(6, latency=0.2, bandwidth=bandwidth, optimizer_step=1), ranks=3, samples=4)
    without, made = (plan(model, memory_limit=170, seconds=seconds) for seconds in (0.0, 2.0))
    assert made.best.seconds <= without.best.seconds
    assert made.bound <= made.best.seconds * (1 + 1e-9)
    for option in made.options:
        assert penstock.validate(option.schedule) == []
        assert option.schedule.table.only_compute
        timeline = penstock.simulate(option.schedule, option.configuration.costs)
        assert max(timeline.peak_memory) == option.memory <= 170 * (1 + 1e-9)
        assert timeline.makespan + 1 == option.seconds_without_jitter
        assert option.bound.seconds <= option.seconds * (1 + 1e-9)


def test_a_searched_period_is_ranked_without_the_optimizer_step() -> None:
    model = replace(decoder(6, optimizer_step=1), ranks=3, samples=4)
    made = plan(model, objective="period", seconds=1.0)
    assert all(option.seconds == option.timeline.period for option in made.options)


def test_importing_penstock_loads_neither_numba_nor_ortools_nor_torch() -> None:
    code = "import sys, penstock; sys.exit(bool({'numba', 'ortools', 'torch'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 -- our own interpreter
