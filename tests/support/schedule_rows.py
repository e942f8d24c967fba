"""A schedule as text, and schedules that differ from it in one step."""

from __future__ import annotations

import random

from penstock import Schedule

__all__ = ["rows_of", "with_moved_step"]


def rows_of(schedule: Schedule) -> list[list[str]]:
    """The text of every step, per rank."""
    return [[str(step) for step in row] for row in schedule.ranks]


def with_moved_step(schedule: Schedule, rng: random.Random) -> Schedule:
    """The schedule with one step of one rank at another position."""
    rows = [list(row) for row in schedule.ranks]
    row = rng.choice(rows)
    row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))
    return Schedule(rows, schedule.placement, schedule.microbatches)
