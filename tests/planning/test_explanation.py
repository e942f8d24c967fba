"""Explanations: every figure is that of another plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import penstock
from penstock.arguments import plural
from penstock.planning import plan
from penstock.planning.explanation import explain
from penstock.planning.partition import even_partition
from tests.support.planning_models import decoder, stub_search


@pytest.mark.full
def test_changes_are_planned_again_and_the_most_helpful_comes_first() -> None:
    model = replace(decoder(6, latency=1.0, launch_overhead=0.1), samples=8)
    made = plan(model, memory_limit=250, seconds=0, searcher=stub_search)
    found = explain(made)
    gains = [each.gain for each in found.what_ifs]
    assert gains == sorted(gains, reverse=True)
    by_change = {each.change.split(",")[0]: each for each in found.what_ifs}
    more = plan(model, memory_limit=250 * 1.25, seconds=0)
    assert by_change["25 % more memory"].seconds == pytest.approx(more.best.seconds)
    near = plan(replace(model, common=replace(model.common, latency=0.5)), memory_limit=250, seconds=0)
    assert by_change["half the latency"].seconds <= near.best.seconds
    for each in found.what_ifs:
        assert each.gain == pytest.approx(1 - each.seconds / made.best.seconds)
        if "per rank instead of" not in each.change:
            assert each.gain >= 0  # the best option is still possible


@pytest.mark.full
def test_less_all_to_all_is_a_change_where_there_is_any() -> None:
    block = replace(decoder(10).layers[1].costs, forward_all_to_all=2, backward_input_all_to_all=2)
    model = replace(decoder(10), layers=(replace(decoder(10).layers[1], costs=block),) * 8, samples=8)
    made = plan(model, seconds=0)
    assert len(made.best.schedule.table.slot) > made.best.schedule.num_steps  # it has pairs
    assert made.bound <= made.best.seconds * (1 + 1e-9)
    changes = {each.change: each for each in explain(made).what_ifs}
    assert changes["half the all-to-all"].gain > 0
    assert "half the all-to-all" not in {
        each.change for each in explain(plan(decoder(10), samples=8, seconds=0)).what_ifs
    }


def test_other_stages_per_rank_are_listed_even_if_slower() -> None:
    made = plan(decoder(10), samples=8, seconds=0)
    stages_per_rank = made.best.configuration.stages_per_rank
    assert isinstance(stages_per_rank, int)
    changes = {each.change: each for each in explain(made).what_ifs}
    for other in {stages_per_rank - 1, stages_per_rank + 1} & {1, 2, 3}:
        best = min(
            option.seconds for option in plan(decoder(10), samples=8, stages_per_rank=other, seconds=0).options
        )
        assert changes[f"{plural(other, 'stage')} per rank instead of {stages_per_rank}"].seconds == best


def test_the_best_is_compared_with_the_next_and_with_an_even_partition() -> None:
    made = plan(decoder(10), samples=8, memory_limit=400, seconds=0)
    text = "\n".join(explain(made).why)
    assert str(made.best) in text.splitlines()[0]
    assert f"the next, {made.options[1]}, takes" in text
    assert made.best.bound.because in text
    configuration, stages = made.best.configuration, made.best.schedule.num_stages
    costs = made.request.model.costs(even_partition(12, stages), configuration.samples)
    seconds = penstock.simulate(made.best.schedule, costs).makespan
    found = re.search(r"with an even partition, .* takes ([\d.]+) s", text)
    assert found
    assert float(found[1]) <= seconds * (1 + 1e-3)  # the same order, or a better one for this partition


def test_equal_stages_have_nothing_to_gain_from_balance() -> None:
    block = decoder(10).layers[1]
    model = replace(decoder(10), layers=(block,) * 8, samples=8)
    changes = [each.change for each in explain(plan(model, seconds=0)).what_ifs]
    assert not [change for change in changes if "balanced" in change]
