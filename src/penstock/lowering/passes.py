"""What a pass is: a named, frozen value that turns a schedule into another with the same meaning.

Contract: a right schedule in, a right schedule out; the schedule given is not changed; time grows about
linearly with the number of steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints

__all__ = ["Pass", "arrange", "refuse_if_present"]


@dataclass(frozen=True)
class Pass(ABC):
    """One change to a schedule; options are fields, `name` is what traces and messages call it."""

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, schedule: Schedule) -> Schedule:
        """The changed schedule."""


def arrange(num_ranks: int, rank: Ints, key: Ints, code: Ints) -> list[Ints]:
    """The rows in which the parts of each rank stand in the order of their keys; equal keys keep theirs."""
    order = np.argsort(rank * (int(key.max(initial=0)) + 1) + key, kind="stable")
    return np.split(code[order], np.cumsum(np.bincount(rank, minlength=num_ranks))[:-1])


def refuse_if_present(schedule: Schedule, name: str, *kinds: Kind) -> None:
    """A pass that puts in what is there already would put it in twice."""
    if schedule.table.has(*kinds):
        there = ", ".join(kind.value for kind in kinds if schedule.table.has(kind))
        raise ScheduleError(
            f"{name}: the schedule already has {there} steps; lower the compute schedule it came from"
        )
