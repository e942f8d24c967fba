"""One clock for all steps of a run: offsets and drift of the ranks' clocks, from the messages of each step.

A clock that runs faster than another is ahead by more in every step. So the offsets of each step by itself are
fitted by a line over time; its slope is the drift, if it is certain. The times are freed of it, and the offsets
that are left are those of all messages together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints
from penstock.traces.clock_alignment import ClockAlignment, align_clocks
from penstock.traces.recorded import Recorded

__all__ = ["Rows", "align_steps", "drift_of", "sent_messages"]

Rows = list[list[Recorded]]
"""The actions of one step, per rank."""
_FEWEST = 6
"""Steps for a line: with fewer, noise looks like drift."""
_CERTAIN = 8.0
"""Standard errors that a slope must have."""
_LEAST = 1e-6
"""Seconds that a clock must drift by from the first step to the last."""


def align_steps(
    schedules: Sequence[Schedule], times: Sequence[Ints], steps: Sequence[Rows], hosts: Sequence[str]
) -> tuple[ClockAlignment, list[Ints]]:
    """The alignment, and the times of each step (start and end per slot, in nanoseconds) on rank 0's clock."""
    bounds = [_bounds(*each) for each in zip(schedules, times, steps)]
    single = [align_clocks(each, hosts) for each in bounds]
    offsets = np.array([each.offsets for each in single])
    offsets[np.isinf([each.uncertainty for each in single])] = np.nan
    starts = np.array([_starts(*each) for each in zip(schedules, times)])
    drift = drift_of(offsets, starts[:, 0] / 1e9)
    ranks = [schedule.table.rank for schedule in schedules]
    if drift.any():
        own = [drift[rank][:, None] * (each - starts[0][rank][:, None]) for rank, each in zip(ranks, times)]
        times = [each - np.round(late).astype(np.int64) for each, late in zip(times, own)]
        bounds = [_bounds(*each) for each in zip(schedules, times, steps)]
    found = replace(align_clocks(np.minimum.reduce(bounds), hosts), drift=tuple(drift.tolist()))
    ahead = np.round(np.array(found.offsets) * 1e9).astype(np.int64)
    return found, [each - ahead[rank][:, None] for rank, each in zip(ranks, times)]


def drift_of(offsets: Floats, at: Floats) -> Floats:
    """Per rank, in seconds per second: the slope of its offsets (a row per step; NaN if unknown), or 0."""
    found = np.zeros(offsets.shape[1])
    for rank in range(1, offsets.shape[1]):
        known = np.isfinite(offsets[:, rank])
        if known.sum() < _FEWEST:
            continue
        t, x = at[known] - at[known].mean(), offsets[known, rank] - offsets[known, rank].mean()
        slope = (t @ x) / (t @ t)
        error = np.sqrt(((x - slope * t) ** 2).sum() / (len(t) - 2) / (t @ t))
        if abs(slope) > _CERTAIN * error and abs(slope) * np.ptp(t) > _LEAST:
            found[rank] = slope
    return found


def sent_messages(schedule: Schedule, times: Ints) -> tuple[Ints, Ints, Ints]:
    """Messages with both ends: their numbers, when they were sent, and the slots that use them."""
    messages, slot = schedule.messages, schedule.table.slot
    number = np.flatnonzero(messages.consumed)
    send, producer = messages.send[number], messages.producer[number]
    sent = np.maximum(times[slot[producer], 1], np.where(send >= 0, times[slot[send], 0], 0))
    return number, sent, slot[messages.consumer[number]]


def _bounds(schedule: Schedule, times: Ints, rows: Rows) -> Floats:
    """The least time on the clocks from a send on one rank to its receive on another.

    The second part of an overlapped pair waits somewhere inside of it, so only its end is after the message.
    """
    bounds: Floats = np.full((len(rows), len(rows)), np.inf)
    number, sent, consumer = sent_messages(schedule, times)
    exact = np.array([each.exact and len(each.step.parts) == 1 for row in rows for each in row])[consumer]
    received = np.where(exact, times[consumer, 0], times[consumer, 1])
    ends = schedule.messages.source[number], schedule.messages.target[number]
    np.minimum.at(bounds, ends, (received - sent) / 1e9)
    return bounds


def _starts(schedule: Schedule, times: Ints) -> Ints:
    """Per rank: when its list begins, on its own clock."""
    starts: Ints = times[schedule.table.slot_bounds[:-1], 0]
    return starts
