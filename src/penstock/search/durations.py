"""Durations of the steps of an order, given which of them are one step: B of I and W, pairs of F and I or B."""

# ruff: noqa: SIM102 -- a loop for a compiler
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.search.compilation import compiled
from penstock.search.kernel_arrays import (
    FORWARD,
    INPUT_GRAD,
    PAIRED,
    TOKEN,
    WEIGHT_GRAD,
    ProblemArrays,
    RunState,
)

__all__ = ["set_durations"]


@compiled
def set_durations(arrays: ProblemArrays, order: Ints, state: RunState, positions: Ints) -> Floats:
    """Set the duration of every step from `positions` on; returns the remaining seconds of work per rank.

    Where I and W are fused into B, the I has the seconds of B and the W none. The F of a pair has its seconds.
    """
    bounds, fused = arrays.rank_bounds, arrays.fused_seconds
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
            if arrays.can_pair:
                duration = _with_pair(arrays, order, i, bounds[rank], bounds[rank + 1], duration)
            state.durations[i] = duration
            remaining[rank] += duration
    return remaining


@compiled
def _with_pair(arrays: ProblemArrays, order: Ints, i: int, low: int, high: int, duration: float) -> float:
    """The duration of a step that has this one outside of a pair; `low` to `high` are its rank's steps."""
    token = order[i] & TOKEN
    kind = token % 3
    first = i - kind  # where the F of the pair is, if there is one
    if first < low or first + 1 >= high or (order[first] & TOKEN) % 3 != FORWARD:
        return duration
    back = order[first + 1] & TOKEN
    if back % 3 != INPUT_GRAD or order[first + 1] & PAIRED == 0:
        return duration
    is_whole = first + 2 < high and order[first + 2] == back + 1
    if kind == FORWARD:
        return float(arrays.pair_seconds[token // 3, back // 3, int(is_whole)])
    return 0.0 if kind == INPUT_GRAD or is_whole else duration
