"""The kernel: an order of work as an array of tokens, run rank by rank, and improved by simulated annealing.

An order is one array of tokens, rank after rank. Token 3s + k is the next microbatch of stage s: k is 0 for
the forward, 1 for the input gradient (I, or B where the backward is not split), 2 for the weight gradient
(W). Within a stage and kind, microbatches go by number, so every permutation of a rank's tokens is a list of
its work.

Where a stage's B is shorter than its I and W, an I directly followed by a W of the stage is one B, unless
that W has the flag `SEPARATE`: B ends before W would, but I alone passes the gradient on earlier. The other
W belong to the other I, again by number.

Where pairs can take less than their parts, an I with the flag `PAIRED` directly behind an F is an overlapped
pair with it, one step that ends when both end. A W of its stage directly behind that I is in the pair, as
part of B, unless it has the flag `SEPARATE`. `entry & TOKEN` is an entry of an order without its flags.

Compiled by numba where it is installed.
"""

# ruff: noqa: C901, NPY002, PLR0912, PLR0915, PLR1730, SIM102 -- loops for a compiler
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.compilation import compiled
from penstock.cost.costs import Costs
from penstock.cost.prices import edge_prices
from penstock.ir.encoding import Floats, Ints
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement

FORWARD, INPUT_GRAD, WEIGHT_GRAD = 0, 1, 2
SEPARATE = 1 << 40
PAIRED = 1 << 41
TOKEN = SEPARATE - 1
MAKESPAN, SPAN, PERIOD = 0, 1, 2


# Arrays of the values between stages: which token makes each, which tokens need it, and how it travels.
#
# A value is an entry here if another stage needs it. One that several stages of another rank need crosses once
# (`StageGraph.carriers`), so it is one entry that several tokens need.


class MessageArrays(NamedTuple):
    """Messages in the order of the tokens that make them, and of their edges."""

    bounds: Ints
    """Where the messages of each token begin, and the end of the last one's."""
    producer: Ints
    """Per message: the token that makes it."""
    target: Ints
    """Per message: the rank that needs it."""
    lag: Floats
    """Per message: from the end of the step to its arrival, if the channel is free; 0 within a rank."""
    seconds: Floats
    """Per message: how long it occupies its channel."""
    channel: Ints
    """Per message: from which rank to which, as one number."""
    input_bounds: Ints
    """Where the inputs of each token begin, and the end of the last one's."""
    inputs: Ints
    """The messages that each token needs, token by token."""


def message_arrays(graph: StageGraph, placement: Placement, costs: Costs) -> MessageArrays:
    """The messages of a graph: all activations, then all gradients, sorted by producer."""
    rank_of_stage, (first, second) = np.array(placement.stage_to_rank, dtype=np.int64), graph.ends
    producer = np.concatenate((3 * first + FORWARD, 3 * second + INPUT_GRAD))
    consumer = np.concatenate((3 * second + FORWARD, 3 * first + INPUT_GRAD))
    source, target = rank_of_stage[producer // 3], rank_of_stage[consumer // 3]
    prices = [edge_prices(costs, graph, value) for value in ("activation", "gradient")]
    lag, seconds = (
        np.where(source != target, np.concatenate(each), 0.0)
        for each in ([price.total for price in prices], [price.transfer for price in prices])
    )
    carrier = np.concatenate((graph.carriers(rank_of_stage), np.arange(len(first)) + len(first)))
    sent = np.flatnonzero(carrier == np.arange(len(carrier)))
    sent = sent[np.argsort(producer[sent], kind="stable")]
    number = np.zeros(len(carrier), dtype=np.int64)
    number[sent] = np.arange(len(sent))
    used = np.lexsort((carrier, producer, consumer))
    tokens = np.arange(3 * graph.num_stages + 1)
    return MessageArrays(
        bounds=np.searchsorted(producer[sent], tokens),
        producer=producer[sent],
        target=target[sent],
        lag=lag[sent],
        seconds=seconds[sent],
        channel=source[sent] * placement.num_ranks + target[sent],
        input_bounds=np.searchsorted(consumer[used], tokens),
        inputs=number[carrier[used]],
    )


class ProblemArrays(NamedTuple):
    """The work, its costs and its limits."""

    rank_bounds: Ints
    """Where the tokens of each rank begin in an order, and the end of the last rank."""
    rank_of_stage: Ints
    microbatches: int
    kinds: int
    """3 with weight gradients, 2 without."""
    seconds: Floats
    """Per token."""
    fused_seconds: Floats
    """Per stage: seconds of B where that is less than I and W, negative elsewhere."""
    can_fuse: bool
    """Whether there is a stage with fused seconds."""
    pair_seconds: Floats
    """By the stage of a pair's F, the stage of its backward, and whether a W is in it too (1) or not (0)."""
    can_pair: bool
    """Whether a pair can take less than its parts; if not, `pair_seconds` is empty."""
    stage_order: Ints
    """The stages in the order of the graph."""
    messages: MessageArrays
    """The values between stages."""
    num_channels: int
    has_queues: bool
    """Whether any message occupies its channel."""
    memory_change: Floats
    """Per token: bytes that it allocates at its start, or, if negative, releases at its end."""
    memory_limits: Floats
    """Per rank: bytes available for activations."""
    optimizer_step: float
    """Seconds between the end of a rank's iteration and the start of its next one."""


class RunState(NamedTuple):
    """The times of an order that was run."""

    starts: Floats
    """Per position in the order."""
    ends: Floats
    microbatches: Ints
    """Per position: its microbatch."""
    durations: Floats
    """Per position: its seconds."""
    arrivals: Floats
    """Per message and microbatch: when the value is there, negative if not yet known."""


@compiled
def empty_state(arrays: ProblemArrays) -> RunState:
    """The state before anything is run."""
    size = arrays.rank_bounds[-1]
    arrivals = np.full((len(arrays.messages.producer), arrays.microbatches), -1.0)
    return RunState(np.zeros(size), np.zeros(size), np.zeros(size, np.int64), np.zeros(size), arrivals)


@compiled
def set_durations(arrays: ProblemArrays, order: Ints, state: RunState, positions: Ints) -> Floats:
    """Set the duration of every step from `positions` on; returns the remaining seconds of work per rank.

    Where I and W are fused into B, the I has the seconds of B and the W none. The F of a pair has its seconds.
    """
    bounds, fused = arrays.rank_bounds, arrays.fused_seconds
    pairs, can_pair = arrays.pair_seconds, arrays.can_pair
    remaining = np.zeros(len(positions))
    for rank in range(len(positions)):
        for i in range(positions[rank], bounds[rank + 1]):
            entry = order[i]
            token = entry & TOKEN
            duration = arrays.seconds[token]
            if arrays.can_fuse and fused[token // 3] >= 0:
                if token % 3 == INPUT_GRAD and i + 1 < bounds[rank + 1]:
                    if order[i + 1] == token + 1:
                        duration = fused[token // 3]
                elif entry == token and token % 3 == WEIGHT_GRAD and i > bounds[rank]:
                    if order[i - 1] & TOKEN == token - 1:
                        duration = 0.0
            # where the F of the pair is that the step is in, if there is one
            first = i - token % 3
            if can_pair and first >= bounds[rank] and first + 1 < bounds[rank + 1]:
                back = order[first + 1]
                if back & PAIRED != 0 and (order[first] & TOKEN) % 3 == FORWARD:
                    back &= TOKEN
                    is_whole = first + 2 < bounds[rank + 1] and order[first + 2] == back + 1
                    if first == i:
                        duration = pairs[token // 3, back // 3, int(is_whole)]
                    elif first + 1 == i or is_whole:
                        duration = 0.0
            state.durations[i] = duration
            remaining[rank] += duration
    return remaining


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
        low, high = bounds[rank], bounds[rank + 1]
        positions[rank] = low + np.searchsorted(state.starts[low:high], time)
    positions[own] = first
    done[:] = arrays.microbatches
    for rank in range(len(bounds) - 1):
        for i in range(positions[rank], bounds[rank + 1]):
            done[order[i] & TOKEN] -= 1
    return positions, done


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
        value = (state.ends[arrays.rank_bounds[1:] - 1] - state.starts[arrays.rank_bounds[:-1]]).max()
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


# Simulated annealing: moves single steps of an order, mostly steps on its critical path.


_ROUNDING = 1e-9
_PAIR_MOVES = 0.3
"""Share of the moves that join, separate or shift I and W, or an overlapped pair, if the step is in one."""


@compiled
def _last_position(arrays: ProblemArrays, state: RunState, objective: int) -> int:
    """The last position of the rank that determines the objective."""
    last = arrays.rank_bounds[1:] - 1
    lengths = state.ends[last]
    if objective == SPAN:
        lengths -= state.starts[arrays.rank_bounds[:-1]]
    return int(last[lengths.argmax()])


@compiled
def _backward_behind_forward(arrays: ProblemArrays, order: Ints, at: int) -> int:
    """The position of an I directly behind an F, one of which is `at`, or its W; -1 if there is none."""
    rank = arrays.rank_of_stage[(order[at] & TOKEN) // 3]
    first = at - (order[at] & TOKEN) % 3
    if first < arrays.rank_bounds[rank] or first + 1 >= arrays.rank_bounds[rank + 1]:
        return -1
    is_adjacent = (order[first] & TOKEN) % 3 == FORWARD and (order[first + 1] & TOKEN) % 3 == INPUT_GRAD
    return first + 1 if is_adjacent else -1


@compiled
def _critical_path(
    arrays: ProblemArrays, order: Ints, state: RunState, at: int, position_of: Ints, path: Ints
) -> int:
    """Write the steps of a critical path, back from a position, that a move can advance; return how many.

    Those are the steps that start when the previous step of the same rank ends.
    """
    bounds, messages = arrays.rank_bounds, arrays.messages
    for i in range(len(order)):
        position_of[order[i] & TOKEN, state.microbatches[i]] = i
    count = 0
    while True:
        token = order[at] & TOKEN
        stage = token // 3
        start = state.starts[at]
        waits_for_rank = state.ends[at - 1] >= start - _ROUNDING * max(1.0, start)
        if at > bounds[arrays.rank_of_stage[stage]] and waits_for_rank:
            path[count] = at
            count += 1
            at -= 1
        else:
            latest, needed, number = -1, -1.0, -1
            last = bounds[arrays.rank_of_stage[stage] + 1] - 1
            is_pair = arrays.can_pair and token % 3 == FORWARD and at < last and order[at + 1] & PAIRED != 0
            parts = 2 if is_pair else 1
            for part in range(at, at + parts):
                token = order[part] & TOKEN
                for j in range(messages.input_bounds[token], messages.input_bounds[token + 1]):
                    arrival = state.arrivals[messages.inputs[j], state.microbatches[part]]
                    if arrival > needed:
                        latest, needed, number = messages.inputs[j], arrival, state.microbatches[part]
            if latest < 0:
                return count
            at = position_of[messages.producer[latest], number]


@compiled
def _weight_behind_input(arrays: ProblemArrays, order: Ints, at: int) -> int:
    """The position of the W in a pair of I and W that can be one B and that `at` is in; -1 if there is none."""
    token = order[at] & TOKEN
    stage = token // 3
    if arrays.fused_seconds[stage] < 0 and not arrays.can_pair:
        return -1
    last = at if token % 3 == WEIGHT_GRAD else at + 1
    rank = arrays.rank_of_stage[stage]
    if not arrays.rank_bounds[rank] < last < arrays.rank_bounds[rank + 1]:
        return -1
    is_pair = (
        order[last] & TOKEN == 3 * stage + WEIGHT_GRAD and order[last - 1] & TOKEN == 3 * stage + INPUT_GRAD
    )
    return last if is_pair else -1


@compiled
def _shift(order: Ints, changed: Ints, source: int, target: int, size: int) -> None:
    """Write an order in which `size` entries at `source` are moved to `target`; the rest is not written."""
    for i in range(source, target):
        changed[i] = order[i + size]
    for i in range(target, source):
        changed[i + size] = order[i]
    for i in range(size):
        changed[target + i] = order[source + i]


@compiled
def anneal(
    arrays: ProblemArrays,
    start: Ints,
    objective: int,
    moves: int,
    temperature: float,
    focus: float,
    seed: int,
    stop: Ints,
) -> tuple[Ints, float, int, int]:
    """The best order found, its objective, the number of moves made and the number of orders run.

    A move shifts a step, or joins or separates adjacent steps: I and W as B, F and I as a pair. A share `focus`
    of the moves is of steps on the critical path. A worse order is accepted too: at first by `temperature`
    seconds on average, at the end by none. A seed fixes the result; a `stop[0]` other than 0 ends
    it early.
    """
    np.random.seed(seed)
    state, backup = empty_state(arrays), empty_state(arrays)
    current, changed = start.copy(), start.copy()
    value, score = evaluate(arrays, current, state, objective)
    evaluate(arrays, current, backup, objective)
    best, best_value, best_score = current.copy(), value, score
    path, length = np.zeros(len(start), np.int64), -1
    position_of = np.zeros((len(arrays.seconds), arrays.microbatches), np.int64)
    made = runs = 0
    for move in range(moves):
        if stop[0] != 0:
            break
        made += 1
        if length < 0:
            last = _last_position(arrays, state, objective)
            length = _critical_path(arrays, current, state, last, position_of, path)
        # a random step, and where it moves to: more often earlier than later, mostly near
        if length > 0 and np.random.random() < focus:
            source = path[np.random.randint(length)]
        else:
            source = np.random.randint(len(start))
        rank = arrays.rank_of_stage[(current[source] & TOKEN) // 3]
        pair, size, flag = -1, 1, SEPARATE
        if arrays.can_pair and np.random.random() < _PAIR_MOVES:
            pair = _backward_behind_forward(arrays, current, source)
            flag = PAIRED
            if pair >= 0 and current[pair] & PAIRED != 0 and np.random.random() < 0.5:  # moved as a whole
                source, size = pair - 1, 2
                if pair + 1 < arrays.rank_bounds[rank + 1] and current[pair + 1] == (current[pair] & TOKEN) + 1:
                    size = 3
                pair = -1
        if pair < 0 and size == 1 and arrays.can_fuse and np.random.random() < _PAIR_MOVES:
            pair, flag = _weight_behind_input(arrays, current, source), SEPARATE
            if pair >= 0 and current[pair] < SEPARATE and np.random.random() < 0.5:  # one B, moved as a whole
                source, pair, size = pair - 1, -1, 2
        distance = 1 + int(np.random.exponential(3.0 if np.random.random() < 0.9 else 20.0))
        if np.random.random() < 0.6:
            target = max(arrays.rank_bounds[rank], source - distance)
        else:
            source = max(arrays.rank_bounds[rank], source - 1) if size == 1 else source
            target = min(arrays.rank_bounds[rank + 1] - size, source + distance)
        if pair >= 0:
            source = target = pair
            changed[pair] = current[pair] ^ flag
        elif current[target] == current[source]:
            continue
        else:
            _shift(current, changed, source, target, size)
        low, high = min(source, target), max(source, target) + size
        is_accepted = False
        if fits(arrays, changed, rank):
            worst = score - temperature * (1.0 - move / moves) * np.log(1.0 - np.random.random())
            positions, done = resume_point(arrays, changed, state, low)
            value, new_score = resume(arrays, changed, state, positions, done, objective, worst)
            runs += 1
            is_accepted = new_score <= worst
            if is_accepted:
                copy_suffix(arrays, state, backup, positions, done)
                score, length = new_score, -1
                if score < best_score:
                    best[:] = changed
                    best_value, best_score = value, score
            else:
                copy_suffix(arrays, backup, state, positions, done)
        if is_accepted:
            current[low:high] = changed[low:high]
        else:
            changed[low:high] = current[low:high]
    return best, best_value, made, runs
