"""Simulated annealing: moves single steps of an order, mostly steps on its critical path."""

# ruff: noqa: C901, NPY002, PLR0912, PLR0915 -- a loop for a compiler
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import numpy as np

from penstock.compilation import compiled
from penstock.ir.encoding import Ints
from penstock.search.kernel import (
    FORWARD,
    INPUT_GRAD,
    PAIRED,
    SEPARATE,
    SPAN,
    TOKEN,
    WEIGHT_GRAD,
    ProblemArrays,
    RunState,
    copy_suffix,
    empty_state,
    evaluate,
    fits,
    resume,
    resume_point,
)

_ROUNDING = 1e-9
_PAIR_MOVES = 0.3
"""Share of the moves that join, separate or shift I and W, or an overlapped pair, if the step is in one."""


@compiled
def _last_position(arrays: ProblemArrays, state: RunState, objective: int) -> int:
    """The last position of the rank that determines the objective."""
    bounds = arrays.rank_bounds
    found, longest = bounds[1] - 1, -1.0
    for rank in range(len(bounds) - 1):
        last = bounds[rank + 1] - 1
        length = state.ends[last] - (state.starts[bounds[rank]] if objective == SPAN else 0.0)
        if length > longest:
            found, longest = int(last), length
    return int(found)


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
    seconds on average, at the end by none. The same seed gives the same result; a `stop[0]` other than 0 ends
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
