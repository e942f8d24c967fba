"""Promises of a list of stages per rank: valid orders, no slower and no larger, close to the best order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

import penstock
from penstock import BuildError, Costs, Placement, Schedule, simulate
from tests.oracles.best_order import best_value
from tests.support.grids import small, thinned
from tests.support.schedule_rows import rows_of

FAMILIES = {
    name: each.stages_per_rank for name, each in penstock.families().items() if each.stages_per_rank != 1
}


def build(name: str, counts: Sequence[int] | int, m: int, ranks: int | None = None) -> Schedule:
    p = len(counts) if isinstance(counts, Sequence) else ranks
    assert p is not None
    return penstock.build(name, ranks=p, microbatches=m, stages_per_rank=counts)


def lists(name: str, p: int) -> list[list[int]]:
    """Every list of one to three stages, or in families with two of one to two."""
    most = FAMILIES[name]
    found = map(list, itertools.product((1, 2, 3) if most is None else range(1, most + 1), repeat=p))
    return [counts for counts in found if max(counts) == (most or max(counts))]


def peaks(schedule: Schedule) -> list[int]:
    """Peak live activations of each rank."""
    found = []
    for row in schedule.ranks:
        parts = [str(part) for step in row for part in step.parts]
        live = itertools.accumulate(("F" in text) - ("B" in text or "W" in text) for text in parts)
        found.append(max(live))
    return found


def random_times(rng: random.Random, counts: Sequence[int]) -> tuple[Costs, Costs]:
    """The same times for the stages that are kept, first in all stages and then in those alone."""
    p, v = len(counts), max(counts)
    hosts = [*range(p)] * v
    rows = [[rng.randint(1, 9) for _ in hosts] for _ in range(3)]
    own = [[s for s in range(p * v) if hosts[s] == rank] for rank in range(p)]
    kept = sorted(
        s for r, n in enumerate(counts) for s in (own[r][:n] if 2 * r < p else own[r][v - n :])
    )  # fmt: skip
    few = [[row[s] for s in kept] for row in rows]
    latency = rng.choice([0, 1, 3])
    return tuple(
        Costs(forward=tuple(f), backward_input=tuple(i), backward_weight=tuple(w), latency=latency)
        for f, i, w in (rows, few)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
@small(lambda p, name: p == 2 or (name in {"interleaved-1f1b", "zbv"} and p == 3))
def test_every_list_is_valid_no_slower_and_no_larger_than_equal_stages(name: str, p: int) -> None:
    for counts, m in thinned(itertools.product(lists(name, p), (1, 2, 4, 7)), 3):
        made, whole = build(name, counts, m), build(name, max(counts), m, p)
        assert [len(own) for own in made.placement.stages_of_rank] == counts
        assert penstock.validate(made) == []
        assert penstock.validate(penstock.lower(made)) == []
        assert all(ours <= theirs for ours, theirs in zip(peaks(made), peaks(whole)))
        assert simulate(made).makespan <= simulate(whole).makespan


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zero-bubble", "looped-bfs"])
def test_they_are_no_slower_at_any_costs_and_respect_the_lower_bound(name: str) -> None:
    rng = random.Random(name)
    for _ in range(40):
        counts = [rng.randint(1, 3) for _ in range(rng.randint(2, 5))]
        m = rng.randint(1, 9)
        of_all, of_few = random_times(rng, counts)
        timeline = simulate(build(name, counts, m), of_few)
        assert timeline.makespan <= simulate(build(name, max(counts), m, len(counts)), of_all).makespan
        assert timeline.makespan >= timeline.bound.seconds


def test_the_order_is_that_of_equal_stages_without_some() -> None:
    assert rows_of(build("interleaved-1f1b", [1, 2, 2, 1], 2)) == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1F1", "3F0", "3F1", "3B0", "3B1", "1B0", "1B1"],
        ["2F0", "2F1", "4F0", "4F1", "4B0", "4B1", "2B0", "2B1"],
        ["5F0", "5B0", "5F1", "5B1"],
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_list_of_equal_numbers_is_the_same_as_the_number(name: str) -> None:
    assert build(name, [2, 2, 2], 5) == build(name, 2, 5, 3)
    assert build(name, (2, 2, 2), 5) == build(name, 2, 5, 3)


def test_half_of_an_overlapped_pair_remains_as_a_single_step() -> None:
    made = build("dualpipev", [1, 2], 6)
    assert all("+" not in text for text in rows_of(made)[0])
    assert any(len(step.parts) == 2 for step in made.ranks[1])


@pytest.mark.parametrize(
    ("name", "counts", "m", "excess"),
    [
        ("interleaved-1f1b", [1, 2], 3, 0),
        ("interleaved-1f1b", [1, 3], 2, 0),
        ("interleaved-1f1b", [1, 2, 1], 1, 0),
        ("interleaved-1f1b", [1, 2, 1], 2, 2),
        ("interleaved-zero-bubble", [1, 2], 3, 0),
        ("interleaved-zero-bubble", [1, 3], 2, 0),
        ("interleaved-zero-bubble", [1, 2, 1], 2, 2),
        ("zbv", [2, 1], 2, 0),
        ("zbv", [1, 2], 3, 0),
        ("zbv", [1, 2, 1], 1, 0),
        ("zbv", [1, 2, 1], 2, 1),
        ("v-half", [1, 2], 3, 0),
    ],
)
def test_how_far_they_are_from_the_best_order(name: str, counts: list[int], m: int, excess: int) -> None:
    made = build(name, counts, m)
    split = name != "interleaved-1f1b"
    best = best_value(made.placement, m, Costs(), None, split=split, objective="makespan")
    assert simulate(made).makespan == best + excess


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_zbv_with_one_stage_on_the_first_and_last_rank_is_optimal(p: int) -> None:
    counts = [1, *[2] * (p - 2), 1]
    if max(counts) == 2:
        timeline = simulate(build("zbv", counts, 3 * p))
        assert timeline.gap == 0


def test_groups_and_lists_combine() -> None:
    for group in (4, 6, 12):
        made = penstock.build(
            "interleaved-1f1b", ranks=4, microbatches=12, stages_per_rank=[1, 3, 3, 2], group=group
        )
        assert penstock.validate(penstock.lower(made)) == []
        assert made.name == ("interleaved-1f1b" if group == 4 else f"interleaved-1f1b group={group}")


@pytest.mark.parametrize(
    ("name", "counts", "message"),
    [
        ("zbv", [1, 2], "stages_per_rank has 2 numbers for 3 ranks (given [1, 2]): give one for each"),
        ("zbv", [], "stages_per_rank has 0 numbers for 3 ranks"),
        ("zbv", [1, 0, 2], "every number in stages_per_rank must be a whole number of at least 1 (given [1, 0"),
        ("zbv", [1, "2", 2], "must be a whole number of at least 1 (given [1, '2', 2])"),
        ("zbv", [1, 3, 1], "zbv has 2 stages per rank (given 3)"),
        ("zbv", [1, 1, 1], "zbv has 2 stages per rank (given 1)"),
        ("1f1b", [1, 2, 1], "1f1b has 1 stage per rank (given 2); any number works with looped-bfs"),
    ],
)  # fmt: skip
def test_a_wrong_list_is_reported(name: str, counts: list[int], message: str) -> None:
    with pytest.raises(BuildError) as caught:
        penstock.build(name, ranks=3, microbatches=4, stages_per_rank=counts)
    assert message in str(caught.value)


def test_a_search_on_such_a_placement_starts_from_the_families() -> None:
    for placement, name in (
        (Placement.loop(3, [1, 2, 2]), "interleaved-zero-bubble"),
        (Placement.v(3, [1, 2, 2]), "zbv"),
    ):
        result = penstock.search(ranks=3, microbatches=6, placement=placement, moves=0)
        assert name in result.families
        assert result.value <= result.families[name]
