r"""The picture of timelines with too many steps to draw each: what ranks do over time, as shares.

name                     makespan, bubble      one panel per timeline, all on one time axis
ranks 0-3    ___/''''''''''''''\___            per column of time, the share of each kind of compute;
ranks 4-7    __/''''''''''''''''\__  peak 3    what is left up to the top is idle
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from penstock.ir.kinds import Kind
from penstock.ir.table import Floats
from penstock.simulation.timeline import Timeline
from penstock.view.kinds import kinds_on
from penstock.view.legend import Legend
from penstock.view.marks import Area, Group, Label, Mark, Picture
from penstock.view.palette import box_style
from penstock.view.picture import assemble, panel_head, staircase
from penstock.view.scales import GAP, LEFT, ROW, TITLE, Scales

__all__ = ["summary"]

_WIDTH, _COLUMN = 720, 4  # pixels: the time axis, and what one share is computed over
_MAX_ROWS = 32


def summary(timelines: Sequence[Timeline]) -> Picture:
    """One panel per timeline, the time axis, the legend."""
    return assemble(timelines, SummaryScales(tuple(timelines)), _panel)


class SummaryScales(Scales):
    """A time axis of fixed width, and rows without numbers and memory strips."""

    @cached_property
    def width(self) -> int:
        """Width of the time axis in pixels."""
        return _WIDTH

    @cached_property
    def row_height(self) -> int:
        """Height of a row."""
        return ROW + GAP

    def panel_height(self, timeline: Timeline) -> int:
        """Height of a timeline with its title."""
        return TITLE + self.row_height * len(_rows(timeline)) + GAP

    @cached_property
    def legend(self) -> Legend:
        """The kinds of compute only."""
        return Legend([kind for kind in self.kinds if kind in kinds_on("compute")], 1, pairs=False, memory=[])


def _rows(timeline: Timeline) -> list[range]:
    """The ranks of each row: one, or as many as are needed for a limited number of rows."""
    ranks = timeline.schedule.num_ranks
    each = -(-ranks // _MAX_ROWS)
    return [range(first, min(first + each, ranks)) for first in range(0, ranks, each)]


def _panel(timeline: Timeline, scales: Scales, top: float) -> Iterator[Group]:
    rows = _rows(timeline)
    yield panel_head(timeline, scales, top, len(rows))
    for number, ranks in enumerate(rows):
        name = f"rank {ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        y = top + TITLE + number * scales.row_height
        peak = scales.memory.text(max(timeline.peak_memory[rank] for rank in ranks), 4)
        labels: list[Mark] = [Label("rank", LEFT - 8, y + ROW / 2 + 4, name)]
        if scales.peak_memory:
            labels.append(Label("peak", LEFT + scales.width + 8, y + ROW / 2 + 4, f"peak {peak}"))
        yield Group(name, [*labels, *_areas(timeline, ranks, scales, y)])


def _areas(timeline: Timeline, ranks: range, scales: Scales, y: float) -> Iterator[Area]:
    """The kinds of compute, stacked, in the order of the legend."""
    columns = scales.width // _COLUMN
    edges = np.linspace(0, scales.length, columns + 1, dtype=np.float64)
    xs = scales.x(edges)
    below = np.zeros(columns)
    for kind in (kind for kind in kinds_on("compute") if kind in scales.kinds):
        seconds = sum((np.diff(_busy_until(timeline, rank, kind, edges)) for rank in ranks), np.zeros(columns))
        above = below + seconds / len(ranks) / (edges[1] - edges[0])
        if (above > below).any():
            lower = staircase(xs, y + ROW * (1 - below))
            yield Area(box_style(kind, 0, narrow=True), staircase(xs, y + ROW * (1 - above)) + lower[::-1])
        below = above


def _busy_until(timeline: Timeline, rank: int, kind: Kind, times: Floats) -> Floats:
    """Seconds that a rank spends on a kind until each of these times; a pair is half of each of its kinds."""
    table = timeline.schedule.table
    own = slice(*table.part_bounds[rank : rank + 2].tolist())
    chosen = table.kind[own] == kind.number
    slots, parts = np.unique(table.slot[own], return_counts=True)
    share = 1 / parts[np.searchsorted(slots, table.slot[own][chosen])]
    start, end = timeline.start[table.slot[own][chosen]], timeline.end[table.slot[own][chosen]]
    if not start.size:
        return np.zeros_like(times)
    done = np.cumsum(share * (end - start))
    breaks = np.column_stack((start, end)).ravel()
    totals = np.column_stack((np.concatenate(([0.0], done[:-1])), done)).ravel()
    return np.asarray(np.interp(times, breaks, totals))
