"""Executes a lowered schedule literally with numbers: each rank has only what it computed or received.

It shares the actions and the edges of the graph with the library, and no rule. A send blocks its rank until the
other rank reaches the receive. Stage s computes 1 + s + the sum of its inputs; a stage that feeds none has the
gradient 1, any other the sum of the gradients of those it feeds.
"""

from __future__ import annotations

from penstock import Action, Kind, Schedule, StageGraph
from penstock.ir.action import chain_neighbour

__all__ = ["Values", "direct_values", "executed_values"]

Values = dict[tuple[str, int, int], int]
"""By F or B, stage and microbatch."""


def direct_values(graph: StageGraph, microbatches: int) -> Values:
    """The activation and the gradient of every stage, without a schedule."""
    found: Values = {}
    for k in range(microbatches):
        for s in graph.forward_order:
            found["F", s, k] = 1 + s + sum(found["F", u, k] for u in graph.inputs(s))
        for s in reversed(graph.forward_order):
            found["B", s, k] = sum(found["B", t, k] for t in graph.outputs(s)) if graph.outputs(s) else 1
    return found


def executed_values(schedule: Schedule) -> Values:
    """The values that the ranks compute; raises `RuntimeError` where they wait for each other."""
    rows = [[part for step in row for part in step.parts] for row in schedule.ranks]
    held: list[Values] = [{} for _ in rows]
    at = [0] * len(rows)
    found: Values = {}
    while any(position < len(row) for position, row in zip(at, rows)):
        if not any(_advanced(schedule, rows, held, at, rank, found) for rank in range(len(rows))):
            raise RuntimeError(f"all ranks wait: {[row[i : i + 1] for i, row in zip(at, rows)]}")
    return found


def _advanced(
    schedule: Schedule, rows: list[list[Action]], held: list[Values], at: list[int], rank: int, found: Values
) -> bool:
    """Take the next step of a rank if it can; a receive waits until its sender takes both."""
    if at[rank] == len(rows[rank]):
        return False
    part = rows[rank][at[rank]]
    if part.kind.is_receive:
        return False
    if part.kind.is_send:
        return _meets(schedule, rows, held, at, rank, part)
    _compute(schedule.graph, held[rank], part, found)
    at[rank] += 1
    return True


def _meets(
    schedule: Schedule, rows: list[list[Action]], held: list[Values], at: list[int], rank: int, part: Action
) -> bool:
    peer = chain_neighbour(part.kind, part.stage) if part.peer is None else part.peer
    other = schedule.placement.stage_to_rank[peer]
    if at[other] == len(rows[other]):
        return False
    end = rows[other][at[other]]
    expected = Kind.RECV_F if part.kind is Kind.SEND_F else Kind.RECV_B
    source = chain_neighbour(end.kind, end.stage) if end.peer is None and end.kind.is_receive else end.peer
    if (end.kind, end.stage, source, end.microbatch) != (expected, peer, part.stage, part.microbatch):
        return False
    assert part.microbatch is not None
    key = ("F" if part.kind is Kind.SEND_F else "B", part.stage, part.microbatch)
    held[other][key] = held[rank][key]
    at[rank] += 1
    at[other] += 1
    return True


def _compute(graph: StageGraph, held: Values, part: Action, found: Values) -> None:
    """A missing input is a `KeyError`."""
    s, k = part.stage, part.microbatch
    if k is None or part.kind is Kind.W:
        return
    if part.kind is Kind.F:
        value = 1 + s + sum(held["F", u, k] for u in graph.inputs(s))
    else:
        value = sum(held["B", t, k] for t in graph.outputs(s)) if graph.outputs(s) else 1
    held["F" if part.kind is Kind.F else "B", s, k] = value
    found["F" if part.kind is Kind.F else "B", s, k] = value
