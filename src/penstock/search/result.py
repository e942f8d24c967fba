"""The result of a search, its progress, its budget, and the rank of schedules under jitter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

from penstock.arguments import plural, printable
from penstock.bounds import Bound
from penstock.cost.costs import Costs
from penstock.display import Displayed
from penstock.errors import SearchError
from penstock.ir.schedule import Schedule
from penstock.simulation.jitter import simulate_with_jitter
from penstock.simulation.timeline import Timeline

_ROUNDING = 1e-9


def gap_of(value: float, bound: float) -> float:
    """The excess of a value over its lower bound, as a share of the bound; 0 proves it optimal."""
    if not bound:
        return math.inf if value else 0.0
    gap = value / bound - 1
    return 0.0 if gap < _ROUNDING else gap


def rounded(value: float) -> float:
    """The value without the noise of its last digits, to compare objectives."""
    return float(f"{value:.12g}")


def check_memory_limit(limit: object) -> None:
    """Raise `SearchError` unless this is a number of bytes."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        given = printable(repr(limit))
        raise SearchError(f"memory_limit must be a number of bytes, at least 0 (given {given})")


@dataclass(frozen=True)
class Progress:
    """The state of a running search or plan."""

    phase: str
    best: float
    """The objective of the best schedule so far, in seconds."""
    bound: float
    seconds: float
    """Since the start."""
    fraction: float
    """Of the budget of the phase, from 0 to 1."""

    @property
    def gap(self) -> float:
        """Of the best so far, as a share of the bound."""
        return gap_of(self.best, self.bound)


OnProgress: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class SearchResult(Displayed):
    """The best schedule found.

    `value` is its objective in seconds. No schedule of the same work within the memory limit has a lower
    objective than `bound.seconds`, so the optimality gap is at most `gap`, a share of the bound.
    """

    schedule: Schedule
    timeline: Timeline
    objective: str
    value: float
    bound: Bound
    found_by: str
    """How the order was found."""
    families: Mapping[str, float]
    """The objective of every family that does the same work within the limit."""
    too_large: Mapping[str, float]
    """Peak memory in bytes of the families that exceed the limit."""
    skipped: tuple[str, ...]
    """Families that were not tried, because the time limit was reached."""
    runs: int
    """Number of orders evaluated."""
    seconds: float
    interrupted: bool
    """Whether Ctrl-C ended the search early."""
    missing: tuple[str, ...]
    """Optional parts that are not installed."""
    quantile: float | None
    """With `jitter`: the quantile of the makespan under jitter."""

    def __repr__(self) -> str:
        value = self.timeline.costs.units.time(self.value)
        quality = "proved optimal" if self.proved else f"gap <= {self.gap:.2%}"
        return f"<SearchResult: {self.objective} {value}, {quality}, found by {self.found_by}>"

    @property
    def origin(self) -> str:
        """How the order was found, and among how many, if the search evaluated orders of its own."""
        return (
            f"{self.found_by} ({plural(f'{self.runs:,}', 'order')} evaluated)" if self.runs else self.found_by
        )

    @property
    def gap(self) -> float:
        """The excess over the bound, as a share of the bound."""
        return gap_of(self.value, self.bound.seconds)

    @property
    def proved(self) -> bool:
        """Whether the schedule is proved optimal."""
        return self.gap == 0

    def to_rows(self) -> list[dict[str, Any]]:
        """The result, then the families of the same work; memory in bytes where it is known.

        A family within the limit has a `value`, one that exceeds the limit has its `peak_memory`.
        """
        found = [{"schedule": "result", "value": self.value, "peak_memory": max(self.timeline.peak_memory)}]
        fitting = sorted(self.families.items(), key=lambda item: item[1])
        found += [{"schedule": name, "value": value, "peak_memory": None} for name, value in fitting]
        large = self.too_large.items()
        return found + [{"schedule": name, "value": None, "peak_memory": size} for name, size in large]


# Budget and jitter.


@dataclass(frozen=True)
class Budget:
    """Seconds, or a number of moves, with which the same seed gives the same result."""

    seconds: float
    moves: int | None
    seed: int

    def fraction(self, seconds: float, moves: int) -> float:
        """The share of the budget that so many seconds, or moves, have used."""
        used, whole = (seconds, self.seconds) if self.moves is None else (moves, self.moves)
        return min(used / whole, 1.0) if whole else 1.0

    def is_over(self, seconds: float) -> bool:
        """Whether so many seconds have used it up; a number of moves has no time limit."""
        return self.moves is None and seconds >= self.seconds

    def part(self, share: float, max_seconds: float = inf) -> Budget:
        """A share of the budget."""
        moves = None if self.moves is None else int(share * self.moves)
        return Budget(min(share * self.seconds, max_seconds), moves, self.seed)


@dataclass(frozen=True)
class Jitter:
    """Rank schedules by a quantile of their makespan when the duration of steps varies by `share`."""

    share: float
    quantile: float

    def best(
        self, schedules: Sequence[Schedule], costs: Costs, seed: int, is_over: Callable[[], bool]
    ) -> tuple[int, float]:
        """The position of the schedule with the lowest quantile, and the quantile.

        When time is over, only the schedules so far are compared, at least the first.
        """
        found: list[tuple[float, int]] = []
        for position, schedule in enumerate(schedules):
            if found and is_over():
                break
            spread = simulate_with_jitter(schedule, costs, jitter=self.share, seed=seed)
            found.append((spread.quantile(self.quantile), position))
        quantile, position = min(found)
        return position, quantile
