"""What is wrong, where, and what to try: the answer of every rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.action import JOINED, Action, Step, decode
from penstock.ir.table import ActionTable

__all__ = ["Violation", "Wait", "part_at", "slot_at", "violation_at"]


@dataclass(frozen=True)
class Wait:
    """One link of a cycle: this step, on this rank, cannot go on before that step, on that rank, has."""

    rank: int
    step: int
    action: Step
    for_rank: int
    for_step: int
    for_action: Step
    why: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, step {self.step}: {self.action} waits for "
            f"{self.for_action} (rank {self.for_rank}, step {self.for_step}): {self.why}"
        )


@dataclass(frozen=True)
class Violation:
    """One fault. `code` is stable, `step` counts from 0 in the rank's list; None where nothing stands."""

    code: str
    message: str
    suggestion: str
    rank: int | None = None
    step: int | None = None
    action: Step | None = None
    cycle: tuple[Wait, ...] = ()
    """For a deadlock: the waits, each for something that comes after the next."""
    models: tuple[str, ...] = ()
    """For a deadlock: the ways of sending under which it happens."""

    @property
    def where(self) -> str:
        """The place as text: `rank 1, step 3, 2B0`, or as much of it as there is."""
        named = (("rank ", self.rank), ("step ", self.step), ("", self.action))
        return ", ".join(f"{name}{value}" for name, value in named if value is not None)

    def __str__(self) -> str:
        place = f" {self.where}" if self.where else ""
        lines = [f"error[{self.code}]{place}: {self.message}"]
        lines += [f"  {wait}" for wait in self.cycle]
        return "\n".join([*lines, f"  try: {self.suggestion}"])


def part_at(table: ActionTable, part: int) -> tuple[int, int, Action]:
    """Rank, step and action of a part."""
    slot = int(table.slot[part])
    rank = int(table.rank[slot])
    (action,) = decode([int(table.code[part]) & ~JOINED])
    assert isinstance(action, Action)
    return rank, slot - int(table.slot_bounds[rank]), action


def slot_at(table: ActionTable, slot: int) -> tuple[int, int, Step]:
    """Rank, step and action, or overlapped pair, of a slot."""
    rank = int(table.rank[slot])
    first, last = np.searchsorted(table.slot, [slot, slot + 1])
    (step,) = decode(table.code[first:last].tolist())
    return rank, slot - int(table.slot_bounds[rank]), step


def violation_at(table: ActionTable, part: int, code: str, message: str, suggestion: str) -> Violation:
    """A fault that stands at one part."""
    rank, step, action = part_at(table, part)
    return Violation(code, message, suggestion, rank, step, action)
