"""What a search gives: the schedule, how good it is, and how far from the best there can be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.bounds import Bound
from penstock.ir.schedule import Schedule
from penstock.simulation.timeline import Timeline

__all__ = ["Progress", "SearchResult", "gap_of"]

_ROUNDING = 1e-9


def gap_of(value: float, bound: float) -> float:
    """How much more than the bound, as a share of it; 0 is a proof that nothing is better."""
    if not bound:
        return math.inf if value else 0.0
    gap = value / bound - 1
    return 0.0 if gap < _ROUNDING else gap


@dataclass(frozen=True)
class Progress:
    """How far a search is."""

    doing: str
    best: float
    bound: float
    seconds: float
    """Since it began."""
    share: float
    """Of what it may take, from 0 to 1."""

    @property
    def gap(self) -> float:
        """Of the best so far to the bound."""
        return gap_of(self.best, self.bound)


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best schedule that was found.

    Its `value` is the objective in seconds. No schedule of this work within the memory limit has one below
    `bound.seconds`, so this one is at most `gap` (a share of the bound) from the best there is.
    """

    schedule: Schedule
    timeline: Timeline
    objective: str
    value: float
    bound: Bound
    found_by: str
    """Where its order comes from."""
    families: Mapping[str, float]
    """The objective of every family that does the same work within the limit."""
    too_large: Mapping[str, float]
    """What the other families would hold, in bytes."""
    runs: int
    """How many orders were run."""
    seconds: float
    interrupted: bool
    """Whether it was stopped by hand before its time was over."""
    missing: tuple[str, ...]
    """What could not be used because it is not installed."""
    quantile: float | None
    """What the chosen share of runs stays within under noise, if noise was asked for."""

    @property
    def gap(self) -> float:
        """How much more than the bound, as a share of it."""
        return gap_of(self.value, self.bound.seconds)

    @property
    def proved(self) -> bool:
        """Whether it is proved that nothing is better."""
        return self.gap == 0
