"""The points in a rank's list at which a send is known to be received, so that its buffer can be released.

gloo has no way to test whether a send is complete, only to wait for it. But the schedule shows it: if rank 1
uses an activation of rank 0 and later sends a gradient to rank 0, then the gradient's arrival proves that the
activation was received. What each rank knows about the others is a vector clock that every message carries.

    rank 0   SEND a ---.              .--> uses g: a was received, release its buffer
    rank 1              '--> uses a   SEND g
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.ir.action import Kind
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints

__all__ = ["ReleasePoints", "release_points"]


class ReleasePoints(NamedTuple):
    """When the sends of one rank are known to be received; sends and points are positions in its list."""

    at: dict[int, list[int]]
    """Per position: the sends known to be received once the action there has its inputs."""
    at_end: list[int]
    """Sends that no later message proves to be received."""
    limits: dict[int, list[int]]
    """Per send: the earlier sends that it waits for before they are known to be received, if they are long."""


def release_points(schedule: Schedule, rank: int, most_pending: int | None = None) -> ReleasePoints:
    """The release points of a valid, lowered schedule.

    With `most_pending`, a send waits for the oldest one if so many of its channel are pending. Such a wait
    cannot deadlock only if the schedule is safe when every send blocks until it is received.
    """
    table = schedule.table
    messages = schedule.messages
    there = messages.used
    sends, consumers = table.slot[messages.send[there]], table.slot[messages.consumer[there]]
    first = int(table.slot_bounds[rank])
    known = _vector_clocks(schedule, sends, consumers, rank)
    positions = np.array(sorted(known), dtype=np.int64)
    clocks = np.array([known[slot] for slot in sorted(known)]).reshape(len(known), schedule.num_ranks)
    result = ReleasePoints({}, [], {})
    for send, consumer in sorted(zip(sends.tolist(), consumers.tolist())):
        if table.rank[send] != rank:
            continue
        # vector clocks only grow, so the first one that covers the consumer is found by bisection
        found = int(np.searchsorted(clocks[:, table.rank[consumer]], consumer, side="right")) if known else 0
        if found < len(known):
            result.at.setdefault(int(positions[found]) - first, []).append(send - first)
        else:
            result.at_end.append(send - first)
    if most_pending is None:
        return result
    return result._replace(limits=_limits(schedule, rank, result, most_pending))


def _limits(schedule: Schedule, rank: int, known: ReleasePoints, most_pending: int) -> dict[int, list[int]]:
    """Per send: the oldest one of the same channel, if there are this many of it that may be pending."""
    steps = schedule.ranks[rank]
    release_at = {send: position for position, sends in known.at.items() for send in sends}
    pending: dict[tuple[Kind, int, int], list[int]] = {}
    limits: dict[int, list[int]] = {}
    for send in sorted([*release_at, *known.at_end]):
        (action,) = steps[send].parts
        queue = pending.setdefault((action.kind, action.stage, action.other_end), [])
        queue[:] = [earlier for earlier in queue if release_at.get(earlier, send) >= send]
        if len(queue) == most_pending:
            limits[send] = [queue.pop(0)]
        queue.append(send)
    return limits


def _vector_clocks(schedule: Schedule, sends: Ints, consumers: Ints, rank: int) -> dict[int, Ints]:
    """Per slot of this rank that waits for a message: the last slot of every rank known to be finished."""
    table = schedule.table
    inputs = Inputs.of(schedule.num_steps, sends, consumers, np.zeros(len(sends), dtype=np.int64))
    ends = run_dataflow(table, inputs, [1] * schedule.num_steps, [0] * schedule.num_ranks).ends
    carried: dict[int, Ints] = {}
    sources: dict[int, list[int]] = {}
    for send, consumer in zip(sends.tolist(), consumers.tolist()):
        sources.setdefault(consumer, []).append(send)
    sending = set(sends.tolist())
    events = np.array(sorted(sending | set(sources)), dtype=np.int64)
    clocks = np.full((schedule.num_ranks, schedule.num_ranks), -1, dtype=np.int64)
    found: dict[int, Ints] = {}
    for slot in events[np.argsort(ends[events], kind="stable")].tolist():
        here = int(table.rank[slot])
        for source in sources.get(slot, ()):
            np.maximum(clocks[here], carried[source], out=clocks[here])
        clocks[here, here] = slot
        if slot in sending:
            carried[slot] = clocks[here].copy()
        if here == rank and slot in sources:
            found[slot] = clocks[here].copy()
    return found
