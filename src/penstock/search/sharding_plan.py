"""Which stages of a rank are unsharded during which of its steps, within the bytes that each step leaves free.

A stage stays unsharded from one use to the next where there is room. Where there is not, the stage whose next
use is farthest is resharded, as in Belady's rule, which gathers least if all stages have the same size, and
gathered again in time for that use. What is left of the room is used to start gathers earlier, in the order of
the steps that need them.

    step     0F0  0F1  1F0  1F1  2F0  2F1  2B0 ...        room for two stages
    stage 0   #    #    #    #    .    .    .              its next use is farthest: resharded when 2 is needed
    stage 1   o    o    #    #    #    #    #              o: gathered ahead
    stage 2   .    .    o    o    #    #    #              never before there is room
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.ir.encoding import Bools, Floats


@dataclass(frozen=True, eq=False)
class RankSteps:
    """The compute steps of a rank, without collectives; stages are numbered within the rank."""

    used: Bools
    """Per stage and step: whether the step computes on the stage."""
    start: Floats
    end: Floats
    size: Sequence[float]
    """Per stage: its unsharded bytes."""
    gather: Sequence[float]
    """Per stage: seconds of its UNSHARD."""


@dataclass
class _Hold:
    """A stage is unsharded from step `start` until it is used in step `use`."""

    stage: int
    use: int
    earliest: int
    """The step after its use before that; 0 for the first."""
    latest: int
    """The step before which a gather is started in time."""
    start: int


def plan_rank(rank: RankSteps, free: Floats, lead: float) -> Bools:
    """Per stage and step: whether it is unsharded, with so many `free` bytes at each step.

    A gather is given `lead` times its seconds before the use, where there is room, at the expense of stages
    that are used later. The stages that a step uses are unsharded even where they do not fit.
    """
    holds = _holds(rank, lead)
    _evict(rank, free, holds)
    held = rank.used.copy()
    for hold in holds:
        held[hold.stage, hold.start : hold.use] = True
    left = free - np.array(rank.size) @ held
    _gather_ahead(rank, left, holds, held)
    return held


def _holds(rank: RankSteps, lead: float) -> list[_Hold]:
    """One for each use that does not directly follow another, in the order of the uses; all gaps are kept."""
    found = []
    for stage, used in enumerate(rank.used):
        before = -1
        for use in np.flatnonzero(used).tolist():
            if use > before + 1 or before < 0:
                in_time = rank.start[use] - lead * rank.gather[stage]
                latest = min(use, int(np.searchsorted(rank.end[:use], in_time, side="right")))
                latest = max(latest, before + 1)
                found.append(_Hold(stage, use, before + 1, latest, before + 1 if before >= 0 else latest))
            before = use
    return sorted(found, key=lambda hold: hold.use)


def _evict(rank: RankSteps, free: Floats, holds: list[_Hold]) -> None:
    """Start holds later, those with the farthest use first, until every step has room."""
    total = np.array(rank.size) @ rank.used
    by_start = sorted(holds, key=lambda hold: -hold.start)
    active: list[_Hold] = []
    for step in range(rank.used.shape[1]):
        while by_start and by_start[-1].start <= step:
            active.append(by_start.pop())
        active = [hold for hold in active if hold.use > step]
        excess = float(total[step]) + sum(rank.size[hold.stage] for hold in active) - float(free[step])
        for hold in sorted(active, key=lambda hold: -hold.use):
            if excess <= 0:
                break
            if rank.size[hold.stage] > 0:
                excess -= rank.size[hold.stage]
                active.remove(hold)
                hold.start = max(hold.latest, step + 1)
                if hold.start < hold.use:
                    by_start.append(hold)
                    by_start.sort(key=lambda each: -each.start)


def _gather_ahead(rank: RankSteps, left: Floats, holds: list[_Hold], held: Bools) -> None:
    """Start gathers as early as there is room, none before one that is needed sooner."""
    earliest = 0
    for hold in holds:
        if hold.start == hold.earliest and hold.earliest > 0:
            continue  # not gathered: kept since its last use
        size = rank.size[hold.stage]
        while hold.start > max(hold.earliest, earliest) and left[hold.start - 1] >= size:
            hold.start -= 1
            left[hold.start] -= size
            held[hold.stage, hold.start] = True
        earliest = max(earliest, hold.start)
