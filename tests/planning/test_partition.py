"""Promises of the partition: exact for one stage per rank, and never worse than an even split."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Placement, build
from penstock.planning import Model
from penstock.planning.configuration import cut_that_fits, cuts, framed, frames
from penstock.planning.live_memory import holdings
from penstock.planning.partition import balanced, even, moved
from penstock.planning.request import Question
from tests.support.planning_models import decoder, layer

LOADS = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=9)


def every_cut(layers: int, stages: int) -> list[tuple[int, ...]]:
    """All ways to give each stage at least one layer."""
    inner = combinations(range(1, layers), stages - 1)
    return [tuple(j - i for i, j in pairwise((0, *ends, layers))) for ends in inner]


def sums(loads: list[float], counts: tuple[int, ...]) -> list[float]:
    return [sum(loads[i:j]) for i, j in pairwise((0, *accumulate(counts)))]


def value(loads: list[float], counts: tuple[int, ...], m: float = inf) -> tuple[float, float]:
    """The longest time of a stage with what it waits for, and the sum of squares; in shares of m."""
    begins = (0, *accumulate(counts))
    times = [own + sum(loads[:begin]) / m for own, begin in zip(sums(loads, counts), begins)]
    return max(times), sum(time * time for time in times)


@given(LOADS, st.integers(1, 6), st.sampled_from([1, 2, 8, inf]))
def test_the_longest_time_is_as_short_as_brute_force_finds_it_and_then_the_squares(
    loads: list[float], stages: int, m: float
) -> None:
    found = balanced(loads, stages, m)
    if stages > len(loads):
        assert found is None
    else:
        assert found is not None
        assert value(loads, found, m) == min(value(loads, cut, m) for cut in every_cut(len(loads), stages))


@given(LOADS, st.integers(1, 6))
def test_without_end_the_longest_stage_is_as_short_as_can_be(loads: list[float], stages: int) -> None:
    found = balanced(loads, stages)
    if found is not None:
        assert max(sums(loads, found)) == min(max(sums(loads, cut)) for cut in every_cut(len(loads), stages))


@given(LOADS, st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_with_room_for_so_much_on_each_stage_it_is_still_exact(loads: list[float], rooms: list[int]) -> None:
    def fits(stage: int, i: int, j: int) -> bool:
        return (j - i) * 3 + sum(loads[i:j]) <= rooms[stage]

    def all_fit(cut: tuple[int, ...]) -> bool:
        return all(fits(s, i, j) for s, (i, j) in enumerate(pairwise((0, *accumulate(cut)))))

    found = balanced(loads, len(rooms), inf, fits)
    good = [cut for cut in every_cut(len(loads), len(rooms)) if all_fit(cut)]
    if not good:
        assert found is None
    else:
        assert found is not None
        assert all_fit(found)
        assert value(loads, found) == min(value(loads, cut) for cut in good)


@given(st.lists(st.floats(0, 10), min_size=4, max_size=14), st.integers(2, 3), st.sampled_from(["v", "loop"]))
def test_with_several_stages_per_rank_no_rank_is_busier_than_with_an_even_split(
    seconds: list[float], legs: int, shape: str
) -> None:
    ranks = len(seconds) // legs
    placement = Placement.v(ranks, legs) if shape == "v" else Placement.loop(ranks, legs)
    model = Model(tuple(layer(each) for each in seconds))

    def busiest(counts: tuple[int, ...]) -> float:
        stages = sums(model.loads(), counts)
        return max(sum(stages[s] for s in own) for own in placement.stages_of_rank)

    found = cuts(model, placement)
    assert all(len(cut) == ranks * legs and sum(cut) == len(seconds) and min(cut) >= 1 for cut in found)
    assert busiest(found[0]) <= busiest(even(len(seconds), ranks * legs)) * (1 + 1e-9)


def test_a_heavy_head_gets_fewer_blocks_beside_it_and_a_light_embedding_more() -> None:
    assert cuts(decoder(10), Placement.loop(4))[0] == (4, 3, 3, 2)


def test_a_rank_that_is_busier_than_others_comes_first_where_nobody_waits_for_it() -> None:
    model = Model(tuple(layer(1.0) for _ in range(13)))
    assert {frame.counts for frame in frames(Question(model, 4, 16, stages_per_rank=1))} >= {(4, 3, 3, 3)}
    assert balanced(model.loads(), 4, 16) == (4, 3, 3, 3)


def test_moves_end_where_none_makes_it_better() -> None:
    assert moved((5, 1, 1), lambda counts: (float(max(counts)), float(sum(c * c for c in counts)))) == (3, 2, 2)


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zbv", "interleaved-1f1b"])
def test_a_cut_that_fits_is_found_where_the_balanced_one_is_too_large(family: str) -> None:
    model = Model(tuple(layer(1.0, parameters=100 if i < 4 else 1) for i in range(16)), ranks=4, samples=8)
    schedule = build(family, ranks=4, microbatches=8)
    held, stages = holdings(schedule), schedule.num_stages
    first = cuts(model, schedule.placement)[0]

    def peak(counts: tuple[int, ...]) -> float:
        return max(each.peak(model.costs(counts, 1), stages) for each in held)

    limit = peak(first) - 50
    question = Question(model, 4, 8, limit)
    frame = framed(question, schedule.placement, first, 8)
    found = cut_that_fits(question, frame, held)
    assert found is not None
    assert peak(found) <= limit < peak(first)
    assert cut_that_fits(replace(question, memory_limit=100), frame, held) is None
