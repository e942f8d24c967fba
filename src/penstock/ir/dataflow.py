"""The dataflow engine: every rank runs its list in order, each step as early as its inputs allow.

Lowering, deadlock proofs, the simulator and pictures differ only in the numbers they put on a step and on a
wait:

    end(i) = max(end(step before i on its rank), max over inputs d of i: end(d) + lag) + duration(i)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.ir.table import ActionTable, Floats, Ints

__all__ = ["DataflowRun", "Inputs", "run_dataflow"]

_NOT_YET = -1
_NONE = -1
_SEVERAL = -2


@dataclass(frozen=True)
class Inputs:
    """What each slot waits for on other ranks: the slot that produces it, and the lag until it arrives."""

    one: list[int]
    """Per slot: the slot it waits for, or `_NONE`, or `_SEVERAL`."""
    lag: list[float]
    several: dict[int, list[tuple[int, float]]]
    """The waits of slots that have more than one, such as overlapped pairs."""

    @classmethod
    def of(cls, num_slots: int, producer: Ints, consumer: Ints, lag: Ints | Floats) -> Inputs:
        """From pairs of slots, in no particular order."""
        one = np.full(num_slots, _NONE, dtype=np.int64)
        lags = np.zeros(num_slots, dtype=lag.dtype)
        one[consumer] = producer
        lags[consumer] = lag
        several: dict[int, list[tuple[int, float]]] = {}
        overwritten = np.flatnonzero(np.bincount(consumer, minlength=num_slots) > 1)
        if overwritten.size:
            for i in np.flatnonzero(np.isin(consumer, overwritten)).tolist():
                several.setdefault(int(consumer[i]), []).append((int(producer[i]), lag[i].item()))
            one[overwritten] = _SEVERAL
        return cls(one.tolist(), lags.tolist(), several)


@dataclass(frozen=True)
class DataflowRun:
    """When each slot ends, -1 for those never reached, and the slot each rank is stuck at, if any."""

    ends: list[float]
    stuck: dict[int, int]


def run_dataflow(
    table: ActionTable, inputs: Inputs, durations: Sequence[float], starts: Sequence[float]
) -> DataflowRun:
    """One run. `durations` are per slot, `starts` is the clock of each rank at the beginning."""
    one, lag, several = inputs.one, inputs.lag, inputs.several
    ends: list[float] = [_NOT_YET] * len(one)
    rank_of = table.rank.tolist()
    bounds = table.slot_bounds.tolist()
    position = bounds[:-1]
    clock = list(starts)
    waiting_for: list[list[tuple[int, int]]] = [[] for _ in clock]  # per rank: who waits for which slot of it
    ready = list(range(len(clock)))
    while ready:
        rank = ready.pop()
        now = clock[rank]
        i, stop = position[rank], bounds[rank + 1]
        while i < stop:
            d = one[i]
            if d >= 0:
                there = ends[d]
                if there < 0:
                    waiting_for[rank_of[d]].append((d, rank))
                    break
                there += lag[i]
                if there > now:  # noqa: PLR1730 -- max() would double the time of this loop
                    now = there
            elif d == _SEVERAL:
                missing = [d for d, _ in several[i] if ends[d] < 0]
                if missing:
                    waiting_for[rank_of[missing[0]]].append((missing[0], rank))
                    break
                now = max(now, *(ends[d] + late for d, late in several[i]))
            now += durations[i]
            ends[i] = now
            i += 1
        position[rank] = i
        clock[rank] = now
        if waiting_for[rank]:
            ready += [other for slot, other in waiting_for[rank] if slot < i]
            waiting_for[rank] = [wait for wait in waiting_for[rank] if wait[0] >= i]
    stuck = {r: i for r, i in enumerate(position) if i < bounds[r + 1]}
    return DataflowRun(ends, stuck)
