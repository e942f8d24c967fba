"""Bound: a number of seconds that no order of the work can beat, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.bounds.workload import Workload

__all__ = ["Bound", "worst"]

_ROUNDING = 1e-9


@dataclass(frozen=True, order=True)
class Bound:
    """No order of the work can take less than `seconds`."""

    seconds: float
    name: str
    because: str

    def gap(self, seconds: float) -> float:
        """How much longer than the bound this is, as a share of the bound; 0 is a proof of optimality."""
        gap = seconds / self.seconds - 1 if self.seconds else 0.0
        return 0.0 if abs(gap) < _ROUNDING else gap


def worst(work: Workload, of: Callable[[int], float]) -> tuple[float, int]:
    """The greatest over ranks, and the rank."""
    seconds, rank = max((of(rank), -rank) for rank in range(work.placement.num_ranks))
    return seconds, -rank
