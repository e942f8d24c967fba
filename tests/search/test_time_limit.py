"""Promise of the time limit: the time to make the result is a part of it."""

from __future__ import annotations

from time import perf_counter

import pytest

from penstock.ir.schedule import Schedule
from penstock.search import driver, exact, placement_search, search
from penstock.search.placement_search import PlacementSearch

_FAMILY_SECONDS = 1000.0


def test_time_is_left_for_the_result_where_families_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only families advance: of 5.5 times that of a family, three are left."""
    driver.compile_kernels()
    begin, evaluated = perf_counter(), list[str]()
    add_family = PlacementSearch.add_family

    def slowly(self: PlacementSearch, schedule: Schedule) -> None:
        evaluated.append(schedule.name)
        add_family(self, schedule)

    for module in (driver, placement_search):
        monkeypatch.setattr(module, "perf_counter", lambda: begin + _FAMILY_SECONDS * len(evaluated))
    monkeypatch.setattr(PlacementSearch, "add_family", slowly)
    monkeypatch.setattr(exact, "available", lambda: False)
    found = search(ranks=4, microbatches=8, seconds=5.5 * _FAMILY_SECONDS)
    assert list(found.families) == evaluated
    assert len(evaluated) == 3
    assert found.skipped
