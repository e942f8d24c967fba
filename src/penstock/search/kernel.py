"""The loops that run an order of work, compiled where numba is installed.

A rank's order is a row of tokens. Token 3s + k stands for the next microbatch of stage s: k is 0 for F, 1 for
what passes the gradient on (I, or B where the backward is whole), 2 for W. So microbatches go by number within
a kind, and every row with the right number of each token is a list of work.

A run can be taken up anywhere: where an order changes, all that began before the change stays as it was.
"""

# ruff: noqa: C901, PLR0912, PLR0915, PLR1730, SIM102 -- loops for a compiler
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from penstock.ir.table import Floats, Ints

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    from numba import config, njit

    COMPILED = not config.DISABLE_JIT  # type: ignore[attr-defined]
except ImportError:
    COMPILED = False

    def compiled(function: Function) -> Function:
        """As it is: the same, only slower."""
        return function
else:

    def compiled(function: Function) -> Function:
        """Compiled when it is first called, and kept for the next time; threads run it side by side."""
        try:
            return cast("Function", njit(cache=True, nogil=True)(function))
        except (RuntimeError, OSError):  # no folder to keep it in can be written to
            return cast("Function", njit(nogil=True)(function))


__all__ = [
    "COMPILED",
    "MAKESPAN",
    "PERIOD",
    "SPAN",
    "State",
    "Tables",
    "blank",
    "compiled",
    "cut",
    "fits",
    "measure",
    "resume",
    "take_over",
]

F, G, W = 0, 1, 2
MAKESPAN, SPAN, PERIOD = 0, 1, 2


class Tables(NamedTuple):
    """What there is to do and what it costs, as arrays."""

    bounds: Ints
    """Where the row of each rank begins, and the end of the last."""
    hosts: Ints
    """Per stage: its rank."""
    microbatches: int
    kinds: int
    """3 with W, 2 without."""
    seconds: Floats
    """Per token."""
    whole: Floats
    """Per stage: of I with its W right behind it, where they are faster as one B; below zero elsewhere."""
    joins: bool
    """Whether there is such a stage."""
    lag: Floats
    """Per token: from the end of what makes its message to its arrival, if the channel is free."""
    taken: Floats
    """Per token: how long its message takes the channel."""
    channel: Ints
    """Per token: the channel of its message."""
    channels: int
    queues: bool
    """Whether any message takes its channel for any time."""
    held: Floats
    """Per token: what it takes at its begin, or, below zero, gives back at its end."""
    limits: Floats
    """Per rank: what it may hold."""
    pause: float
    """Between the end of a rank's iteration and its next."""


class State(NamedTuple):
    """An order that has been run."""

    begins: Floats
    """Per position."""
    ends: Floats
    numbers: Ints
    """Per position: its microbatch."""
    lengths: Floats
    """Per position: its seconds."""
    there: Floats
    """Per token and microbatch: when what it makes is where it is needed; below zero for not yet."""


@compiled
def blank(tables: Tables) -> State:
    """Nothing has been run."""
    size = tables.bounds[-1]
    there = np.full((3 * len(tables.hosts), tables.microbatches), -1.0)
    return State(np.zeros(size), np.zeros(size), np.zeros(size, np.int64), np.zeros(size), there)


@compiled
def _measure_lengths(tables: Tables, rows: Ints, state: State, at: Ints, done: Ints) -> Floats:
    """The length of every step from `at` on; gives what is left to do per rank."""
    bounds = tables.bounds
    rest = np.zeros(len(at))
    count = done.copy()
    for rank in range(len(at)):
        for i in range(at[rank], bounds[rank + 1]):
            token = rows[i]
            length = tables.seconds[token]
            if tables.joins and tables.whole[token // 3] >= 0:
                if token % 3 == G:
                    if (
                        i + 1 < bounds[rank + 1]
                        and rows[i + 1] == token + 1
                        and count[token] == count[token + 1]
                    ):
                        length = tables.whole[token // 3]
                elif token % 3 == W and i > bounds[rank]:
                    if rows[i - 1] == token - 1 and count[token - 1] == count[token] + 1:
                        length = 0.0
            count[token] += 1
            state.lengths[i] = length
            rest[rank] += length
    return rest


@compiled
def go_on(
    tables: Tables, rows: Ints, state: State, at: Ints, done: Ints, clocks: Floats, goal: int, worst: float
) -> bool:
    """Run the rows on from `at`, with so many `done` of each token; whether they end, and by `worst`.

    `clocks` are those of the ranks, and are moved on.
    """
    bounds, lengths, there = tables.bounds, state.lengths, state.there
    ranks, stages = len(bounds) - 1, len(tables.hosts)
    rest = _measure_lengths(tables, rows, state, at, done)
    left = bounds[1:].sum() - at.sum()
    free = np.zeros(tables.channels)
    latest = worst + 1e-9 * abs(worst)
    moved = True
    while moved and left > 0:
        moved = False
        for rank in range(ranks):
            i, now = at[rank], clocks[rank]
            while i < bounds[rank + 1]:
                token = rows[i]
                stage, kind = token // 3, token % 3
                number = done[token]
                begin = now
                if kind == F:
                    if stage > 0:
                        ready = there[token - 3, number]
                        if ready < 0:
                            break
                        if ready > begin:
                            begin = ready
                else:
                    if done[token - 1] <= number:
                        break
                    if kind == G and stage < stages - 1:
                        ready = there[token + 3, number]
                        if ready < 0:
                            break
                        if ready > begin:
                            begin = ready
                if goal == MAKESPAN:
                    if begin + rest[rank] > latest:
                        return False
                elif goal == SPAN:
                    if i > bounds[rank] and begin + rest[rank] - state.begins[bounds[rank]] > latest:
                        return False
                state.begins[i] = begin
                now = begin + lengths[i]
                rest[rank] -= lengths[i]
                state.ends[i] = now
                state.numbers[i] = number
                if kind != W:
                    leaves = now
                    if tables.queues and tables.taken[token] > 0:
                        if free[tables.channel[token]] > leaves:
                            leaves = free[tables.channel[token]]
                        free[tables.channel[token]] = leaves + tables.taken[token]
                    there[token, number] = leaves + tables.lag[token]
                done[token] = number + 1
                i += 1
                left -= 1
                moved = True
            at[rank], clocks[rank] = i, now
    return bool(left == 0)


@compiled
def cut(tables: Tables, rows: Ints, state: State, first: int) -> tuple[Ints, Ints]:
    """Where rows that change at `first` must be run on from, and how many of each token are done there.

    What began before the end of the step ahead of the change cannot have waited for anything behind it. With
    channels that queue everything is run again.
    """
    bounds = tables.bounds
    own = tables.hosts[rows[first] // 3]
    at = bounds[:-1].copy()
    done = np.zeros(len(tables.seconds), np.int64)
    if tables.joins and first > bounds[own]:
        first -= 1  # what stands before may have been one with what came behind it
    if tables.queues or first == bounds[own]:
        return at, done
    time = state.ends[first - 1]
    for rank in range(len(bounds) - 1):
        low, high = bounds[rank], bounds[rank + 1]
        while low < high:
            middle = (low + high) // 2
            if state.begins[middle] < time:
                low = middle + 1
            else:
                high = middle
        at[rank] = low
    at[own] = first
    done[:] = tables.microbatches
    for rank in range(len(bounds) - 1):
        for i in range(at[rank], bounds[rank + 1]):
            done[rows[i]] -= 1
    return at, done


@compiled
def resume(
    tables: Tables, rows: Ints, state: State, at: Ints, done: Ints, goal: int, worst: float
) -> tuple[float, float]:
    """Run the rows from `at` on, and give what `measure` gives.

    If that is surely more than `worst`, it is infinite, and the state from `at` on is no good.
    """
    ranks = len(tables.bounds) - 1
    clocks = np.zeros(ranks)
    for rank in range(ranks):
        if at[rank] > tables.bounds[rank]:
            clocks[rank] = state.ends[at[rank] - 1]
    for token in range(len(done)):
        state.there[token, done[token] :] = -1.0
    return _outcome(tables, rows, state, at.copy(), done.copy(), clocks, goal, worst)


@compiled
def take_over(tables: Tables, given: State, state: State, at: Ints, done: Ints) -> None:
    """Make the state from `at` on that of another."""
    for rank in range(len(at)):
        low, high = at[rank], tables.bounds[rank + 1]
        state.begins[low:high] = given.begins[low:high]
        state.ends[low:high] = given.ends[low:high]
        state.numbers[low:high] = given.numbers[low:high]
        state.lengths[low:high] = given.lengths[low:high]
    for token in range(len(done)):
        state.there[token, done[token] :] = given.there[token, done[token] :]


@compiled
def _outcome(
    tables: Tables, rows: Ints, state: State, at: Ints, done: Ints, clocks: Floats, goal: int, worst: float
) -> tuple[float, float]:
    bounds = tables.bounds
    ranks = len(bounds) - 1
    if not go_on(tables, rows, state, at, done, clocks, goal, worst):
        return np.inf, np.inf
    found = clocks.max()
    if goal == SPAN:
        found = 0.0
        for rank in range(ranks):
            length = state.ends[bounds[rank + 1] - 1] - state.begins[bounds[rank]]
            if length > found:
                found = length
    elif goal == PERIOD:
        found = _period(tables, rows, clocks)
    return found, found + 1e-3 * clocks.sum() / ranks


@compiled
def _period(tables: Tables, rows: Ints, clocks: Floats) -> float:
    """What one more iteration takes when iterations follow each other: the mean of 4 after 4."""
    clocks = clocks.copy()
    fourth = 0.0
    for lap in range(8):
        if lap == 4:
            fourth = clocks.max()
        clocks += tables.pause
        again = blank(tables)
        at, done = tables.bounds[:-1].copy(), np.zeros(len(tables.seconds), np.int64)
        go_on(tables, rows, again, at, done, clocks, PERIOD, np.inf)
    return float((clocks.max() - fourth) / 4)


@compiled
def measure(tables: Tables, rows: Ints, state: State, goal: int) -> tuple[float, float]:
    """Run an order from its beginning: the objective, infinite if ranks wait for each other in a cycle.

    Second the same with a little of when each rank ends, which tells equal orders apart.
    """
    at, done = tables.bounds[:-1].copy(), np.zeros(len(tables.seconds), np.int64)
    return resume(tables, rows, state, at, done, goal, np.inf)


@compiled
def fits(tables: Tables, rows: Ints, rank: int) -> bool:
    """Whether a rank does nothing before what it needs from itself, and never holds too much."""
    done = np.zeros(len(tables.seconds), np.int64)
    now = 0.0
    for i in range(tables.bounds[rank], tables.bounds[rank + 1]):
        token = rows[i]
        done[token] += 1
        now += tables.held[token]
        if token % 3 == F:
            if now > tables.limits[rank]:
                return False
        elif done[token] > done[token - 1]:
            return False
    return True
