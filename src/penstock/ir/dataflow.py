"""The dataflow engine: every rank runs its list in order, each step as early as its inputs allow.

Lowering, deadlock proofs, the simulator and pictures differ only in the numbers they put on a step and on a
wait:

    end(i) = max(end(step before i on its rank), max over inputs d of i: end(d) + lag) + duration(i)
"""

# ruff: noqa: ANN401 -- the loop runs over lists or arrays

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.ir.encoding import Floats, Ints
from penstock.ir.table import ActionTable
from penstock.loops import Loop

_NOT_YET = -1
_NONE = -1
_SEVERAL = -2


@dataclass(frozen=True)
class Inputs:
    """What each slot waits for on other ranks: the slot that produces it, and the lag until it arrives."""

    one: Ints
    """Per slot: the slot it waits for, or `_NONE`, or `_SEVERAL` minus the number of its group."""
    lag: Ints | Floats
    group_bounds: Ints
    """Per group, and one more: where its waits begin. A slot with several, such as a pair, has a group."""
    group_producer: Ints
    group_lag: Ints | Floats

    @classmethod
    def of(cls, num_slots: int, producer: Ints, consumer: Ints, lag: Ints | Floats) -> Inputs:
        """From pairs of slots, in no particular order."""
        one = np.full(num_slots, _NONE, dtype=np.int64)
        lags: Any = np.zeros(num_slots, dtype=lag.dtype)
        one[consumer] = producer
        lags[consumer] = lag
        counts = np.bincount(consumer, minlength=num_slots)
        if counts.max(initial=0) <= 1:
            return cls(one, lags, np.zeros(1, dtype=np.int64), producer[:0], lag[:0])
        several = np.flatnonzero(counts > 1)
        one[several] = _SEVERAL - np.arange(len(several))
        grouped = np.flatnonzero(counts[consumer] > 1)
        grouped = grouped[np.argsort(consumer[grouped], kind="stable")]
        bounds = np.concatenate(([0], np.cumsum(counts[several])))
        return cls(one, lags, bounds, producer[grouped], lag[grouped])


@dataclass(frozen=True)
class DataflowRun:
    """When each slot ends, -1 for those never reached, and the slot each rank is stuck at, if any."""

    ends: Floats
    stuck: dict[int, int]


def run_dataflow(
    table: ActionTable,
    inputs: Inputs,
    durations: float | Sequence[float] | Ints | Floats,
    starts: Sequence[float] | Ints | Floats,
) -> DataflowRun:
    """One run. `durations` are per slot, or one for all; `starts` is the clock of each rank when it begins."""
    slots, ranks = len(inputs.one), len(starts)
    seconds = np.full(slots, durations) if isinstance(durations, int | float) else durations
    columns = (
        *(inputs.one, inputs.group_bounds, inputs.group_producer, table.rank, table.slot_bounds),
        *(np.asarray(each, dtype=np.float64) for each in (inputs.lag, inputs.group_lag, seconds)),
    )
    ends, clock = np.full(slots, float(_NOT_YET)), np.array(starts, dtype=np.float64)
    position = table.slot_bounds[:-1].astype(np.int64)
    state = np.zeros((4, ranks), dtype=np.int64)
    _LOOP.run(slots, columns, (clock, ends, position, *state))
    stuck = np.flatnonzero(position < table.slot_bounds[1:])
    return DataflowRun(ends, dict(zip(stuck.tolist(), position[stuck].tolist())))


def _loop(  # noqa: C901, PLR0912 -- calls would take most of its time
    one: Any,
    group_bounds: Any,
    group_producer: Any,
    rank_of: Any,
    bounds: Any,
    lag: Any,
    group_lag: Any,
    durations: Any,
    clock: Any,
    ends: Any,
    position: Any,
    ready: Any,
    missing_of: Any,
    first_waiting: Any,
    next_waiting: Any,
) -> None:
    """Fill in `ends` and `position`; the ranks that wait for a rank are a linked list."""
    top = len(clock)
    for rank in range(top):
        ready[rank] = rank
        first_waiting[rank] = _NONE
    while top > 0:
        top -= 1
        rank = ready[top]
        now = clock[rank]
        i, stop, missing = position[rank], bounds[rank + 1], _NONE
        while i < stop:
            d = one[i]
            if d >= 0:
                arrival = ends[d]
                if arrival < 0:
                    missing = d
                    break
                arrival += lag[i]
                if arrival > now:  # noqa: PLR1730 -- max() would double the time of this loop
                    now = arrival
            elif d <= _SEVERAL:
                latest = now
                for j in range(group_bounds[_SEVERAL - d], group_bounds[_SEVERAL - d + 1]):
                    arrival = ends[group_producer[j]]
                    if arrival < 0:
                        missing = group_producer[j]
                        break
                    arrival += group_lag[j]
                    if arrival > latest:  # noqa: PLR1730
                        latest = arrival
                if missing >= 0:
                    break
                now = latest
            now += durations[i]
            ends[i] = now
            i += 1
        position[rank] = i
        clock[rank] = now
        if missing >= 0:
            missing_of[rank] = missing
            next_waiting[rank] = first_waiting[rank_of[missing]]
            first_waiting[rank_of[missing]] = rank
        waiting, first_waiting[rank] = first_waiting[rank], _NONE
        while waiting >= 0:
            following = next_waiting[waiting]
            if missing_of[waiting] < i:
                ready[top] = waiting
                top += 1
            else:
                next_waiting[waiting] = first_waiting[rank]
                first_waiting[rank] = waiting
            waiting = following


_LOOP = Loop(_loop)
