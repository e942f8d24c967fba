"""When a rank can be certain that a message of its own was received: then its bytes are free again.

gloo cannot be asked whether a send is done, only waited for. But a schedule says it: if rank 1 uses my
activation and sends me something later in its list, then its message in my hands proves that mine is in its
hands. What each rank knows of the others' lists is a vector with one place for each rank, which every message
carries along.

    rank 0   SEND a ---.              .--> uses g: a was received, release it
    rank 1              '--> uses a   SEND g
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints
from penstock.validation.communication import Messages

__all__ = ["Releases", "releases"]


class Releases(NamedTuple):
    """Sends of one rank, as places in its list: those certain to be received at a place, and the others."""

    at: dict[int, list[int]]
    """Per place: the sends that are certain once what this place waits for is there."""
    at_end: list[int]
    """Sends for which the schedule never tells."""


def releases(schedule: Schedule, rank: int) -> Releases:
    """For a right schedule with all its sends and receives."""
    table = schedule.table
    messages = Messages.of(table)
    there = messages.used
    sends, consumers = table.slot[messages.send[there]], table.slot[messages.consumer[there]]
    first = int(table.slot_bounds[rank])
    known = _known(schedule, sends, consumers, rank)
    places, rows = np.array(sorted(known), dtype=np.int64), [known[place] for place in sorted(known)]
    clocks = np.array(rows).reshape(len(rows), schedule.num_ranks)
    result = Releases({}, [])
    for send, consumer in sorted(zip(sends.tolist(), consumers.tolist())):
        if table.rank[send] != rank:
            continue
        # what a rank knows only grows, so the first place that knows can be searched for
        found = int(np.searchsorted(clocks[:, table.rank[consumer]], consumer, side="right")) if rows else 0
        if found < len(rows):
            result.at.setdefault(int(places[found]) - first, []).append(send - first)
        else:
            result.at_end.append(send - first)
    return result


def _known(schedule: Schedule, sends: Ints, consumers: Ints, rank: int) -> dict[int, Ints]:
    """Per slot of this rank that waits for a message: the last slot of every rank that is surely behind it."""
    table = schedule.table
    inputs = Inputs.of(schedule.num_steps, sends, consumers, np.zeros(len(sends), dtype=np.int64))
    ends = np.array(
        run_dataflow(table, inputs, [1] * schedule.num_steps, [0] * schedule.num_ranks).ends, dtype=np.float64
    )
    carried: dict[int, Ints] = {}
    sources: dict[int, list[int]] = {}
    for send, consumer in zip(sends.tolist(), consumers.tolist()):
        sources.setdefault(consumer, []).append(send)
    sending = set(sends.tolist())
    events = np.array(sorted(sending | set(sources)), dtype=np.int64)
    knows = np.full((schedule.num_ranks, schedule.num_ranks), -1, dtype=np.int64)
    found: dict[int, Ints] = {}
    for slot in events[np.argsort(ends[events], kind="stable")].tolist():
        here = int(table.rank[slot])
        for source in sources.get(slot, ()):
            np.maximum(knows[here], carried[source], out=knows[here])
        knows[here, here] = slot
        if slot in sending:
            carried[slot] = knows[here].copy()
        if here == rank and slot in sources:
            found[slot] = knows[here].copy()
    return found
