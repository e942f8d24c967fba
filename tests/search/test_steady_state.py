"""Promise of repeated steady states: a search repeats none after its time limit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from time import perf_counter

import pytest

from penstock.ir.encoding import Ints
from penstock.search import driver, exact, search
from penstock.search.problem import Problem
from penstock.search.seeds import repeat_steady_state


def test_no_steady_state_is_repeated_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that advances with every look, and by more than the limit for every repeated order."""
    begin, looks, repeated = perf_counter(), count(), list[Ints]()

    def slowly(few: Problem, order: Ints, problem: Problem) -> Iterator[Ints]:
        for longer in repeat_steady_state(few, order, problem):
            repeated.append(longer)
            yield longer

    monkeypatch.setattr(driver, "perf_counter", lambda: begin + 0.02 * next(looks) + 1000 * len(repeated))
    monkeypatch.setattr(driver, "repeat_steady_state", slowly)
    monkeypatch.setattr(exact, "available", lambda: False)
    monkeypatch.setattr("penstock.search.driver._OrderSearch._anneal", lambda *_, **__: None)
    monkeypatch.setattr("penstock.search.driver._OrderSearch._raise_bound", lambda *_: None)
    search(ranks=4, microbatches=24, live_limit=3, seconds=200)
    assert len(repeated) == 1
