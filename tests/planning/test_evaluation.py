"""Orders are evaluated, pruned or rejected for good reason, and progress is reported."""

from __future__ import annotations

import pytest

from penstock import PlanError
from penstock.search import Progress
from tests.support.planning_models import decoder, quick_plan


def test_pruned_orders_can_neither_win_nor_be_on_the_frontier() -> None:
    made = quick_plan(decoder(10, launch_overhead=0.2))
    assert made.evaluation.pruned
    for rejected in made.evaluation.pruned:
        assert any(
            o.seconds <= rejected.bound * (1 + 1e-9) and o.memory <= rejected.memory for o in made.options
        )


@pytest.mark.full
def test_orders_that_exceed_the_limit_are_listed_with_their_memory() -> None:
    free, tight = quick_plan(decoder(10)), quick_plan(decoder(10), memory_limit=150)
    assert not free.evaluation.too_large
    assert tight.evaluation.too_large
    assert all(rejected.memory > 150 for rejected in tight.evaluation.too_large)
    assert [rejected.memory for rejected in tight.evaluation.too_large] == sorted(
        rejected.memory for rejected in tight.evaluation.too_large
    )
    assert {"gpipe"} <= {rejected.name for rejected in tight.evaluation.too_large}


def test_if_nothing_fits_the_error_names_the_smallest_order() -> None:
    with pytest.raises(PlanError, match=r"memory limit of 50 B per rank: the smallest of \d+ orders, .* needs"):
        quick_plan(decoder(10), memory_limit=50)


def test_progress_has_the_best_the_bound_and_the_gap() -> None:
    reports: list[Progress] = []
    made = quick_plan(decoder(10), seconds=1.0, on_progress=reports.append)
    bests = [each.best for each in reports]
    assert bests == sorted(bests, reverse=True)
    assert reports[-1].bound == made.bound
    assert reports[-1].gap == pytest.approx(bests[-1] / made.bound - 1)


def test_interleaved_families_are_evaluated_in_groups_for_slow_hops_and_for_little_memory() -> None:
    slow = quick_plan(decoder(14, latency=2), stages_per_rank=2)
    (default,) = (o for o in slow.options if str(o) == "interleaved-1f1b (v=2, m=16)")
    assert str(slow.best) == "interleaved-1f1b group=8 (v=2, m=16)"
    assert slow.best.seconds < default.seconds
    assert slow.best.memory > default.memory
    fast = quick_plan(decoder(14, latency=0.5), stages_per_rank=2)
    assert "interleaved-zero-bubble group=2 (v=2, m=16)" in map(str, fast.frontier)
