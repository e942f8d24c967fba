"""Orders for many microbatches from good orders for fewer: the steady state in the middle is repeated.

A rank's row has a middle that can be repeated wherever it comes back to the same phase, that is when between
two places every kind of step of every stage was done q times:

    row, 5 microbatches     F F F | I W F | I W F | I W I W I W          (one stage, q = 1)
    row, 8 microbatches     F F F | I W F | I W F | I W F | I W F | I W F | I W I W I W

All ranks repeat for the same number of microbatches, at about the same time. Those too many are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from penstock.ir.table import Ints
from penstock.search.problem import Problem

__all__ = ["stretched"]

_REPEATS = (1, 2, 3, 4, 6, 8, 12, 16)
_PLACES = (0.35, 0.45, 0.55, 0.65)
"""Where in the time of the order its middle begins."""


def stretched(fewer: Problem, order: Ints, problem: Problem) -> Iterator[Ints]:
    """Orders for the microbatches of `problem`, which is `fewer` but for their number."""
    begins = fewer.begins(order)
    bounds = fewer.tables.bounds.tolist()
    rows = [(order[a:b].tolist(), begins[a:b].tolist()) for a, b in pairwise(bounds)]
    phases = [_phases(row) for row, _ in rows]
    end = float(begins.max())
    for q in _REPEATS:
        if 2 * q > fewer.microbatches:
            continue
        more = -(-(problem.microbatches - fewer.microbatches) // q)
        for place in _PLACES:
            found: list[int] = []
            for (row, times), phase in zip(rows, phases):
                middle = _middle(times, phase, q, place * end)
                if middle is None:
                    break
                a, b = middle
                found += _first(row[:a] + row[a:b] * (more + 1) + row[b:], problem.microbatches)
            else:
                yield np.array(found, dtype=np.int64)


Phase = tuple[int, tuple[int, ...]]
"""How often the first kind of step was done, and how much more or less often the others."""


def _phases(row: list[int]) -> list[Phase]:
    tokens = sorted(set(row))
    counts = dict.fromkeys(tokens, 0)
    found = []
    for token in [*row, -1]:
        first = counts[tokens[0]]
        found.append((first, tuple(counts[each] - first for each in tokens)))
        if token >= 0:
            counts[token] += 1
    return found


def _middle(times: list[float], phases: list[Phase], q: int, near: float) -> tuple[int, int] | None:
    """The two places with all done q times between them, the first as near to a time as can be."""
    place_of = {phase: place for place, phase in enumerate(phases)}
    best: tuple[float, int, int] | None = None
    for a, (time, (first, others)) in enumerate(zip(times, phases)):
        b = place_of.get((first + q, others))
        if b is not None and (best is None or abs(time - near) < best[0]):
            best = (abs(time - near), a, b)
    return best[1:] if best else None


def _first(row: list[int], microbatches: int) -> list[int]:
    """Without the microbatches beyond so many."""
    counts: dict[int, int] = {}
    found = []
    for token in row:
        counts[token] = counts.get(token, 0) + 1
        if counts[token] <= microbatches:
            found.append(token)
    return found
