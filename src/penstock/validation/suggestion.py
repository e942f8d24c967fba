"""A move that breaks a deadlock cycle, found by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from penstock.ir.schedule import Schedule
from penstock.validation.violation import Violation

__all__ = ["suggested_move"]

_MAX_MOVES = 16
_MAX_MOVES_OF_LARGE = 2
_LARGE_STEPS = 20_000


class _Move(NamedTuple):
    rank: int
    step: int
    to: int
    """The step takes the place of this one."""
    text: str


def suggested_move(
    schedule: Schedule, deadlock: Violation, violations_of: Callable[[Schedule], list[Violation]]
) -> str:
    """What to suggest: a single move that makes the schedule valid, or at least breaks nothing else."""
    most = _MAX_MOVES_OF_LARGE if schedule.num_steps > _LARGE_STEPS else _MAX_MOVES
    had = {violation.code for violation in violations_of(schedule)}
    helpful = None
    for _, move in zip(range(most), _moves(deadlock)):
        codes = {violation.code for violation in violations_of(_moved(schedule, move))}
        if codes == had - {"deadlock"}:
            return move.text
        if codes <= had:
            helpful = helpful or f"{move.text}, then check again"
    return helpful or deadlock.suggestion


def _moves(deadlock: Violation) -> Iterator[_Move]:
    """For each wait: move what is awaited before what blocks its rank, or the blocking step after it."""
    waits = deadlock.cycle
    for wait, then in zip(waits, waits[1:] + waits[:1]):
        if wait.rank == wait.for_rank and wait.for_step < wait.step:
            early, late, name, other = wait.for_step, wait.step, wait.action, wait.for_action
        elif wait.for_rank == then.rank and then.step < wait.for_step:
            early, late, name, other = then.step, wait.for_step, wait.for_action, then.action
        else:
            continue
        where = f"on rank {wait.for_rank}, move"
        yield _Move(wait.for_rank, late, early, f"{where} {name} before {other}")
        yield _Move(wait.for_rank, early, late, f"{where} {other} after {name}")


def _moved(schedule: Schedule, move: _Move) -> Schedule:
    table = schedule.table
    rows = table.rows
    slots = table.slot[slice(*table.part_bounds[move.rank : move.rank + 2])]
    steps = np.split(rows[move.rank], np.flatnonzero(np.diff(slots)) + 1)
    steps.insert(move.to, steps.pop(move.step))
    rows[move.rank] = np.concatenate(steps)
    return schedule.with_rows(rows)
