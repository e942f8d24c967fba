"""Orders for many microbatches from an order for few: its steady state is repeated.

A part of a rank's list can be repeated if between its two ends every kind of step of every stage is done q
times:

    list, 5 microbatches     F F F | I W F | I W F | I W I W I W          (one stage, q = 1)
    list, 8 microbatches     F F F | I W F | I W F | I W F | I W F | I W F | I W I W I W

All ranks repeat a part for the same number of microbatches, from about the same time. Surplus microbatches are
removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from penstock.ir.encoding import Ints
from penstock.search.kernel_arrays import TOKEN
from penstock.search.problem import Problem

_MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
"""How many microbatches the repeated part has."""
_STARTS = (0.35, 0.45, 0.55, 0.65)
"""Where the repeated part starts, as a share of the order's time."""


def repeat_steady_state(few: Problem, order: Ints, problem: Problem) -> Iterator[Ints]:
    """Orders for `problem` from an order for `few`, the same problem with fewer microbatches."""
    starts = few.start_times(order)
    bounds = few.arrays.rank_bounds.tolist()
    lists = [(order[a:b].tolist(), starts[a:b].tolist()) for a, b in pairwise(bounds)]
    phases = [_phases(tokens) for tokens, _ in lists]
    end = float(starts.max())
    for q in _MICROBATCHES:
        if 2 * q > few.microbatches:
            continue
        repeats = -(-(problem.microbatches - few.microbatches) // q)
        for share in _STARTS:
            found: list[int] = []
            for (tokens, times), phase in zip(lists, phases):
                part = _repeatable(times, phase, q, share * end)
                if part is None:
                    break
                a, b = part
                longer = tokens[:a] + tokens[a:b] * (repeats + 1) + tokens[b:]
                found += _keep_microbatches(longer, problem.microbatches)
            else:
                yield np.array(found, dtype=np.int64)


Phase = tuple[int, tuple[int, ...]]
"""How often the first kind of step was done, and for the others the difference to it."""


def _phases(tokens: list[int]) -> list[Phase]:
    """The phase before each position of a list, and at its end."""
    tokens = [entry & TOKEN for entry in tokens]
    distinct = sorted(set(tokens))
    counts = dict.fromkeys(distinct, 0)
    found = []
    for token in [*tokens, -1]:
        first = counts[distinct[0]]
        found.append((first, tuple(counts[each] - first for each in distinct)))
        if token >= 0:
            counts[token] += 1
    return found


def _repeatable(times: list[float], phases: list[Phase], q: int, near: float) -> tuple[int, int] | None:
    """The two positions between which everything is done q times, the first as close to a time as possible."""
    position_of = {phase: position for position, phase in enumerate(phases)}
    best: tuple[float, int, int] | None = None
    for a, (time, (first, others)) in enumerate(zip(times, phases)):
        b = position_of.get((first + q, others))
        if b is not None and (best is None or abs(time - near) < best[0]):
            best = (abs(time - near), a, b)
    return best[1:] if best else None


def _keep_microbatches(tokens: list[int], microbatches: int) -> list[int]:
    """The list without the steps of surplus microbatches."""
    counts: dict[int, int] = {}
    found = []
    for entry in tokens:
        token = entry & TOKEN
        counts[token] = counts.get(token, 0) + 1
        if counts[token] <= microbatches:
            found.append(entry)
    return found
