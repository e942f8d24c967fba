"""A measured timeline: times of all steps, the messages between them, and the costs they give."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.prices import message_seconds
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats
from penstock.simulation.calibration import calibrate
from penstock.simulation.timeline import Timeline

__all__ = ["measured_timeline"]


def measured_timeline(
    schedule: Schedule, seconds: Floats, links: Costs, period: float | None = None
) -> Timeline:
    """The timeline with these times, a row of start and end for each slot.

    `links` are the costs of messages as far as they are known; the timeline's costs are derived from it.
    """
    start, end = seconds[:, 0].copy(), seconds[:, 1].copy()
    transfers = _transfers(schedule, seconds, links)
    timeline = Timeline(schedule, links, start, end, *transfers, period=period)
    return replace(timeline, costs=calibrate([timeline], links))


def _transfers(schedule: Schedule, times: Floats, links: Costs) -> tuple[Floats | None, Floats | None]:
    """Per message: when it left, and when it arrived.

    It leaves when its SEND begins, or its producer ends where there is none. If its rank was idle by then, it
    arrives when its consumer starts; else after the latency, but before its use.
    """
    messages, slot = schedule.messages, schedule.table.slot
    used = np.flatnonzero(messages.consumed)
    if not used.size:
        return None, None
    has_send = messages.send[used] >= 0
    sent = slot[np.where(has_send, messages.send[used], messages.producer[used])]
    consumer = slot[messages.consumer[used]]
    use = times[consumer, 0]
    _, latency = message_seconds(messages, links)
    begin, arrival = np.full((2, len(messages.send)), np.nan)
    begin[used] = np.where(has_send, times[sent, 0], times[sent, 1])
    arrived = np.minimum(np.maximum(begin[used] + latency[used], times[sent, 1]), use)
    waited = _idle_since(schedule, times)[consumer] <= times[sent, 1]
    arrival[used] = np.maximum(np.where(waited, use, arrived), begin[used])
    return begin, arrival


def _idle_since(schedule: Schedule, times: Floats) -> Floats:
    """Per slot: when the last compute of the rank before it ended; 0 before the first."""
    table = schedule.table
    ends = np.where(table.is_compute_slot, times[:, 1], 0.0)
    found = np.zeros(len(ends))
    for first, last in pairwise(table.slot_bounds.tolist()):
        found[first + 1 : last] = np.maximum.accumulate(ends[first:last])[:-1]
    return found
