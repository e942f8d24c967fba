"""The budget of a search, and the rank of its schedules under jitter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from penstock.cost.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.simulation.jitter import simulate_with_jitter


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
