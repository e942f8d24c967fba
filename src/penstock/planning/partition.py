"""How to cut a chain of unequal layers into stages.

`balanced` is exact, by dynamic programming over (stages so far, layers so far). With one stage per rank and m
microbatches, a stage has to wait until the first one has come through all layers before it, then do its own
work m times, and then the last gradient goes back through those layers. That is a time no order stays below:

    all layers before it, there and back + m · (its own layers, there and back)

Of all cuts it finds one whose longest such time is shortest, and of those one with the least sum of squares.
With m without end, that is the cut whose longest stage is shortest.

With several stages per rank the busiest rank is a sum of stages. `moved` starts from a cut and moves one layer
at a time from one stage to another, those between them shifting by one, as long as that makes it better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, permutations
from math import inf

__all__ = ["Counts", "balanced", "even", "moved", "with_move"]

Counts = tuple[int, ...]
"""How many layers each stage has."""

Fits = Callable[[int, int, int], bool]
"""Whether a stage has room for the layers from one to before another; then also for fewer of them."""

_ROUNDING = 1e-12


def balanced(
    loads: Sequence[float], stages: int, microbatches: float = inf, fits: Fits | None = None
) -> Counts | None:
    """The best cut; None if there is none with a layer for each stage that fits."""
    layers = len(loads)
    if not 1 <= stages <= layers:
        return None
    before = 1 / microbatches  # times per microbatch, which may be without end
    until = [0.0, *accumulate(loads)]
    fits = fits or (lambda *_: True)
    longest = _least(until, stages, fits, before, inf, max)
    if longest is None:
        return None
    limit = longest[0] * (1 + _ROUNDING)
    evenest = _least(until, stages, fits, before, limit, lambda so_far, time: so_far + time * time)
    assert evenest is not None, "the shortest longest time is within its own limit"
    return evenest[1]


def _least(
    until: Sequence[float],
    stages: int,
    fits: Fits,
    before: float,
    limit: float,
    joined: Callable[[float, float], float],
) -> tuple[float, Counts] | None:
    """The cut with the least value, `joined` stage by stage, among those with no stage above `limit`.

    `least[j]` is the best value of the first j layers in the stages so far. A stage that is too long, or does
    not fit, is so with more layers too, so the inner loop ends there.
    """
    layers = len(until) - 1
    least = [0.0] + [inf] * layers
    begins: list[list[int]] = []
    for stage in range(stages):
        now, begin = [inf] * (layers + 1), [-1] * (layers + 1)
        for j in range(stage + 1, layers - (stages - stage) + 2):
            for i in range(j - 1, stage - 1, -1):
                time = until[j] - until[i] + before * until[i]
                if time > limit or joined(0.0, time) >= now[j] or not fits(stage, i, j):
                    break
                value = joined(least[i], time)
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


def even(layers: int, stages: int) -> Counts:
    """As many layers for each stage, the first ones one more where it does not come out."""
    each, rest = divmod(layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


def moved(counts: Counts, worth: Callable[[Counts], tuple[float, ...]]) -> Counts:
    """The cut after the best moves of one layer each; `worth` is compared entry by entry, less is better."""
    best = worth(counts)
    while True:
        tries = [
            with_move(counts, *pair) for pair in permutations(range(len(counts)), 2) if counts[pair[0]] > 1
        ]
        found = min(((worth(each), each) for each in tries), default=None)
        if found is None or not _is_less(found[0], best):
            return counts
        best, counts = found


def with_move(counts: Counts, source: int, target: int) -> Counts:
    """One layer fewer on one stage, one more on another."""
    changed = list(counts)
    changed[source] -= 1
    changed[target] += 1
    return tuple(changed)


def _is_less(these: tuple[float, ...], those: tuple[float, ...]) -> bool:
    """Less by more than rounding, so that it ends."""
    for a, b in zip(these, those):
        if abs(a - b) > _ROUNDING * max(abs(a), abs(b)):
            return a < b
    return False
