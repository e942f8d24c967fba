"""Promises of budgets: shares of seconds or of moves, and ranks of schedules under jitter."""

from __future__ import annotations

import penstock
from penstock import Costs
from penstock.search.request import Budget, Jitter
from penstock.simulation.jitter import simulate_with_jitter


def test_a_budget_of_moves_does_not_look_at_the_clock() -> None:
    budget = Budget(10.0, 200, seed=1)
    assert [budget.fraction(1e9, moves) for moves in (0, 50, 200, 300)] == [0.0, 0.25, 1.0, 1.0]
    assert Budget(10.0, 0, seed=1).fraction(0.0, 0) == 1.0


def test_a_budget_of_seconds_does_not_count_moves() -> None:
    budget = Budget(10.0, None, seed=1)
    assert [budget.fraction(seconds, 10**9) for seconds in (0.0, 2.5, 20.0)] == [0.0, 0.25, 1.0]
    assert Budget(0.0, None, seed=1).fraction(0.0, 0) == 1.0


def test_a_part_of_a_budget_has_the_same_seed() -> None:
    assert Budget(10.0, 200, seed=7).part(0.25) == Budget(2.5, 50, seed=7)


def test_the_best_schedule_under_jitter_has_the_lowest_quantile() -> None:
    names = ("gpipe", "1f1b", "zb-h1")
    schedules = [penstock.build(name, ranks=4, microbatches=8) for name in names]
    quantiles = [simulate_with_jitter(each, Costs(), jitter=0.2, seed=3).quantile(0.9) for each in schedules]
    best = Jitter(0.2, 0.9).best(schedules, Costs(), seed=3, is_over=lambda: False)
    assert best == (quantiles.index(min(quantiles)), min(quantiles))
    over = iter([False, True])
    of_two = Jitter(0.2, 0.9).best(schedules, Costs(), seed=3, is_over=lambda: next(over))
    assert of_two == (quantiles.index(min(quantiles[:2])), min(quantiles[:2]))


def test_only_a_budget_of_seconds_is_over_after_its_time() -> None:
    assert [Budget(10.0, None, seed=1).is_over(seconds) for seconds in (9.9, 10.0)] == [False, True]
    assert not Budget(10.0, 200, seed=1).is_over(1e9)
