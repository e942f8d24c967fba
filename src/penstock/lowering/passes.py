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
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints

__all__ = ["Pass", "arrange", "require_absent"]


@dataclass(frozen=True)
class Pass(ABC):
    """One change to a schedule; options are fields, `name` is what traces and messages call it."""

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, schedule: Schedule) -> Schedule:
        """The changed schedule."""


def arrange(num_ranks: int, rank: Ints, key: Ints, code: Ints) -> list[Ints]:
    """The rows of all ranks, their parts sorted by key; parts with equal keys keep their order."""
    order = np.argsort(rank * (int(key.max(initial=0)) + 1) + key, kind="stable")
    return np.split(code[order], np.cumsum(np.bincount(rank, minlength=num_ranks))[:-1])


def require_absent(schedule: Schedule, name: str, *kinds: Kind) -> None:
    """Raise if the schedule already has what a pass adds."""
    if schedule.table.has(*kinds):
        present = ", ".join(kind.value for kind in kinds if schedule.table.has(kind))
        raise ScheduleError(
            f"{name}: the schedule already has {present} actions; lower the compute schedule it was made from"
        )
