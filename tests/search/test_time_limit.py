"""Promise of the time limit: the time to make the result is a part of it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import pytest

from penstock import Costs
from penstock.ir.schedule import Schedule
from penstock.search import driver, exact, search
from penstock.search.driver import PlacementSearch
from penstock.search.passes import FitMemory
from penstock.simulation.timeline import Timeline

_FAMILY_SECONDS = 1000.0


def test_time_is_left_for_the_result_where_families_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only families advance: of 5.5 times that of a family, three are left."""
    driver.compile_kernels()
    begin, evaluated = perf_counter(), list[str]()
    add_family = PlacementSearch.add_family

    def slowly(self: PlacementSearch, schedule: Schedule) -> None:
        evaluated.append(schedule.name)
        add_family(self, schedule)

    monkeypatch.setattr(driver, "perf_counter", lambda: begin + _FAMILY_SECONDS * len(evaluated))
    monkeypatch.setattr(PlacementSearch, "add_family", slowly)
    monkeypatch.setattr(exact, "available", lambda: False)
    found = search(ranks=4, microbatches=8, seconds=5.5 * _FAMILY_SECONDS)
    assert list(found.families) == evaluated
    assert len(evaluated) == 3
    assert found.skipped


def test_with_memory_policies_no_family_is_built_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only orders advance: the first that fits is the result, and the others are named."""
    begin, fitted, fitted_simply = perf_counter(), list[str](), FitMemory.fitted_simply

    def slowly(self: FitMemory, schedule: Schedule, is_late: Callable[[], bool]) -> Timeline | None:
        fitted.append(schedule.name)
        return fitted_simply(self, schedule, is_late)

    monkeypatch.setattr(driver, "perf_counter", lambda: begin + _FAMILY_SECONDS * len(fitted))
    monkeypatch.setattr(FitMemory, "fitted_simply", slowly)
    costs = Costs(activation=10, checkpoint=1)
    seconds = 1.9 * _FAMILY_SECONDS
    found = search(ranks=4, microbatches=8, costs=costs, memory_limit=25, recompute=True, seconds=seconds)
    assert fitted == ["serial order", "gpipe"]
    assert set(found.families) <= {"serial order", "gpipe with 32 RECOMPUTE"}
    assert found.found_by in found.families
    assert {"1f1b", "zb-h1"} <= set(found.skipped)
    assert max(found.timeline.peak_memory) <= 25
