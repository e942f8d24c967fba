"""Partitions are exact where they claim to be, compared with brute force."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from penstock.planning.partition import balanced_partition, improve_partition

LOADS = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=9)


def every_partition(layers: int, stages: int) -> list[tuple[int, ...]]:
    """All partitions with at least one layer for each stage."""
    inner = combinations(range(1, layers), stages - 1)
    return [tuple(j - i for i, j in pairwise((0, *ends, layers))) for ends in inner]


def sums(loads: list[float], counts: tuple[int, ...]) -> list[float]:
    return [sum(loads[i:j]) for i, j in pairwise((0, *accumulate(counts)))]


def value(loads: list[float], counts: tuple[int, ...], m: float = inf) -> tuple[float, float]:
    """The longest time of a stage with its wait, and the sum of squares; per microbatch."""
    begins = (0, *accumulate(counts))
    times = [own + sum(loads[:begin]) / m for own, begin in zip(sums(loads, counts), begins)]
    return max(times), sum(time * time for time in times)


@given(LOADS, st.integers(1, 6), st.sampled_from([1, 2, 8, inf]))
def test_the_longest_time_and_then_the_squares_are_least(loads: list[float], stages: int, m: float) -> None:
    found = balanced_partition(loads, stages, m)
    if stages > len(loads):
        assert found is None
    else:
        assert found is not None
        every = every_partition(len(loads), stages)
        assert value(loads, found, m) == min(value(loads, each, m) for each in every)


@given(LOADS, st.integers(1, 6))
def test_for_infinite_microbatches_the_longest_stage_is_shortest(loads: list[float], stages: int) -> None:
    found = balanced_partition(loads, stages)
    if found is not None:
        every = every_partition(len(loads), stages)
        assert max(sums(loads, found)) == min(max(sums(loads, each)) for each in every)


@given(LOADS, st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_it_is_exact_with_a_limit_for_each_stage(loads: list[float], limits: list[int]) -> None:
    def fits(stage: int, i: int, j: int) -> bool:
        return (j - i) * 3 + sum(loads[i:j]) <= limits[stage]

    def all_fit(counts: tuple[int, ...]) -> bool:
        return all(fits(s, i, j) for s, (i, j) in enumerate(pairwise((0, *accumulate(counts)))))

    found = balanced_partition(loads, len(limits), inf, fits)
    good = [each for each in every_partition(len(loads), len(limits)) if all_fit(each)]
    if not good:
        assert found is None
    else:
        assert found is not None
        assert all_fit(found)
        assert value(loads, found) == min(value(loads, each) for each in good)


def test_moves_end_at_a_local_optimum() -> None:
    def cost(counts: tuple[int, ...]) -> tuple[float, ...]:
        return float(max(counts)), float(sum(c * c for c in counts))

    assert improve_partition((5, 1, 1), cost) == (3, 2, 2)
