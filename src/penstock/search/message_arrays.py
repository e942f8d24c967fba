"""Arrays of the values between stages: which token makes each, which tokens need it, and how it travels.

A value is an entry here if another stage needs it. One that several stages of another rank need crosses once
(`StageGraph.carriers`), so it is one entry that several tokens need.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.prices import edge_prices
from penstock.ir.encoding import Floats, Ints
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement


class MessageArrays(NamedTuple):
    """Messages in the order of the tokens that make them, and of their edges."""

    bounds: Ints
    """Where the messages of each token begin, and the end of the last one's."""
    producer: Ints
    """Per message: the token that makes it."""
    target: Ints
    """Per message: the rank that needs it."""
    lag: Floats
    """Per message: from the end of the step to its arrival, if the channel is free; 0 within a rank."""
    seconds: Floats
    """Per message: how long it occupies its channel."""
    channel: Ints
    """Per message: from which rank to which, as one number."""
    input_bounds: Ints
    """Where the inputs of each token begin, and the end of the last one's."""
    inputs: Ints
    """The messages that each token needs, token by token."""


class _Message(NamedTuple):
    producer: int
    edge: int
    target: int
    lag: float
    seconds: float
    channel: int


def message_arrays(
    graph: StageGraph, placement: Placement, costs: Costs, forward: int, backward: int
) -> MessageArrays:
    """The messages of a graph; stage s has the tokens 3s + `forward` and 3s + `backward`."""
    rank_of_stage = placement.stage_to_rank
    carrier = graph.carriers(np.array(rank_of_stage, dtype=np.int64)).tolist()
    found: list[_Message] = []
    needs: list[tuple[int, int, int]] = []  # a token, and the producer and the edge of what it needs
    for value, kind in (("activation", forward), ("gradient", backward)):
        prices = edge_prices(costs, graph, value)
        for edge, ends in enumerate(graph.edges):
            makes, uses = ends if value == "activation" else ends[::-1]
            carried = carrier[edge] if value == "activation" else edge
            needs.append((3 * uses + kind, 3 * makes + kind, carried))
            if carried == edge:
                source, target = rank_of_stage[makes], rank_of_stage[uses]
                crosses = source != target
                lag, seconds = (prices.total[edge], prices.transfer[edge]) if crosses else (0.0, 0.0)
                channel = source * placement.num_ranks + target
                found.append(_Message(3 * makes + kind, edge, target, float(lag), float(seconds), channel))
    found.sort()
    needs.sort()
    number = {(each.producer, each.edge): i for i, each in enumerate(found)}
    tokens = np.arange(3 * graph.num_stages + 1)
    producer, _, targets, lags, taken, channels = (
        np.array([each[field] for each in found]) for field in range(len(_Message._fields))
    )
    return MessageArrays(
        bounds=np.searchsorted(producer, tokens).astype(np.int64),
        producer=producer.astype(np.int64),
        target=targets.astype(np.int64),
        lag=lags.astype(np.float64),
        seconds=taken.astype(np.float64),
        channel=channels.astype(np.int64),
        input_bounds=np.searchsorted(np.array([token for token, *_ in needs]), tokens).astype(np.int64),
        inputs=np.array([number[key[0], key[1]] for _, *key in needs], dtype=np.int64),
    )
