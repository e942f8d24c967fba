"""The best options are refined by other partitions and by searched orders."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock.ir.graph import StageGraph
from penstock.planning import Model
from tests.support.planning_models import decoder, layer, quick_plan, stub_search


@pytest.mark.full
def test_searched_orders_are_ranked_with_families() -> None:
    model = decoder(10, launch_overhead=0.01)
    made = quick_plan(model, seconds=1.0)
    searched = [option for option in made.options if option.name == "searched"]
    assert searched
    assert all(option.found_by == "a stub" for option in searched)
    assert made.evaluation.missing == {"a solver"}
    assert not [option for option in quick_plan(model).options if option.name == "searched"]


def test_the_best_orders_are_tried_with_other_partitions() -> None:
    seconds = (2.0, 1.0, 3.0, 1.0, 4.0, 4.0, 4.0, 4.0, 2.0)
    model = Model(tuple(map(layer, seconds)), ranks=3, samples=6)
    before = quick_plan(model, stages_per_rank=2)
    after = quick_plan(model, stages_per_rank=2, seconds=9.0)
    assert after.best.seconds < before.best.seconds
    assert after.best.name != "searched"
    assert after.best.configuration.counts not in {option.configuration.counts for option in before.options}


@pytest.mark.full
def test_the_best_configurations_are_searched_within_the_time() -> None:
    calls = []

    def searcher(**arguments: Any) -> Any:
        calls.append(arguments)
        return stub_search(**arguments)

    made = quick_plan(decoder(10, launch_overhead=0.01), memory_limit=600, seconds=2.0, searcher=searcher)
    assert 1 <= len(calls) <= 5
    for arguments in calls:
        assert arguments["ranks"] == 4
        assert arguments["memory_limit"] == 600
        assert arguments["objective"] == "makespan"
        assert arguments["placement"].num_stages == 4 * arguments["stages_per_rank"]
        arguments["costs"].check_lengths(StageGraph.chain(4 * arguments["stages_per_rank"]), 4)
    assert all(arguments["seconds"] <= 2.0 for arguments in calls)
    assert made.best.seconds >= made.bound


def test_an_interrupted_search_ends_the_plan_with_its_result() -> None:
    calls = []

    def searcher(**arguments: Any) -> Any:
        calls.append(arguments)
        found = stub_search(**arguments)
        found.interrupted = True
        return found

    made = quick_plan(decoder(10), seconds=9.0, searcher=searcher)
    assert made.interrupted
    assert len(calls) == 1
    assert [option for option in made.options if option.name == "searched"]


def test_a_search_that_finds_a_family_again_adds_nothing() -> None:
    def searcher(**arguments: Any) -> Any:
        found = stub_search(**arguments)
        found.schedule = penstock.build("zb-h1", ranks=4, microbatches=arguments["microbatches"])
        return found

    made = quick_plan(decoder(10, launch_overhead=0.01), seconds=9.0, searcher=searcher, stages_per_rank=1)
    assert made.best.name == "zb-h1"
    assert not [o for o in made.options if o.name == "searched" and o.configuration == made.best.configuration]
