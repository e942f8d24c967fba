"""Random acyclic stage graphs with a placement, for laws that hold on any graph."""

from __future__ import annotations

import random

from penstock import Placement, StageGraph

__all__ = ["random_graph", "random_placed_graph"]


def random_graph(rng: random.Random, stages: int) -> StageGraph:
    """Any acyclic graph in which each stage has a neighbour; the numbers need not follow the edges."""
    names = list(range(stages))
    if rng.random() < 0.3:
        rng.shuffle(names)
    edges = {(rng.randrange(t), t) for t in range(1, stages) if rng.random() < 0.9}
    edges |= {(s, t) for t in range(stages) for s in range(t) if rng.random() < 0.25}
    return StageGraph(stages, tuple((names[s], names[t]) for s, t in edges))


def random_placed_graph(
    rng: random.Random, most_stages: int = 7, most_ranks: int = 4
) -> tuple[StageGraph, Placement]:
    """A random graph with any placement: also one where values go to lower ranks."""
    stages = rng.randint(1, most_stages)
    ranks = rng.randint(1, min(stages, most_ranks))
    hosts = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(hosts)
    return random_graph(rng, stages), Placement(tuple(hosts))
