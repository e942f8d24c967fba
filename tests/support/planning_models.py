"""Small models, and a searcher that needs no search."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock import Action, Costs, Kind, Placement, Schedule, simulate
from penstock.errors import SearchError
from penstock.planning import Layer, Model


def layer(seconds: float, name: str = "block", kind: str = "layer", **costs: Any) -> Layer:
    times = dict.fromkeys(("forward", "backward_input", "backward_weight"), seconds)
    return Layer(name, Costs(**{**times, "activation": 10, "parameters": 3, **costs}), kind)


def decoder(blocks: int = 10, **common: Any) -> Model:
    """An embedding that takes no time but has weights, equal blocks, and a head that is twice a block."""
    ends = (
        layer(0.0, "embedding", "embedding", parameters=20, activation=0),
        layer(2.0, "head", "head", parameters=20, activation=25, activation_freed_by_input=20),
    )
    middle = [layer(1.0, f"block {i}", activation_freed_by_input=4) for i in range(blocks)]
    return Model((ends[0], *middle, ends[1]), Costs(**common), ranks=4, samples=16, name="decoder")


def serial(placement: Placement, microbatches: int) -> Schedule:
    """One microbatch after the other: slow, and as small as can be."""
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


def stand_in(**asked: Any) -> Any:
    """Gives an order that no family has, as if it had been searched for."""
    schedule = serial(asked["placement"], asked["microbatches"])
    timeline = simulate(schedule, asked["costs"])
    limit = asked["memory_limit"]
    if limit is not None and max(timeline.peak_memory) > limit:
        raise SearchError("nothing fits")
    asked["told"](SimpleNamespace(best=timeline.makespan, bound=timeline.bound.seconds, share=0.5))
    return SimpleNamespace(schedule=schedule, found_by="a stand-in", missing=("a solver",), interrupted=False)
