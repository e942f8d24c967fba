"""Small models, and a stub of the search."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock import Action, Costs, Kind, Placement, Schedule, simulate
from penstock.errors import SearchError
from penstock.planning import Layer, Model, plan
from penstock.planning.planner import LayerPlan


def layer(seconds: float, name: str = "block", kind: str = "layer", **costs: Any) -> Layer:
    times = dict.fromkeys(("forward", "backward_input", "backward_weight"), seconds)
    return Layer(name, Costs(**{**times, "activation": 10, "parameters": 3, **costs}), kind)


def decoder(blocks: int = 10, **common: Any) -> Model:
    """An embedding with parameters that takes no time, equal blocks, and a head that takes twice as long."""
    ends = (
        layer(0.0, "embedding", "embedding", parameters=20, activation=0),
        layer(2.0, "head", "head", parameters=20, activation=25, activation_freed_by_input=20),
    )
    middle = [layer(1.0, f"block {i}", activation_freed_by_input=4) for i in range(blocks)]
    return Model((ends[0], *middle, ends[1]), Costs(**common), ranks=4, samples=16, name="decoder")


def serial(placement: Placement, microbatches: int) -> Schedule:
    """One microbatch after the other: slow, with the least memory."""
    rows = [
        [
            Action(kind, stage, k)
            for k in range(microbatches)
            for kind, stages in ((Kind.F, own), (Kind.B, own[::-1]))
            for stage in stages
        ]
        for own in placement.stages_of_rank
    ]
    return Schedule(rows, placement, microbatches, "serial")


def stub_search(**arguments: Any) -> Any:
    """Returns a serial order, which no family has, as the result of a search."""
    schedule = serial(arguments["placement"], arguments["microbatches"])
    timeline = simulate(schedule, arguments["costs"])
    limit = arguments["memory_limit"]
    if limit is not None and max(timeline.peak_memory) > limit:
        raise SearchError("nothing fits")
    arguments["on_progress"](
        SimpleNamespace(best=timeline.makespan, bound=timeline.bound.seconds, fraction=0.5)
    )
    return SimpleNamespace(schedule=schedule, found_by="a stub", missing=("a solver",), interrupted=False)


def quick_plan(model: Model, **arguments: Any) -> LayerPlan:
    """A plan with families only, or with a stub of the search if `seconds` are given."""
    return plan(model, **{"seconds": 0.0, "searcher": stub_search, **arguments})
