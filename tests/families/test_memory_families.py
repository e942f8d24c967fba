"""Promises of GIS, GIS-H and PO-H: memory and idle time are as published, and as the docstrings say."""

from __future__ import annotations

import itertools
from math import ceil

import pytest

import penstock
from penstock import Costs, Timeline, simulate
from penstock.ir.kinds import Kind

SIZES = [(p, v) for p in range(2, 9) for v in (2, 3, 4)]
UNEQUAL = Costs(forward=2, backward_input=3, backward_weight=1)


def timeline(
    name: str, p: int, v: int, m: int, costs: Costs | None = None, group: int | None = None
) -> Timeline:
    made = penstock.build(name, ranks=p, microbatches=m, stages_per_rank=v, group=group)
    return simulate(made, costs)


def idle(of: Timeline, v: int) -> float:
    costs = of.costs
    step = sum(costs.per_stage(name, 1)[0] for name in ("forward", "backward_input", "backward_weight"))
    return of.makespan - of.schedule.microbatches * v * step


@pytest.mark.parametrize(("p", "v"), SIZES)
def test_gis_holds_the_whole_model_once_and_idles_as_published(p: int, v: int) -> None:
    for rounds, (costs, chain) in itertools.product((1, 2, 3), ((Costs(), 2), (UNEQUAL, 5))):
        found = timeline("gis", p, v, rounds * p, costs)
        assert found.peak_memory == tuple((v - 1) * p + p - r for r in range(p))
        assert max(found.peak_memory) == p * v
        assert idle(found, v) == (p - 1) * chain


@pytest.mark.parametrize(("p", "v"), SIZES)
def test_gis_h_holds_about_half_of_it_and_idles_as_published(p: int, v: int) -> None:
    half = ceil(p / 2)
    for rounds in (2, 4):
        found = timeline("gis-h", p, v, rounds * half)
        assert max(found.peak_memory) == (v - 1) * half + p
        assert idle(found, v) == 2 * (p - 1) + (v - 1) * (p - half)
        if p % 2 == 0:
            assert max(found.peak_memory) == (v + 1) * p / 2
            unequal = timeline("gis-h", p, v, rounds * half, UNEQUAL)
            assert idle(unequal, v) == (p - 1) * 5 + (v - 1) * p / 2 * (2 + 3 - 1)


@pytest.mark.parametrize(("p", "v"), SIZES)
def test_gis_in_groups_trades_memory_for_idle_time(p: int, v: int) -> None:
    for group in range(ceil(p / 2), p + 1):
        found = timeline("gis", p, v, 2 * group, group=group)
        assert max(found.peak_memory) == (v - 1) * group + p
        assert idle(found, v) == 2 * (p - 1) + (v - 1) * (p - group)


def test_with_odd_ranks_and_unequal_costs_gis_h_can_idle_less_than_the_formula() -> None:
    assert idle(timeline("gis-h", 3, 2, 4, UNEQUAL), 2) == 13 < (3 - 1) * 5 + (2 - 1) * (3 - 2) * (2 + 3 - 1)


def test_interleaved_1f1b_holds_one_activation_less_than_the_table_of_the_paper() -> None:
    for p, v in SIZES:
        assert max(timeline("interleaved-1f1b", p, v, 2 * p).peak_memory) == (v + 1) * p - 1


@pytest.mark.parametrize(("p", "v"), [*SIZES, *((p, v) for p in range(1, 9) for v in (1, 5))])
def test_po_h_holds_the_published_memory_and_idles_less_than_1f1b(p: int, v: int) -> None:
    for m in (1, p, 2 * p + 1, 4 * p):
        found = timeline("po-h", p, v, m)
        assert max(found.peak_memory) <= ceil((v + 2) * p / 8) + 3
        assert idle(found, v) < 3 * v * (p - 1) or p == 1


@pytest.mark.parametrize(("p", "v"), SIZES)
def test_copies_as_long_as_a_round_cost_a_constant(p: int, v: int) -> None:
    """Only the warm-up, whose rounds are shorter, waits for copies: more microbatches cost no more."""
    copies = Costs(host_bandwidth=1 / 3)
    waits = []
    for m in (3 * p, 5 * p):
        free, slow = (timeline("po-h", p, v, m, costs) for costs in (Costs(), copies))
        assert idle(slow, v) < 3 * v * (p - 1)
        waits.append(slow.makespan - free.makespan)
    assert waits[1] <= waits[0] <= 3 * v


def test_half_of_the_activations_of_po_h_are_offloaded() -> None:
    for p, v, m in ((4, 2, 8), (4, 4, 8), (4, 3, 8), (8, 5, 16)):
        table = penstock.build("po-h", ranks=p, microbatches=m, stages_per_rank=v).table
        assert 2 * int(table.of_kind(Kind.OFFLOAD).sum()) == p * v * m
    # all would be used in the next round
    made = penstock.build("po-h", ranks=2, microbatches=4, stages_per_rank=1)
    assert not made.table.has(Kind.OFFLOAD)
