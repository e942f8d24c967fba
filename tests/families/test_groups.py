"""Promises of `group=`: Megatron's order, published memory and idle time, latency hidden for memory."""

from __future__ import annotations

import itertools

import pytest

import penstock
from penstock import BuildError, Costs, Schedule, simulate
from penstock.formats import dumps, reads
from tests.oracles.megatron_orders import interleaved
from tests.support.grids import small, thinned
from tests.support.schedule_rows import rows_of

TRAINING = ("interleaved-1f1b", "interleaved-zero-bubble")


def build(name: str, p: int, m: int, v: int, group: int | None = None) -> Schedule:
    return penstock.build(name, ranks=p, microbatches=m, stages_per_rank=v, group=group)


def smallest(name: str, p: int) -> int:
    return p if name == "interleaved-1f1b" else (p + 1) // 2


def peak(schedule: Schedule) -> int:
    """Peak live activations of any rank, counted from the text of the actions."""
    found = 0
    for row in rows_of(schedule):
        live = itertools.accumulate(("F" in text) - ("B" in text or "W" in text) for text in row)
        found = max(found, *live)
    return found


def test_where_megatron_accepts_the_group_the_order_is_megatrons() -> None:
    compared = 0
    for p, m, v in itertools.product((2, 3, 4), range(2, 15), (1, 2, 3)):
        for n in range(p, m + 1):
            if 0 < m % n < p:
                continue  # Megatron raises
            assert rows_of(build("interleaved-1f1b", p, m, v, n)) == interleaved(p, m, v, n)
            compared += 1
    assert compared > 150


@pytest.mark.parametrize("name", [*TRAINING, "forward-only"])
def test_a_group_of_all_ranks_is_the_default(name: str) -> None:
    for p, rounds, v in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3)):
        assert build(name, p, p * rounds, v, p) == build(name, p, p * rounds, v)


@pytest.mark.parametrize("name", [*TRAINING, "forward-only"])
def test_a_group_of_all_microbatches_runs_forwards_breadth_first(name: str) -> None:
    for p, m, v in itertools.product((2, 3, 4), (4, 5, 8), (2, 3)):
        ours, breadth_first = rows_of(build(name, p, m, v, m)), rows_of(build("looped-bfs", p, m, v))
        assert [[a for a in row if "F" in a] for row in ours] == [row[: m * v] for row in breadth_first]
        if name == "interleaved-1f1b" and m >= p:
            assert simulate(build(name, p, m, v, m)).span == simulate(build("looped-bfs", p, m, v)).span


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", [*TRAINING, "forward-only"])
@small(lambda p: p == 3)
def test_every_group_is_valid_compute_only_and_lowered(name: str, p: int) -> None:
    for m, v in thinned(itertools.product((1, 2, 3, 4, 7, 9), (1, 2, 3)), 2):
        least = 1 if name == "forward-only" else min(smallest(name, p), m)
        for group in range(least, m + 1):
            schedule = build(name, p, m, v, group)
            assert penstock.validate(schedule) == []
            assert penstock.validate(penstock.lower(schedule)) == []


@pytest.mark.parametrize(("p", "v"), list(itertools.product((2, 3, 4, 7), (2, 3))))
def test_memory_grows_by_one_activation_of_each_further_stage(p: int, v: int) -> None:
    for g, groups in itertools.product(range((p + 1) // 2, 2 * p + 1), (2, 3, 4)):
        m = g * groups
        if m < p:
            continue
        assert peak(build("interleaved-zero-bubble", p, m, v, g)) == g * (v - 1) + p
        if g >= p and m > g:
            assert peak(build("interleaved-1f1b", p, m, v, g)) == g * (v - 1) + 2 * (p - 1) + 1


def with_weights_after_inputs(schedule: Schedule) -> Schedule:
    """The same order with every W directly after its I: the order of PipeOffload's GIS."""
    rows = [
        [text for a in row if "W" not in a for text in ([a, a.replace("I", "W")] if "I" in a else [a])]
        for row in rows_of(schedule)
    ]
    return Schedule(rows, schedule.placement, schedule.microbatches, "gis")


@pytest.mark.parametrize(("p", "v"), list(itertools.product((2, 3, 4, 7, 8), (2, 3))))
def test_idle_and_memory_of_small_groups_equal_the_published_ones(p: int, v: int) -> None:
    """PipeOffload: (d - 1)(F + B) idle, plus (d - g)(v - 1)(F + B - W) in groups of g, at F = B = W."""
    for g in range((p + 1) // 2, p + 1):
        m = 4 * g
        made = build("interleaved-zero-bubble", p, m, v, g)
        published = with_weights_after_inputs(made)
        assert simulate(published).span - 3 * m * v == 2 * (p - 1) + (p - g) * (v - 1)
        assert peak(published) == peak(made) == g * (v - 1) + p
        idle = simulate(made).span - 3 * m * v
        assert idle == p - 1 + (p - g) * (v - 1) + max(0, 2 * p - 3 * g - 1)
        assert idle <= 2 * (p - 1) + (p - g) * (v - 1)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("name", TRAINING)
@small(lambda p: p <= 3)
def test_larger_groups_hide_more_latency_with_more_memory(name: str, p: int) -> None:
    """For groups that divide m: time never rises, memory always does, and slow hops cost less at the end."""
    for m, v, latency in itertools.product((8, 12, 24), (2, 3), (0.1, 1, 5)):
        groups = [g for g in range(p, m + 1) if m % g == 0]
        built = [build(name, p, m, v, g) for g in groups]
        times = [simulate(each, Costs(latency=latency)).makespan for each in built]
        memory = [peak(each) for each in built]
        assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(times))
        assert all(later > earlier for earlier, later in itertools.pairwise(memory))
        assert m % p or m == p or times[-1] < times[0]


def test_names_tell_groups_other_than_the_default() -> None:
    assert build("Interleaved1F1B", 2, 4, 2, 2).name == "interleaved-1f1b"
    made = build("Interleaved1F1B", 2, 4, 2, 4)
    assert made.name == "interleaved-1f1b group=4"
    assert reads(dumps(made, "json"), "json") == made
    assert rows_of(reads(dumps(made, "csv"), "csv")) == rows_of(made)


OUT_OF_RANGE = "group of interleaved-1f1b must be from 4 to 8, the microbatches (given {}, with 4 ranks and 8 m"


@pytest.mark.parametrize(
    ("name", "group", "message"),
    [
        (
            "interleaved-1f1b",
            3,
            f"{OUT_OF_RANGE.format(3)}icrobatches); interleaved-zero-bubble, gis can have 3",
        ),
        ("interleaved-1f1b", 9, OUT_OF_RANGE.format(9)),
        ("interleaved-zero-bubble", 1, "group of interleaved-zero-bubble must be from 2 to 8"),
        ("looped-bfs", 4, "looped-bfs has no group (given 4): remove it, or use interleaved-1f1b"),
        ("interleaved-1f1b", 4.0, "group must be a whole number (given 4.0)"),
        ("interleaved-1f1b", True, "group must be a whole number (given True)"),
    ],
)
def test_a_wrong_group_is_reported_with_its_range_and_what_to_try(name: str, group: int, message: str) -> None:
    with pytest.raises(BuildError) as caught:
        build(name, 4, 8, 2, group)
    assert message in str(caught.value)


def test_wrong_sizes_are_reported_together_with_a_group() -> None:
    with pytest.raises(BuildError, match="microbatches must be a whole number of at least 1") as caught:
        penstock.build("1f1b", ranks=4, microbatches=0, group=4)
    assert "1f1b has no group (given 4)" in str(caught.value)
