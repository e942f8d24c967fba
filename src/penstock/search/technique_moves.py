"""Moves on single pairs: recompute or offload one microbatch of one stage more or less, or shift one action.

    recompute   add a RECOMPUTE directly before the backward, or remove it
    offload     add an OFFLOAD directly after F and a RELOAD a few steps before its use, or remove both
    shift       move one action of a rank past its neighbours

A move keeps the order of the actions of a stage and microbatch, and of those of a kind and stage. So every list
stays in a valid order; whether the ranks then wait for each other in a cycle is for the simulator to say.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from penstock.cost.costs import Costs
from penstock.errors import ScheduleError
from penstock.ir.encoding import (
    JOINED,
    KIND_MASK,
    KIND_SHIFT,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    code_of,
)
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.simulation.simulator import Simulator
from penstock.simulation.timeline import Timeline

_FARTHEST = 6
"""Places by which a RELOAD is ahead of its use, or an action is shifted, at most."""


class TechniqueMoves:
    """Random moves on schedules of the same stages, placement and microbatches."""

    def __init__(self, schedule: Schedule, rng: random.Random, *, recompute: bool, offload: bool) -> None:
        self._placement, self._microbatches, self._rng = schedule.placement, schedule.microbatches, rng
        toggles = [self._recompute] * recompute + [self._offload] * offload
        self._moves = [*toggles, self._shift]

    def changed(self, schedule: Schedule) -> Schedule | None:
        """The schedule after one move; None if the move is not possible."""
        rows = [row.tolist() for row in schedule.table.rows]
        rank = self._rng.randrange(len(rows))
        changed = self._rng.choice(self._moves)(rows[rank], rank)
        if changed is None:
            return None
        rows[rank] = changed
        return schedule.with_rows(rows)

    def _pair(self, rank: int) -> tuple[int, int]:
        stages = self._placement.stages_of_rank[rank]
        return self._rng.choice(stages), self._rng.randrange(self._microbatches)

    def _recompute(self, row: list[int], rank: int) -> list[int] | None:
        stage, microbatch = self._pair(rank)
        again = code_of(Kind.RECOMPUTE, stage, microbatch)
        if again in row:
            return [code for code in row if code != again]
        use = _step(row, _backward(row, stage, microbatch))
        return [*row[:use], again, *row[use:]]

    def _offload(self, row: list[int], rank: int) -> list[int] | None:
        stage, microbatch = self._pair(rank)
        both = [code_of(kind, stage, microbatch) for kind in (Kind.OFFLOAD, Kind.RELOAD)]
        if both[0] in row:
            return [code for code in row if code not in both]
        again = code_of(Kind.RECOMPUTE, stage, microbatch)
        use = row.index(again) if again in row else _step(row, _backward(row, stage, microbatch))
        after = _end(row, _index(row, Kind.F, stage, microbatch))
        before = _step(row, max(after, use - self._rng.randrange(_FARTHEST)))
        return [*row[:after], both[0], *row[after:before], both[1], *row[before:]]

    def _shift(self, row: list[int], rank: int) -> list[int] | None:
        """Move one action, with its pair, past up to some neighbours."""
        del rank
        first = _step(row, self._rng.randrange(len(row)))
        end = _end(row, first)
        moved, places = row[first:end], self._rng.randrange(1, _FARTHEST)
        if self._rng.random() < 0.5:
            start = _step(row, max(first - places, 0))
            passed, changed = row[start:first], [*row[:start], *moved, *row[start:first], *row[end:]]
        else:
            stop = _end(row, min(end + places, len(row)) - 1)
            passed, changed = row[end:stop], [*row[:first], *row[end:stop], *moved, *row[stop:]]
        return None if not passed or any(_are_ordered(a, b) for a in moved for b in passed) else changed


def _are_ordered(one: int, two: int) -> bool:
    """Whether the order of two actions of a rank has to stay: same stage, and same microbatch or same kind."""
    same_stage = one >> STAGE_SHIFT & STAGE_MASK == two >> STAGE_SHIFT & STAGE_MASK
    same_microbatch = one >> MICROBATCH_SHIFT & MICROBATCH_MASK == two >> MICROBATCH_SHIFT & MICROBATCH_MASK
    return same_stage and (same_microbatch or one >> KIND_SHIFT & KIND_MASK == two >> KIND_SHIFT & KIND_MASK)


def _index(row: Sequence[int], kind: Kind, stage: int, microbatch: int) -> int:
    """Where an action is, also as the second part of a pair."""
    code = code_of(kind, stage, microbatch)
    return next(i for i, each in enumerate(row) if each & ~JOINED == code)


def _backward(row: Sequence[int], stage: int, microbatch: int) -> int:
    codes = [code_of(kind, stage, microbatch) for kind in (Kind.I, Kind.B)]
    return next(i for i, each in enumerate(row) if each & ~JOINED in codes)


def _step(row: Sequence[int], place: int) -> int:
    """The first part of the step at this place."""
    return place - 1 if place < len(row) and row[place] & JOINED else place


def _end(row: Sequence[int], place: int) -> int:
    """Behind the step at this place."""
    return place + 2 if place + 1 < len(row) and row[place + 1] & JOINED else place + 1


def timeline_of(schedule: Schedule, costs: Costs, objective: str) -> Timeline | None:
    """The timeline of an order that can deadlock; None if it does."""
    try:
        simulator = Simulator(schedule, costs)
    except ScheduleError:  # no messages can be added to what deadlocks
        return None
    done = simulator.run()
    if np.min(done.end, initial=0) < 0:
        return None
    period = simulator.period(done) if objective == "period" else None
    return Timeline(schedule, costs, *simulator.times(done), period=period)
