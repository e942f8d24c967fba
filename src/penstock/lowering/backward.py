"""Split every backward into I and W, or merge an I that is directly followed by its W.

split-backward    0F0 0B0         ->  0F0 0I0 0W0
                  (0F1;1B0)OVERLAP_F_B  ->  (0F1;1I0)OVERLAP_F_B 1W0
merge-backward    the reverse; an I with something between it and its W stays
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.ir.encoding import JOINED, code_of, kinds_in
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering.passes import Pass, arrange

_B_TO_I = code_of(Kind.I, 0) - code_of(Kind.B, 0)
_I_TO_W = code_of(Kind.W, 0) - code_of(Kind.I, 0)


@dataclass(frozen=True)
class SplitBackward(Pass):
    """Every B becomes I and W."""

    name: ClassVar[str] = "split-backward"

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with I W in place of B."""
        table = schedule.table
        whole = table.of_kind(Kind.B)
        code = np.where(whole, table.code + _B_TO_I, table.code)
        place = np.arange(len(code))
        return arrange(
            schedule,
            np.concatenate((table.part_rank, table.part_rank[whole])),
            np.concatenate((place, place[whole])),
            np.concatenate((code, (code[whole] & ~JOINED) + _I_TO_W)),
        )


@dataclass(frozen=True)
class MergeBackward(Pass):
    """Every I that is directly followed by its own W becomes B."""

    name: ClassVar[str] = "merge-backward"

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with B in place of I W."""
        rows = []
        for row in schedule.table.rows:
            merged = kinds_in(row) == Kind.I.number
            merged[:-1] &= (row[:-1] & ~JOINED) + _I_TO_W == row[1:]
            merged[-1:] = False
            dropped = np.concatenate(([False], merged[:-1]))[: len(row)]
            rows.append(np.where(merged, row - _B_TO_I, row)[~dropped])
        return schedule.with_rows(rows)
