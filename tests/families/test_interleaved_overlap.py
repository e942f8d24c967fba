"""Promises of interleaved-overlap: Megatron's order of pairs, and all-to-all that only pairs hide."""

from __future__ import annotations

import itertools

import pytest

import penstock
from penstock import Costs, Schedule, parse_action, simulate
from penstock.families import find
from tests.oracles.megatron_orders import interleaved_overlap
from tests.support.grids import thinned
from tests.support.schedule_rows import rows_of

EXPERTS = Costs(forward_all_to_all=1, backward_input_all_to_all=1)
"""All-to-all as long as the compute of F and I."""


def build(p: int, m: int, v: int, group: int | None = None) -> Schedule:
    return penstock.build("interleaved-overlap", ranks=p, microbatches=m, stages_per_rank=v, group=group)


def parts_of(schedule: Schedule) -> list[list[str]]:
    return [[str(part) for step in row for part in step.parts] for row in schedule.ranks]


def test_the_order_is_that_of_interleaved_1f1b_with_one_more_forward() -> None:
    compared = 0
    for p, m, v in itertools.product((1, 2, 3, 4), (1, 2, 4, 7, 12), (1, 2, 3)):
        for n in range(p, m + 1):
            if not 0 < m % n < p:  # Megatron raises
                assert rows_of(build(p, m, v, n)) == interleaved_overlap(p, m, v, n)
                compared += 1
    assert compared > 100


def test_every_group_and_list_of_stages_is_valid_compute_only_and_lowered() -> None:
    for p, m, v in thinned(itertools.product((1, 2, 3, 5), (1, 2, 3, 5, 8), (1, 2, 3)), 4):
        for group in (None, *find("interleaved-overlap").group_range(p, m)):
            schedule = build(p, m, v, group)
            assert penstock.validate(schedule) == []
            assert penstock.validate(penstock.lower(schedule)) == []
    for counts in ([1, 2], [1, 2, 1], [1, 3, 3, 2]):
        schedule = penstock.build(
            "interleaved-overlap", ranks=len(counts), microbatches=8, stages_per_rank=counts
        )
        assert [len(own) for own in schedule.placement.stages_of_rank] == counts
        assert penstock.validate(penstock.lower(schedule)) == []


def test_the_text_of_pairs_is_torchs_and_is_read_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("csv") / "overlap.csv"
    for schedule in (build(2, 4, 2), penstock.lower(build(2, 4, 2))):
        schedule.write(path)
        assert "(3F1;3B0)OVERLAP_F_B" in path.read_text()
        assert penstock.read(path) == schedule
    assert str(parse_action("(3F1;3B0)OVERLAP_F_B")) == "(3F1;3B0)OVERLAP_F_B"


@pytest.mark.parametrize(("p", "m", "v"), [(4, 32, 2), (8, 64, 2), (4, 32, 4)])
def test_all_to_all_as_long_as_compute_is_hidden_by_pairs_only(p: int, m: int, v: int) -> None:
    plain = penstock.build("interleaved-1f1b", ranks=p, microbatches=m, stages_per_rank=v)
    separate = Schedule(parts_of(build(p, m, v)), plain.placement, m, "the same order without pairs")
    shortest = simulate(plain).makespan
    assert simulate(build(p, m, v), EXPERTS).makespan <= 1.1 * shortest
    for without_pairs in (plain, separate):
        assert simulate(without_pairs, EXPERTS).makespan > 1.6 * shortest


def test_all_to_all_of_weight_gradients_is_hidden_too() -> None:
    """Every kind with an all-to-all as long as its compute: the sums of both streams are equal."""
    costs = Costs(forward_all_to_all=1, backward_input_all_to_all=1, backward_weight_all_to_all=1)
    assert simulate(build(4, 64, 2), costs).makespan <= 1.1 * simulate(build(4, 64, 2)).makespan


def test_all_to_all_is_paid_for_in_warm_up_and_cool_down_only() -> None:
    sizes = itertools.product((1, 2, 3, 4), (1, 2, 4), (1, 2, 3))
    for (p, rounds, v), a, d in itertools.product(sizes, (0, 0.25, 1), (0, 0.5, 1)):
        m = p * rounds
        costs = Costs(forward_all_to_all=a, backward_input_all_to_all=d)
        assert simulate(build(p, m, v), costs).makespan == (m * v + p - 1) * 3 + p * v * (a + d)
