"""Orders over any stage graph: one total order of all work, of which each rank takes its own part.

The *depth* of a stage is the number of ranks on the longest path from it to a stage that feeds none, a rank
that the path visits twice counted twice. Let w(s) be the forwards ahead of the first backward of stage s, at
least 1 and at least as many as on each stage that s feeds. Work is sorted by

    F(s, k)   k                 then forwards, in the order of the graph
    B(s, k)   k + w(s) - 1      then backwards, against the order of the graph
    W(s, k)   k + delay - 1     then weight gradients

Every input of an action comes before it in this order, so no rank can wait for ever. F(s, k + w(s)) comes after
B(s, k), so a stage holds at most w(s) activations (at most `delay` if the backward is split).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.arguments import plural
from penstock.errors import BuildError
from penstock.ir.encoding import Ints, codes_of
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule


def topological_placement(graph: StageGraph, ranks: int) -> Placement:
    """The stages in the order of the graph, about equally many on each rank: no value goes to a lower rank."""
    if graph.num_stages < ranks:
        raise BuildError(
            f"the stage graph has {plural(graph.num_stages, 'stage')}, too few for {plural(ranks, 'rank')}; "
            "every rank needs at least one"
        )
    hosts = [0] * graph.num_stages
    for position, stage in enumerate(graph.forward_order):
        hosts[stage] = position * ranks // graph.num_stages
    return Placement(tuple(hosts))


def depths(graph: StageGraph, placement: Placement) -> list[int]:
    """Per stage: the number of ranks on the longest path to the end of the model."""
    hosts = placement.stage_to_rank
    found = [1] * graph.num_stages
    for stage in reversed(graph.forward_order):
        found[stage] = max((found[t] + (hosts[t] != hosts[stage]) for t in graph.outputs(stage)), default=1)
    return found


def depth_order(
    graph: StageGraph,
    placement: Placement,
    microbatches: int,
    warmup: Sequence[int],
    name: str,
    weight_delay: int | None = None,
) -> Schedule:
    """The schedule with `warmup[s]` forwards ahead of the first backward of stage s.

    With `weight_delay` the backward is split, and W of a microbatch comes after `weight_delay` forwards.
    """
    backward = Kind.B if weight_delay is None else Kind.I
    ahead = [(Kind.F, [1] * graph.num_stages), (backward, list(warmup))]
    if weight_delay is not None:
        ahead.append((Kind.W, [weight_delay] * graph.num_stages))
    rows = _sorted_rows(graph, placement, microbatches, ahead)
    return Schedule.from_codes(rows, placement, microbatches, name, graph)


def _sorted_rows(
    graph: StageGraph, placement: Placement, microbatches: int, ahead: list[tuple[Kind, list[int]]]
) -> list[Ints]:
    """The actions of each rank, in the order of this module's picture."""
    position = np.empty(graph.num_stages, dtype=np.int64)
    position[list(graph.forward_order)] = np.arange(graph.num_stages)
    stage = np.repeat(np.arange(graph.num_stages), microbatches)
    microbatch = np.tile(np.arange(microbatches), graph.num_stages)
    host = np.array(placement.stage_to_rank, dtype=np.int64)
    turns = microbatches + max(max(forwards) for _, forwards in ahead)
    keys, codes = [], []
    for number, (kind, forwards) in enumerate(ahead):
        within = position if kind is Kind.F else graph.num_stages - 1 - position
        # per stage: its place in an order by rank, turn, kind and position; a turn later is one round further
        place = (host * turns + np.array(forwards, dtype=np.int64)) * len(ahead) + number
        keys.append((place * graph.num_stages + within)[stage] + microbatch * (len(ahead) * graph.num_stages))
        codes.append(codes_of(kind, stage, microbatch))
    order = np.argsort(np.concatenate(keys), kind="stable")
    per_rank = np.bincount(host, minlength=placement.num_ranks) * (microbatches * len(ahead))
    return np.split(np.concatenate(codes)[order], np.cumsum(per_rank)[:-1])
