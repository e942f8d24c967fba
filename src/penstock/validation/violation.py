"""A violation: what is wrong, where, and what to try."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.action import Action, Step
from penstock.ir.encoding import JOINED, decode
from penstock.ir.table import ActionTable
from penstock.validation.send_model import SendModel

__all__ = ["Violation", "Wait", "part_at", "slot_at", "violation_at"]


@dataclass(frozen=True)
class Wait:
    """One link of a cycle: this step waits for that step, which is on another rank or earlier in the list."""

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
    """One violation. `code` is stable, `step` counts from 0 in the rank's list; None where there is none."""

    code: str
    message: str
    suggestion: str
    rank: int | None = None
    step: int | None = None
    action: Step | None = None
    cycle: tuple[Wait, ...] = ()
    """For a deadlock: the waits, each for a step that cannot run before the next one has."""
    send_models: tuple[SendModel, ...] = ()
    """For a deadlock: the send models under which it happens."""

    @property
    def where(self) -> str:
        """The place as text: `rank 1, step 3, 2B0`, or as much of it as is known."""
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
    (action,) = decode([int(table.code[part]) & ~JOINED], table.graph)
    assert isinstance(action, Action)
    return rank, slot - int(table.slot_bounds[rank]), action


def slot_at(table: ActionTable, slot: int) -> tuple[int, int, Step]:
    """Rank, step and action, or overlapped pair, of a slot."""
    rank = int(table.rank[slot])
    first, last = np.searchsorted(table.slot, [slot, slot + 1])
    (step,) = decode(table.code[first:last].tolist(), table.graph)
    return rank, slot - int(table.slot_bounds[rank]), step


def violation_at(table: ActionTable, part: int, code: str, message: str, suggestion: str) -> Violation:
    """A violation at one part."""
    rank, step, action = part_at(table, part)
    return Violation(code, message, suggestion, rank, step, action)
