"""Durations of the steps of an order, given which of them are one step: B of I and W, pairs of F and I or B."""

# ruff: noqa: C901, SIM102 -- a loop for a compiler
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import numpy as np

from penstock.compilation import compiled
from penstock.ir.encoding import Floats, Ints
from penstock.search.kernel_arrays import (
    FORWARD,
    INPUT_GRAD,
    PAIRED,
    TOKEN,
    WEIGHT_GRAD,
    ProblemArrays,
    RunState,
)


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
