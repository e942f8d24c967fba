"""Arrows of a picture along the edges of a stage graph that is not a chain, for the first microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from math import atan2, cos, pi, sin

from penstock.simulation.timeline import Timeline
from penstock.view.marks import Group, Line
from penstock.view.scales import ROW, Scales

__all__ = ["edge_arrows"]

_HEAD = 5.0
_HEAD_ANGLE = pi / 7


def edge_arrows(timeline: Timeline, scales: Scales, top: float) -> Iterator[Group]:
    """An arrow from each producer to each consumer on another rank; `top` is the y of the first rank's row."""
    if timeline.schedule.graph.is_chain:
        return
    rank = timeline.schedule.table.rank
    lines: list[Line] = []
    for message, slot in timeline.uses:
        if message.microbatch == 0:
            x, to_x = scales.x(timeline.end[[message.producer]])[0], scales.x(timeline.start[[slot]])[0]
            y, to_y = (top + int(rank[each]) * scales.row_height + ROW / 2 for each in (message.producer, slot))
            lines += _arrow(f"edge-{message.kind}", x, y, to_x, to_y)
    yield Group("edges, microbatch 0", sorted(lines, key=lambda line: line.style))


def _arrow(style: str, x: float, y: float, to_x: float, to_y: float) -> Iterator[Line]:
    yield Line(style, x, y, to_x, to_y)
    towards = atan2(y - to_y, x - to_x)
    for angle in (towards - _HEAD_ANGLE, towards + _HEAD_ANGLE):
        yield Line(style, to_x, to_y, round(to_x + _HEAD * cos(angle), 2), round(to_y + _HEAD * sin(angle), 2))
