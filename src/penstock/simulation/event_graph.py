"""Event graphs: events that wait for events, each as early as possible, in one run or in many at once.

    start(i) = max(floor(i), max over inputs d of i: end(d) + lag)
    end(i)   = start(i) + duration(i)

Which event waits for which does not depend on the durations. So many runs with other durations are one pass
over the *wavefronts*: events whose inputs are all in earlier wavefronts, each with one number per run.
"""

# ruff: noqa: ANN401 -- the loop runs over lists or arrays

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.loops import Loop

__all__ = ["EventGraph", "Waits"]

_NOT_YET = -1.0
_NEW, _OPEN, _DONE, _STUCK = range(4)


class Waits(NamedTuple):
    """Event `after[i]` waits for the end of event `before[i]` and `lag[i]`, or `lag` for all, from then on."""

    before: Ints
    after: Ints
    lag: Floats | float = 0.0


@dataclass(frozen=True, eq=False)
class EventGraph:
    """What each event waits for; events are numbered from 0."""

    bounds: Ints
    """Per event, and one more: where its waits begin."""
    producer: Ints
    lag: Floats

    @classmethod
    def of(cls, num_events: int, waits: Sequence[Waits]) -> EventGraph:
        """From waits in no particular order."""
        before, after = (np.concatenate([each[side] for each in waits]).astype(np.int64) for side in (0, 1))
        lag = np.concatenate([np.broadcast_to(np.float64(each.lag), each.before.shape) for each in waits])
        order = np.argsort(after, kind="stable")
        bounds = np.concatenate(([0], np.cumsum(np.bincount(after, minlength=num_events))))
        return cls(bounds, before[order], lag[order])

    def run(self, durations: Floats, floor: Floats) -> tuple[Floats, Floats]:
        """Start and end of every event; -1 for those that wait for each other in a cycle, or for such ones."""
        events = len(floor)
        start, end = np.full(events, _NOT_YET), np.full(events, _NOT_YET)
        state, stack, cursor = (np.zeros(events, dtype=np.int64) for _ in range(3))
        inputs = (self.bounds, self.producer, self.lag, durations, floor)
        _RUN.run(2 * events, inputs, (start, end, state, stack, cursor))
        return start, end

    @cached_property
    def wavefronts(self) -> list[Ints]:
        """The events in groups: each waits for events of earlier groups only; without those in cycles."""
        events = len(self.bounds) - 1
        unit = EventGraph(self.bounds, self.producer, np.zeros_like(self.lag))
        level = unit.run(np.ones(events), np.zeros(events))[1].astype(np.int64)
        order = np.argsort(level, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(level[order])) + 1)

    def run_many(self, durations: Floats, floor: Floats) -> Floats:
        """The end of every event in every run; `durations` has a row per event and a column per run."""
        ends = np.empty_like(durations)
        counts = np.diff(self.bounds)
        for events in self.wavefronts:
            waiting, free = events[counts[events] > 0], events[counts[events] == 0]
            ends[free] = floor[free, None] + durations[free]
            if waiting.size:
                first = np.cumsum(counts[waiting]) - counts[waiting]
                waits = np.repeat(self.bounds[waiting] - first, counts[waiting])
                waits += np.arange(len(waits))
                arrivals = ends[self.producer[waits]]
                arrivals += self.lag[waits, None]
                latest = np.maximum.reduceat(arrivals, first, axis=0)
                np.maximum(latest, floor[waiting, None], out=latest)
                latest += durations[waiting]
                ends[waiting] = latest
        return ends


def _run(
    bounds: Any,
    producer: Any,
    lag: Any,
    durations: Any,
    floor: Any,
    start: Any,
    end: Any,
    state: Any,
    stack: Any,
    cursor: Any,
) -> None:
    """Depth-first: an event that waits for a new one stays on the stack until that one is done."""
    for root in range(len(state)):
        if state[root] != _NEW:
            continue
        top, stack[0], state[root], cursor[root] = 0, root, _OPEN, bounds[root]
        while top >= 0:
            event = stack[top]
            i, stop, result = cursor[event], bounds[event + 1], _DONE
            while i < stop:
                result = state[producer[i]]
                if result != _DONE:
                    break
                i += 1
            cursor[event] = i
            if i < stop and result == _NEW:
                top += 1
                new = producer[i]
                stack[top], state[new], cursor[new] = new, _OPEN, bounds[new]
                continue
            top -= 1
            if i < stop:  # it waits for one that waits for it, or for one that is stuck
                state[event] = _STUCK
                continue
            now = floor[event]
            for j in range(bounds[event], stop):
                arrival = end[producer[j]] + lag[j]
                if arrival > now:  # noqa: PLR1730 -- max() would double the time of this loop
                    now = arrival
            start[event] = now
            end[event] = now + durations[event]
            state[event] = _DONE


_RUN = Loop(_run)
