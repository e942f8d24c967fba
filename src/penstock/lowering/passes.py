"""A pass: a named, frozen value that turns a schedule into another with the same meaning.

Contract: a valid schedule in, a valid schedule out; the given schedule is not changed; time grows about
linearly with the number of steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.encoding import Ints
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule


@dataclass(frozen=True)
class Pass(ABC):
    """One change to a schedule; options are fields, `name` is what traces and messages call it."""

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, schedule: Schedule) -> Schedule:
        """The changed schedule."""


def arrange(schedule: Schedule, rank: Ints, key: Ints, code: Ints) -> Schedule:
    """The schedule with these parts on these ranks, sorted by key; parts with equal keys keep their order."""
    by_rank = rank * (int(key.max(initial=0)) + 1)
    by_rank += key
    order = np.argsort(by_rank, kind="stable")
    return schedule.with_codes(code[order], _bounds(rank, schedule.num_ranks))


def insert(schedule: Schedule, before: Ints, rank: Ints, code: Ints) -> Schedule:
    """The schedule with more parts on these ranks, each before the part of this number, in the order given."""
    table = schedule.table
    return schedule.with_codes(
        np.insert(table.code, before, code), table.part_bounds + _bounds(rank, schedule.num_ranks)
    )


def _bounds(rank: Ints, num_ranks: int) -> Ints:
    """Per rank, and one more: how many entries are of lower ranks."""
    return np.concatenate(([0], np.cumsum(np.bincount(rank, minlength=num_ranks))))


def require_absent(schedule: Schedule, name: str, *kinds: Kind) -> None:
    """Raise if the schedule already has what a pass adds."""
    if schedule.table.has(*kinds):
        present = ", ".join(kind.value for kind in kinds if schedule.table.has(kind))
        raise ScheduleError(
            f"{name}: the schedule already has {present} actions; lower the compute schedule it was made from",
            parameter="passes",
        )
