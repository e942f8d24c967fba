"""Bound: a number of seconds that no order of the work can beat, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.bounds.workload import Workload

__all__ = ["Bound", "worst"]


@dataclass(frozen=True, order=True)
class Bound:
    """No order of the work can take less than `seconds`."""

    seconds: float
    name: str
    because: str


def worst(work: Workload, of: Callable[[int], float]) -> tuple[float, int]:
    """The greatest over ranks, and the rank."""
    seconds, rank = max((of(rank), -rank) for rank in range(work.placement.num_ranks))
    return seconds, -rank
