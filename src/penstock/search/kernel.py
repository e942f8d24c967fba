"""The kernel: runs an order of work, in full or from the first change on, and checks a rank's memory.

Compiled by numba where it is installed. Orders and tokens are described in `kernel_arrays`.
"""

# ruff: noqa: C901, PLR0912, PLR0915, PLR1730, SIM102 -- loops for a compiler
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import numpy as np

from penstock.compilation import compiled
from penstock.ir.encoding import Floats, Ints
from penstock.search.durations import set_durations
from penstock.search.kernel_arrays import (
    FORWARD,
    MAKESPAN,
    PAIRED,
    PERIOD,
    SPAN,
    TOKEN,
    ProblemArrays,
    RunState,
    empty_state,
)


@compiled
def _advance(
    arrays: ProblemArrays,
    order: Ints,
    state: RunState,
    positions: Ints,
    done: Ints,
    clocks: Floats,
    objective: int,
    worst: float,
) -> bool:
    """Run an order from `positions`, with `done` steps of each token; whether it ends, and within `worst`.

    Advances `positions`, `done` and the ranks' `clocks`. This is one loop without calls because a search spends
    most of its time here, and a call with arrays costs more than the work of a step.
    """
    bounds, durations, arrivals = arrays.rank_bounds, state.durations, state.arrivals
    ranks = len(bounds) - 1
    inputs, input_bounds = arrays.messages.inputs, arrays.messages.input_bounds
    outputs, lag = arrays.messages.bounds, arrays.messages.lag
    taken, channel = arrays.messages.seconds, arrays.messages.channel
    remaining = set_durations(arrays, order, state, positions)
    left = bounds[1:].sum() - positions.sum()
    channel_free = np.zeros(arrays.num_channels)
    limit = worst + 1e-9 * abs(worst)
    can_pair = arrays.can_pair
    has_advanced = True
    while has_advanced and left > 0:
        has_advanced = False
        for rank in range(ranks):
            i, now = positions[rank], clocks[rank]
            while i < bounds[rank + 1]:
                token = order[i] & TOKEN
                kind = token % 3
                number = done[token]
                start = now
                ready = 0.0
                if kind != FORWARD and done[token - 1] <= number:
                    break
                for j in range(input_bounds[token], input_bounds[token + 1]):
                    arrival = arrivals[inputs[j], number]
                    if arrival < 0:
                        ready = arrival
                        break
                    if arrival > ready:
                        ready = arrival
                if can_pair and kind == FORWARD and ready >= 0 and i + 1 < bounds[rank + 1]:
                    other = order[i + 1]
                    if other & PAIRED != 0:
                        other &= TOKEN
                        paired = done[other]
                        if done[other - 1] <= paired:
                            ready = -1.0
                        for j in range(input_bounds[other], input_bounds[other + 1]):
                            arrival = arrivals[inputs[j], paired]
                            if arrival < 0 or ready < 0:
                                ready = -1.0
                            elif arrival > ready:
                                ready = arrival
                if ready < 0:
                    break
                if ready > start:
                    start = ready
                state.starts[i] = start
                if objective == MAKESPAN:
                    if start + remaining[rank] > limit:
                        return False
                elif objective == SPAN:
                    if start + remaining[rank] - state.starts[bounds[rank]] > limit:
                        return False
                now = start + durations[i]
                remaining[rank] -= durations[i]
                state.ends[i] = now
                state.microbatches[i] = number
                for j in range(outputs[token], outputs[token + 1]):
                    leaves = now
                    if arrays.has_queues and taken[j] > 0:
                        if channel_free[channel[j]] > leaves:
                            leaves = channel_free[channel[j]]
                        channel_free[channel[j]] = leaves + taken[j]
                    arrivals[j, number] = leaves + lag[j]
                done[token] = number + 1
                i += 1
                left -= 1
                has_advanced = True
            positions[rank], clocks[rank] = i, now
    return bool(left == 0)


@compiled
def resume_point(arrays: ProblemArrays, order: Ints, state: RunState, first: int) -> tuple[Ints, Ints]:
    """Per rank the position from which to rerun an order that changes at `first`, and the steps done there.

    A step that started before the end of the step ahead of the change did not wait for anything after it. If
    channels have queues, everything is run again.
    """
    bounds = arrays.rank_bounds
    own = arrays.rank_of_stage[(order[first] & TOKEN) // 3]
    positions = bounds[:-1].copy()
    done = np.zeros(len(arrays.seconds), np.int64)
    if arrays.can_pair:
        first = max(first - 2, bounds[own])  # two steps ahead of the change may have been a pair with it
    elif arrays.can_fuse and first > bounds[own]:
        first -= 1  # the step ahead of the change may have been fused with the one after it
    if arrays.has_queues or first == bounds[own]:
        return positions, done
    time = state.ends[first - 1]
    for rank in range(len(bounds) - 1):
        positions[rank] = _first_from(state.starts, bounds[rank], bounds[rank + 1], time)
    positions[own] = first
    done[:] = arrays.microbatches
    for rank in range(len(bounds) - 1):
        for i in range(positions[rank], bounds[rank + 1]):
            done[order[i] & TOKEN] -= 1
    return positions, done


@compiled
def _first_from(starts: Floats, low: int, high: int, time: float) -> int:
    """The first position in low..high that starts at `time` or later, by bisection."""
    while low < high:
        middle = (low + high) // 2
        if starts[middle] < time:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def resume(
    arrays: ProblemArrays,
    order: Ints,
    state: RunState,
    positions: Ints,
    done: Ints,
    objective: int,
    worst: float,
) -> tuple[float, float]:
    """Run an order again from `positions`, and return what `evaluate` returns.

    If the objective surely exceeds `worst`, it is infinite and the state from `positions` on is not valid.
    """
    ranks = len(arrays.rank_bounds) - 1
    clocks = np.zeros(ranks)
    for rank in range(ranks):
        if positions[rank] > arrays.rank_bounds[rank]:
            clocks[rank] = state.ends[positions[rank] - 1]
    producer = arrays.messages.producer
    for j in range(len(producer)):
        state.arrivals[j, done[producer[j]] :] = -1.0
    if not _advance(arrays, order, state, positions.copy(), done.copy(), clocks, objective, worst):
        return np.inf, np.inf
    value = clocks.max()
    if objective == SPAN:
        value = _span(arrays, state)
    elif objective == PERIOD:
        value = _period(arrays, order, clocks)
    return value, value + 1e-3 * clocks.sum() / ranks


@compiled
def copy_suffix(arrays: ProblemArrays, source: RunState, target: RunState, positions: Ints, done: Ints) -> None:
    """Copy a state from `positions` on to another one."""
    for rank in range(len(positions)):
        low, high = positions[rank], arrays.rank_bounds[rank + 1]
        target.starts[low:high] = source.starts[low:high]
        target.ends[low:high] = source.ends[low:high]
        target.microbatches[low:high] = source.microbatches[low:high]
        target.durations[low:high] = source.durations[low:high]
    producer = arrays.messages.producer
    for j in range(len(producer)):
        target.arrivals[j, done[producer[j]] :] = source.arrivals[j, done[producer[j]] :]


@compiled
def _span(arrays: ProblemArrays, state: RunState) -> float:
    """The longest time between a rank's first start and its last end."""
    longest = 0.0
    bounds = arrays.rank_bounds
    for rank in range(len(bounds) - 1):
        length = state.ends[bounds[rank + 1] - 1] - state.starts[bounds[rank]]
        if length > longest:
            longest = length
    return longest


@compiled
def _period(arrays: ProblemArrays, order: Ints, clocks: Floats) -> float:
    """Seconds that one more iteration adds in the steady state: the mean of 4 iterations after 4."""
    clocks = clocks.copy()
    fourth = 0.0
    for iteration in range(8):
        if iteration == 4:
            fourth = clocks.max()
        clocks += arrays.optimizer_step
        state = empty_state(arrays)
        positions, done = arrays.rank_bounds[:-1].copy(), np.zeros(len(arrays.seconds), np.int64)
        _advance(arrays, order, state, positions, done, clocks, PERIOD, np.inf)
    return float((clocks.max() - fourth) / 4)


@compiled
def evaluate(arrays: ProblemArrays, order: Ints, state: RunState, objective: int) -> tuple[float, float]:
    """Run an order from its start; returns its objective, infinite if it deadlocks, and its score.

    The score adds a small share of the mean end of the ranks, so that of two orders with the same objective the
    one with less work at the end is better.
    """
    positions, done = arrays.rank_bounds[:-1].copy(), np.zeros(len(arrays.seconds), np.int64)
    return resume(arrays, order, state, positions, done, objective, np.inf)


@compiled
def fits(arrays: ProblemArrays, order: Ints, rank: int) -> bool:
    """Whether a rank's steps come after those they need on the same rank, and its memory within the limit."""
    done = np.zeros(len(arrays.seconds), np.int64)
    live = 0.0
    for i in range(arrays.rank_bounds[rank], arrays.rank_bounds[rank + 1]):
        token = order[i] & TOKEN
        done[token] += 1
        live += arrays.memory_change[token]
        if token % 3 == FORWARD:
            if live > arrays.memory_limits[rank]:
                return False
        elif done[token] > done[token - 1]:
            return False
    return True
