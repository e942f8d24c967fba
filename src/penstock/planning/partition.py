"""Partitions of a chain of unequal layers into stages.

`balanced_partition` is exact, by dynamic programming over (stages so far, layers so far). With one stage per
rank and m microbatches, a stage waits until the first microbatch has passed all layers before it, then does its
own work m times, and then the last gradient goes back through those layers. That is a lower bound on the time
of any order:

    forward and backward of all layers before it + m · (forward and backward of its own layers)

Of all partitions it finds one with the lowest maximum of this bound, and of those one with the least sum of
squares. For infinite m, the longest stage is as short as possible.

With several stages per rank the busiest rank is a sum of stages. `improve_partition` starts from a partition
and moves one layer at a time from one stage to another, with those in between shifting by one, as long as that
improves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, permutations
from math import inf

LayerCounts = tuple[int, ...]
"""How many layers each stage has."""

Fits = Callable[[int, int, int], bool]
"""Whether layers i to j - 1 fit a stage; fewer of them fit too."""

_ROUNDING = 1e-12


def balanced_partition(
    loads: Sequence[float], stages: int, microbatches: float = inf, fits: Fits | None = None
) -> LayerCounts | None:
    """The best partition; None if none has a layer for each stage and fits."""
    layers = len(loads)
    if not 1 <= stages <= layers:
        return None
    before = 1 / microbatches  # times are per microbatch, whose number may be infinite
    until = [0.0, *accumulate(loads)]
    fits = fits or (lambda *_: True)
    longest = _least(until, stages, fits, before, inf, max)
    if longest is None:
        return None
    limit = longest[0] * (1 + _ROUNDING)
    evenest = _least(until, stages, fits, before, limit, lambda so_far, time: so_far + time * time)
    assert evenest is not None, "the partition with the lowest maximum is within the limit"
    return evenest[1]


def _least(
    until: Sequence[float],
    stages: int,
    fits: Fits,
    before: float,
    limit: float,
    combine: Callable[[float, float], float],
) -> tuple[float, LayerCounts] | None:
    """The partition with the least value, combined stage by stage, among those with no stage above `limit`.

    `least[j]` is the best value of the first j layers in the stages so far. A stage that is too long or does
    not fit does not fit with more layers either, so the inner loop ends there.
    """
    layers = len(until) - 1
    least = [0.0] + [inf] * layers
    begins: list[list[int]] = []
    for stage in range(stages):
        now, begin = [inf] * (layers + 1), [-1] * (layers + 1)
        for j in range(stage + 1, layers - (stages - stage) + 2):
            for i in range(j - 1, stage - 1, -1):
                time = until[j] - until[i] + before * until[i]
                if time > limit or combine(0.0, time) >= now[j] or not fits(stage, i, j):
                    break
                value = combine(least[i], time)
                if value < now[j]:
                    now[j], begin[j] = value, i
        least = now
        begins.append(begin)
    if least[layers] == inf:
        return None
    counts, j = [], layers
    for begin in reversed(begins):
        counts.append(j - begin[j])
        j = begin[j]
    return least[layers], tuple(reversed(counts))


def even_partition(layers: int, stages: int) -> LayerCounts:
    """The same number of layers for each stage; the first stages have one more if it does not divide evenly."""
    each, rest = divmod(layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


def improve_partition(counts: LayerCounts, cost: Callable[[LayerCounts], tuple[float, ...]]) -> LayerCounts:
    """The partition after the best moves of one layer each; `cost` is compared entry by entry."""
    best = cost(counts)
    while True:
        tries = [
            move_layer(counts, *pair) for pair in permutations(range(len(counts)), 2) if counts[pair[0]] > 1
        ]
        found = min(((cost(each), each) for each in tries), default=None)
        if found is None or not _is_less(found[0], best):
            return counts
        best, counts = found


def move_layer(counts: LayerCounts, source: int, target: int) -> LayerCounts:
    """A partition with one layer fewer on one stage and one more on another."""
    changed = list(counts)
    changed[source] -= 1
    changed[target] += 1
    return tuple(changed)


def _is_less(these: tuple[float, ...], those: tuple[float, ...]) -> bool:
    """Whether these are less by more than rounding, so that moves end."""
    for a, b in zip(these, those):
        if abs(a - b) > _ROUNDING * max(abs(a), abs(b)):
            return a < b
    return False
