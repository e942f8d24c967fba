"""One clock for all ranks and steps of a run: offsets and drift, from messages in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.ir.encoding import Floats, Ints
from penstock.ir.schedule import Schedule
from penstock.traces.read.rank_trace import Recorded

# A message arrives after it was sent. So if clock b is ahead of clock a by x, and a message from a to b was
# sent at A and received at B, then x <= B - A; a message from b to a bounds x from below. Bounds of different
# pairs add up along paths, and the shortest paths are the tightest bounds. The middle between the two bounds
# of a rank against rank 0 satisfies all of them together:
#
#     x_j = (d(0, j) - d(j, 0)) / 2        x_j - x_i <= d(i, j), because d is a shortest distance
#
# It is wrong by half of the distance between the bounds at most, and exact if messages take equally long both
# ways. Ranks of one host have one clock.


_HALVINGS = 60
_ROUNDING = 1e-9
"""Seconds: traces have nanoseconds."""


@dataclass(frozen=True)
class ClockAlignment:
    """Per rank, in seconds: how far its clock is ahead of rank 0's."""

    offsets: tuple[float, ...]
    uncertainty: tuple[float, ...]
    """Per rank: the largest error of its offset; infinite if no messages go both ways."""
    residual: float
    """By how much some message arrives before it was sent even so; 0 if all are in order."""
    shared_clock: bool = False
    """Whether all ranks are on one host, so that there is nothing to align."""
    drift: tuple[float, ...] = ()
    """Per rank, in seconds per second: how much faster its clock runs than rank 0's, where that is certain.

    The offsets are then those of the first step.
    """


def align_clocks(bounds: Floats, hosts: Sequence[str]) -> ClockAlignment:
    """Offsets from `bounds[a, b]`: the least time on the clocks from a send on a to its receive on b.

    Infinite where there is no message. Ranks with the same host name have one clock, unless that contradicts
    the messages.
    """
    names = np.array(hosts)
    one_clock = (names[:, None] == names[None, :]) & (names != "")[None, :]
    distances = _closed(np.where(one_clock, np.minimum(bounds, 0.0), bounds))
    if _contradict(distances):
        hosts = [""] * len(hosts)
        distances = _closed(bounds)
    residual = 0.0
    if _contradict(distances):
        residual = _least_relaxation(bounds)
        distances = _closed(bounds + residual)
    ahead, behind = distances[0], distances[:, 0]
    limits = np.stack([ahead, -behind])
    known = np.isfinite(limits)
    offsets = np.where(known, limits, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)  # their middle
    uncertainty = np.maximum(ahead + behind, 0.0) / 2
    shared = len(set(hosts)) == 1 and hosts[0] != ""
    return ClockAlignment(tuple(offsets.tolist()), tuple(uncertainty.tolist()), residual, shared)


def _closed(bounds: Floats) -> Floats:
    """The shortest distance from each rank to each other; negative on the diagonal if there is none."""
    distances = bounds.copy()
    np.fill_diagonal(distances, np.minimum(np.diagonal(distances), 0.0))
    for via in range(len(distances)):
        distances = np.minimum(distances, distances[:, via, None] + distances[None, via, :])
    return distances


def _contradict(distances: Floats) -> bool:
    return bool((np.diagonal(distances) < -_ROUNDING).any())


def _least_relaxation(bounds: Floats) -> float:
    """The fewest seconds that all bounds must be raised by so that offsets exist."""
    low, high = 0.0, float(-bounds[np.isfinite(bounds)].min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        feasible = not _contradict(_closed(bounds + middle))
        low, high = (low, middle) if feasible else (middle, high)
    return high


# A clock that runs faster than another is ahead by more in every step. So the offsets of each step by itself
# are fitted by a line over time; its slope is the drift, if it is certain. The times are freed of it, and the
# offsets that are left are those of all messages together.


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
    starts = np.array([each[schedule.table.slot_bounds[:-1], 0] for schedule, each in zip(schedules, times)])
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
    exact = np.array([each.exact and len(each.action.parts) == 1 for row in rows for each in row])[consumer]
    received = np.where(exact, times[consumer, 0], times[consumer, 1])
    ends = schedule.messages.source[number], schedule.messages.target[number]
    np.minimum.at(bounds, ends, (received - sent) / 1e9)
    return bounds
