"""What was weighed: options with their times and sizes, what was left, and which of them none beats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.bounds import Bound
from penstock.ir.schedule import Schedule
from penstock.planning.configuration import Frame
from penstock.simulation.timeline import Timeline

__all__ = ["Left", "Option", "frontier"]

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Option:
    """A frame with an order of work, simulated."""

    name: str
    """The family, or `searched`."""
    frame: Frame
    schedule: Schedule
    """The order of work: compute only, also where the timeline has messages."""
    timeline: Timeline
    seconds: float
    """What it is ranked by: the objective, optimizer step included, or its quantile under jitter."""
    bound: Bound
    """What no order in this frame can stay below, without jitter."""
    plain_seconds: float
    """The same without jitter."""
    found_by: str = ""

    @cached_property
    def memory(self) -> float:
        """The most bytes that any rank holds at once."""
        return max(self.timeline.peak_memory)

    @property
    def gap(self) -> float:
        """How much longer than the bound, as a share of it."""
        gap = self.plain_seconds / self.bound.seconds - 1 if self.bound.seconds else 0.0
        return 0.0 if abs(gap) < _ROUNDING else gap

    @property
    def samples_per_second(self) -> float:
        """Of this pipeline."""
        return self.frame.samples * self.frame.microbatches / self.seconds if self.seconds else 0.0

    @property
    def order(self) -> tuple[float, float, str, int]:
        """Fastest first; of equals the smallest."""
        return self.seconds, self.memory, self.name, self.frame.microbatches

    def __str__(self) -> str:
        return f"{self.name} ({self.frame})"


@dataclass(frozen=True)
class Left:
    """An order that was not simulated: what it holds in this frame, and what it cannot take less than."""

    name: str
    frame: Frame
    memory: float
    bound: float

    def __str__(self) -> str:
        return f"{self.name} ({self.frame})"


def frontier(options: Iterable[Option]) -> list[Option]:
    """Those that no other beats in both time and memory, fastest first."""
    found: list[Option] = []
    for option in sorted(options, key=lambda each: each.order):
        if not found or option.memory < found[-1].memory:
            found.append(option)
    return found
