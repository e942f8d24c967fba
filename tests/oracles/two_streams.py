"""The shortest run of an overlapped pair on two streams, layer by layer, found by trying all of them.

It shares nothing with the library. A part runs its layers one after the other: the compute of a layer, then its
all-to-all. Layer n of W waits for layer n of I. In every unit of time, each of the two streams works on one of
the parts, or on none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

__all__ = ["shortest_pair"]

Progress = tuple[int, ...]
"""Per part: how many units of time it has run."""
_COMPUTE, _ALL_TO_ALL = 0, 1
_NONE = -1


def shortest_pair(parts: dict[str, tuple[int, int]], layers: int) -> int:
    """Units of time, given compute and all-to-all of one layer of F, I and W, of those that there are."""
    names = list(parts)
    chains = [([_COMPUTE] * c + [_ALL_TO_ALL] * a) * layers for c, a in parts.values()]
    done = tuple(map(len, chains))
    reached: set[Progress] = {(0,) * len(names)}
    seen = set(reached)
    time = 0
    while done not in reached:
        time += 1
        reached = {after for at in reached for after in _next(at, names, chains, parts)} - seen
        seen |= reached
    return time


def _next(
    at: Progress, names: Sequence[str], chains: Sequence[list[int]], parts: dict[str, tuple[int, int]]
) -> Iterator[Progress]:
    """What can be reached in one unit of time."""
    ready: tuple[list[int], list[int]] = ([], [])
    for part, (chain, position) in enumerate(zip(chains, at)):
        if position < len(chain) and _may_run(part, at, names, parts):
            ready[chain[position]].append(part)
    for chosen in product(*(each or [_NONE] for each in ready)):
        yield tuple(position + (part in chosen) for part, position in enumerate(at))


def _may_run(part: int, at: Progress, names: Sequence[str], parts: dict[str, tuple[int, int]]) -> bool:
    if names[part] != "W" or not sum(parts["I"]):
        return True
    layer = at[part] // sum(parts["W"])
    compute, all_to_all = parts["I"]
    return at[names.index("I")] >= layer * (compute + all_to_all) + compute
