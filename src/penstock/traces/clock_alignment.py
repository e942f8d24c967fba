"""One clock for all ranks: offsets between their clocks, from messages in both directions.

A message arrives after it was sent. So if clock b is ahead of clock a by x, and a message from a to b was sent
at A and received at B, then x <= B - A; a message from b to a bounds x from below. Bounds of different pairs
add up along paths, and the shortest paths are the tightest bounds. The middle between the two bounds of a rank
against rank 0 satisfies all of them together:

    x_j = (d(0, j) - d(j, 0)) / 2        x_j - x_i <= d(i, j), because d is a shortest distance

It is wrong by half of the distance between the bounds at most, and exact if messages take equally long both
ways. Ranks of one host have one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.ir.table import Floats

__all__ = ["ClockAlignment", "align_clocks"]

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
    distances = _closed(_with_hosts(bounds, hosts))
    if _contradict(distances):
        hosts = [""] * len(hosts)
        distances = _closed(bounds)
    residual = 0.0
    if _contradict(distances):
        residual = _least_relaxation(bounds)
        distances = _closed(bounds + residual)
    ahead, behind = distances[0], distances[:, 0]
    offsets = np.where(np.isinf(ahead) & np.isinf(behind), 0.0, _middle(ahead, behind))
    uncertainty = np.maximum(ahead + behind, 0.0) / 2
    shared = len(set(hosts)) == 1 and hosts[0] != ""
    return ClockAlignment(tuple(offsets.tolist()), tuple(uncertainty.tolist()), residual, shared)


def _middle(ahead: Floats, behind: Floats) -> Floats:
    """The middle between -behind and ahead; the finite one if the other is not."""
    low, high = np.where(np.isinf(behind), ahead, -behind), np.where(np.isinf(ahead), -behind, ahead)
    with np.errstate(invalid="ignore"):
        middle: Floats = (low + high) / 2
    return middle


def _with_hosts(bounds: Floats, hosts: Sequence[str]) -> Floats:
    """The bounds, and an offset of 0 between ranks of one host."""
    names = np.array(hosts)
    same = (names[:, None] == names[None, :]) & (names != "")[None, :]
    return np.where(same, np.minimum(bounds, 0.0), bounds)


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
