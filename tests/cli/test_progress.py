"""Tests of the progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from penstock.cli import rendering as progress
from penstock.cost.units import Units
from penstock.search import Progress


@pytest.mark.parametrize(
    ("units", "text"),
    [
        (Units(seconds=False), "annealing: best 33 units, bound 27 units, gap 22.22%"),
        (Units(), "annealing: best 33 s, bound 27 s, gap 22.22%"),
    ],
)
def test_a_search_shows_its_times_in_the_units_of_its_costs(
    units: Units, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    @contextmanager
    def recorded() -> Iterator[Callable[[str, float], None]]:
        yield lambda phase, _: shown.append(phase)

    monkeypatch.setattr(progress, "phase_progress", recorded)
    with progress.search_progress(units) as on_progress:
        on_progress(Progress("annealing", 33.0, 27.0, 1.0, 0.5))
    assert shown == [text]
