"""The picture of timelines as marks; svg and png only draw it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import atan2, cos, pi, sin
from typing import NamedTuple

import numpy as np

from penstock.arguments import printable
from penstock.cost.prices import exposed_all_to_all
from penstock.cost.units import Scale, Units
from penstock.errors import PenstockError
from penstock.ir.encoding import Floats
from penstock.ir.kinds import Kind
from penstock.ir.messages import VALUES
from penstock.simulation.timeline import Timeline
from penstock.view.kinds import (
    HOST_TRACKS,
    KIND_STYLES,
    NUMBER,
    STAGES,
    cost_text,
    kinds_on,
    sizes_text,
    style_of,
    title_text,
)
from penstock.view.marks import (
    MEMORY,
    Area,
    Box,
    Group,
    Label,
    Line,
    Mark,
    Picture,
    Style,
    box_style,
    round_step,
    styles,
    text_on,
    text_width,
)


class Legend(NamedTuple):
    """What the legend explains."""

    kinds: list[Kind]
    stages_per_rank: int = 1
    pairs: bool = False
    memory: Sequence[str] = ()
    edges: bool = False
    """Whether the edges of a stage graph are drawn."""
    numbers: bool = False
    """Whether boxes have their microbatch."""
    all_to_all: bool = False
    """Whether any step has all-to-all that no compute hides."""


def legend(shown: Legend, left: int, width: int, top: int) -> tuple[Group, int]:
    """The entries in as many lines as they need, and the y where they end."""
    marks: list[Mark] = []
    x, y = float(left), top
    for boxes, meaning in _entries(shown):
        right = max((box.x + box.width for box in boxes), default=-5.0)
        entry_width = right + 5 + text_width(meaning, 10)
        if x > left and x + entry_width > left + width:
            x, y = float(left), y + 18
        marks += [box._replace(x=round(x + box.x, 2), y=y - 9 + box.y) for box in boxes]
        marks.append(Label("key", round(x + right + 5, 2), y, meaning))
        x += entry_width + 14
    return Group("legend", marks), y + 4


def _entries(shown: Legend) -> Iterator[tuple[list[Box], str]]:
    """Boxes relative to (0, 0), and their meaning."""
    kinds = [kind for kind in kinds_on("compute") if kind in shown.kinds]
    for kind in kinds:
        yield [Box(box_style(kind, 0), 0, 0, 16, 11)], f"{kind}: {KIND_STYLES[kind].meaning}"
    if shown.pairs:
        lower = Kind.B if Kind.B in kinds else Kind.I
        halves = [Box(box_style(kind, 0), 0, 5.5 * n, 16, 5.5) for n, kind in enumerate((Kind.F, lower))]
        yield halves, KIND_STYLES[Kind.OVERLAP_F_B].meaning
    if kinds and shown.stages_per_rank > 1:
        tints = [Box(box_style(kinds[0], n), 12 * n, 0, 12, 11) for n in range(shown.stages_per_rank)]
        yield tints, STAGES
    if shown.numbers:
        yield [], NUMBER
    yield from _marks(shown)


def _marks(shown: Legend) -> Iterator[tuple[list[Box], str]]:
    if shown.all_to_all:
        yield [Box("all-to-all", 0, 8, 16, 3)], "exposed all-to-all"
    for kind in kinds_on("collective", *HOST_TRACKS):
        if kind in shown.kinds:
            yield [Box(kind.value, 0, 4, 6, 4)], KIND_STYLES[kind].meaning
    if shown.edges:
        for value in VALUES:
            yield [Box(f"edge-{value}", 0, 5, 16, 1)], f"{value} of microbatch 0 between ranks"
    for part in shown.memory:
        yield [Box(part, 0, 0, 16, 11)], f"memory: {part}"


# sizes in pixels
MARGIN, LEFT = 14, 64
NARROWEST, WIDEST = 440, 2700  # the time axis
TITLE, ROW, TICKS, LINK, STRIP, GAP = 26, 22, 6, 4, 16, 8  # LINK: one direction of the host link


@dataclass(frozen=True)
class Scales:
    """The time axis and the memory scale of these timelines."""

    timelines: tuple[Timeline, ...]

    @cached_property
    def length(self) -> float:
        """Length of the time axis in seconds."""
        return max(timeline.makespan for timeline in self.timelines) or 1.0

    @cached_property
    def width(self) -> int:
        """Width of the time axis in pixels: most boxes have room for their number."""
        durations = np.concatenate([(t.end - t.start)[t.is_compute] for t in self.timelines])
        positive = durations[durations > 0]
        short = float(np.quantile(positive, 0.1)) if positive.size else self.length
        digits = max(len(str(t.schedule.microbatches - 1)) for t in self.timelines)
        wanted = self.length / short * (text_width("0" * digits, 10) + 6)
        return round(min(max(wanted, NARROWEST), WIDEST))

    def is_numbered(self, timeline: Timeline) -> bool:
        """Whether the widest number fits all steps that are not very short: all have numbers, or none has."""
        durations = (timeline.end - timeline.start)[timeline.is_compute]
        usual = durations[durations > durations.mean() / 4] if durations.size else durations
        widest = text_width("0" * len(str(timeline.schedule.microbatches - 1)), 10) + 1.5
        return bool(usual.size) and widest <= float(usual.min()) * self.width / self.length

    def x(self, seconds: Floats) -> list[float]:
        """The x of these times, to a hundredth of a pixel."""
        places: list[float] = np.round(LEFT + seconds * (self.width / self.length), 2).tolist()
        return places

    @cached_property
    def peak_memory(self) -> float:
        """The highest peak of any rank."""
        return max(max(timeline.peak_memory) for timeline in self.timelines)

    @cached_property
    def right(self) -> int:
        """Room for the labels to the right of the axis."""
        peaks = [f"peak {self.memory.text(peak, 4)}" for t in self.timelines for peak in t.peak_memory]
        return round(max(text_width(text, 10) for text in [*peaks, f"time, {self.time.name}"])) + 8 + MARGIN

    @cached_property
    def styles(self) -> dict[str, Style]:
        """Every style by name."""
        return styles(self.legend.stages_per_rank)

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kinds of actions in the timelines."""
        return [kind for kind in Kind if any(t.schedule.table.has(kind) for t in self.timelines)]

    @cached_property
    def legend(self) -> Legend:
        """What the legend explains."""
        hosted = [stages for t in self.timelines for stages in t.schedule.placement.stages_of_rank]
        pairs = any(t.schedule.table.has_pairs for t in self.timelines)
        memories = [memory for t in self.timelines for memory in t.memory]
        used = [part for part in MEMORY if any(np.any(getattr(memory, part)) for memory in memories)]
        edges = any(not t.schedule.graph.is_chain and t.messages for t in self.timelines)
        exposed = any(any(t.exposed_all_to_all) for t in self.timelines)
        numbers = any(map(self.is_numbered, self.timelines))
        return Legend(self.kinds, max(map(len, hosted)), pairs, used, edges, numbers, exposed)

    @cached_property
    def time(self) -> Scale:
        """The unit of the time axis."""
        return Units.common(timeline.costs.units for timeline in self.timelines).time_scale(self.length)

    @cached_property
    def memory(self) -> Scale:
        """The unit of the memory strips."""
        return Units.common(timeline.costs.units for timeline in self.timelines).memory_scale(self.peak_memory)

    @cached_property
    def row_height(self) -> int:
        """Height of a rank with its collectives, its host link and its memory strip."""
        link = (len(HOST_TRACKS) * LINK + 2) * any(style_of(kind).track in HOST_TRACKS for kind in self.kinds)
        return self.link_top + link + (STRIP + 2 if self.peak_memory else 0) + GAP

    @cached_property
    def link_top(self) -> int:
        """Where the host link of a rank begins, below its collectives."""
        return ROW + TICKS * any(style_of(kind).track == "collective" for kind in self.kinds)

    def panel_height(self, timeline: Timeline) -> int:
        """Height of a timeline with its title."""
        return TITLE + self.row_height * timeline.schedule.num_ranks + GAP

    @cached_property
    def ticks(self) -> list[float]:
        """Round times, in seconds, 50 to 125 pixels apart."""
        unit = self.time.size
        step = round_step(self.length / unit * 50 / self.width)
        return [n * step * unit for n in range(int(self.length / unit / step * (1 + 1e-9)) + 1)]


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
            towards, style = atan2(y - to_y, x - to_x), f"edge-{message.kind}"
            lines.append(Line(style, x, y, to_x, to_y))
            for angle in (towards - _HEAD_ANGLE, towards + _HEAD_ANGLE):
                tip = round(to_x + _HEAD * cos(angle), 2), round(to_y + _HEAD * sin(angle), 2)
                lines.append(Line(style, to_x, to_y, *tip))
    yield Group("edges, microbatch 0", sorted(lines, key=lambda line: line.style))


# The picture of timelines as marks: where each box, line, area and label is; svg and png only draw it.
#
# name                    makespan, bubble       one panel per timeline, all on one time axis
# rank 0  [0][1][2]   [ 0 ]   [ 1 ]              a box per step, an overlapped pair in two halves
#         | |            |                       collectives, and below them offloads and reloads
#         __/''''''\____/'''\___     peak 3      memory, at the same scale everywhere
# ...
#         0         10        20 ms
#         [ ] F forward  [ ] B backward


def picture(timelines: Sequence[Timeline]) -> Picture:
    """One panel per timeline, the time axis, the legend."""
    if not timelines:
        raise PenstockError("a picture needs at least one timeline (given none)")
    return assemble(timelines, Scales(tuple(timelines)), _panel)


def assemble(
    timelines: Sequence[Timeline],
    scales: Scales,
    panel: Callable[[Timeline, Scales, float], Iterable[Group]],
) -> Picture:
    """The panels below each other, the time axis, the legend."""
    groups: list[Group] = []
    top = float(MARGIN)
    for timeline in timelines:
        groups += panel(timeline, scales, top)
        top += scales.panel_height(timeline)
    places = scales.x(np.array(scales.ticks))
    axis: list[Mark] = [Line("axis", LEFT, top, LEFT + scales.width, top)]
    axis += [Line("axis", x, top, x, top + 4) for x in places]
    axis += [Label("tick", x, top + 16, scales.time.number(t, 10)) for x, t in zip(places, scales.ticks)]
    axis.append(Label("key", LEFT + scales.width + 8, top + 16, f"time, {scales.time.name}"))
    key, bottom = legend(scales.legend, LEFT, scales.width, round(top) + 40)
    width = LEFT + scales.width + scales.right
    drawn = [*groups, Group("time", axis), key]
    return Picture(title_text(timelines), width, bottom + MARGIN, scales.styles, drawn)


def _panel(timeline: Timeline, scales: Scales, top: float) -> Iterator[Group]:
    schedule = timeline.schedule
    rows = top + TITLE
    yield panel_head(timeline, scales, top, schedule.num_ranks)
    for rank in range(schedule.num_ranks):
        y = rows + rank * scales.row_height
        marks = chain(_memory(timeline, rank, scales, y), _steps(timeline, rank, scales, y))
        label = Label("rank", LEFT - 8, y + ROW / 2 + 4, f"rank {rank}")
        yield Group(f"rank {rank}", [label, *marks])
    yield from edge_arrows(timeline, scales, rows)


def panel_head(timeline: Timeline, scales: Scales, top: float, rows: int) -> Group:
    """The title of a panel and the lines at the ticks, over so many rows."""
    schedule, makespan = timeline.schedule, scales.time.text(timeline.makespan, 4)
    bottom = top + TITLE + scales.row_height * rows - GAP / 2
    lines = [Line("grid", x, top + TITLE - 4, x, bottom) for x in scales.x(np.array(scales.ticks))]
    sizes = f"{sizes_text(schedule)}{cost_text(timeline)}"
    facts = f"{sizes}  ·  makespan {makespan}  ·  bubble {timeline.bubble():.1%}"
    room = int((scales.width - text_width(facts, 11)) / text_width("m", 13))
    name = Label("name", LEFT, top + 14, printable(schedule.name, max(room, 8)))
    return Group(printable(schedule.name), [*lines, name, Label("facts", LEFT + scales.width, top + 14, facts)])


def _steps(timeline: Timeline, rank: int, scales: Scales, y: float) -> Iterator[Mark]:
    """The boxes with their numbers, and the marks of collectives, grouped by style."""
    table = timeline.schedule.table
    own = slice(*table.part_bounds[rank : rank + 2].tolist())
    slots = table.slot[own]
    begins, ends = scales.x(timeline.start[slots]), scales.x(timeline.end[slots])
    joined = (np.diff(slots, prepend=-1) == 0).tolist()
    nth = {stage: n for n, stage in enumerate(timeline.schedule.placement.stages_of_rank[rank])}
    boxes: list[Box] = []
    labels: list[Label] = []
    kinds, numbered = tuple(Kind), scales.is_numbered(timeline)
    parts = zip(*(column[own].tolist() for column in (table.kind, table.stage, table.microbatch)))
    for (number, stage, microbatch), x, end, second, first in zip(
        parts, begins, ends, joined, [*joined[1:], False]
    ):
        kind, width = kinds[number], round(end - x, 2)
        track = style_of(kind).track
        if track == "collective":
            beside = 2 if kind is Kind.REDUCE_GRAD and not width else 0  # left of a RESHARD at the same time
            boxes.append(Box(kind.value, x - beside, y + ROW + 1.5, max(width, 2), 4))
        elif track in HOST_TRACKS:
            top = y + scales.link_top + 1.5 + HOST_TRACKS.index(track) * LINK
            boxes.append(Box(kind.value, x, top, max(width, 2), LINK - 1))
        elif track == "compute":
            half = first or second  # the upper or the lower half of an overlapped pair
            style, height = box_style(kind, nth.get(stage, 0), narrow=width < 3), ROW / 2 if half else ROW
            box = Box(style, x, y + ROW / 2 * second, width, height)
            boxes.append(box)
            if numbered:
                labels += _number(box, f"{'+' * second}{microbatch}", scales, half=half)
    yield from sorted(boxes, key=lambda box: box.style)
    yield from _exposed(timeline, rank, scales, y)
    yield from sorted(labels, key=lambda label: label.style)


def _exposed(timeline: Timeline, rank: int, scales: Scales, y: float) -> Iterator[Box]:
    """The all-to-all of each step that no compute hides, as a strip at its end; it may run at any time."""
    own = slice(*timeline.schedule.table.slot_bounds[rank : rank + 2].tolist())
    start, end = timeline.start[own], timeline.end[own]
    exposed = exposed_all_to_all(timeline.schedule.table, timeline.costs)[own]
    begins, ends = scales.x(np.maximum(end - exposed, start)), scales.x(end)
    for n in np.flatnonzero(exposed).tolist():
        yield Box("all-to-all", begins[n], y + ROW - 3, round(ends[n] - begins[n], 2), 3)


def _number(box: Box, text: str, scales: Scales, *, half: bool) -> Iterator[Label]:
    """The microbatch in its box, if it fits; that of the second part of a pair has a plus."""
    style, size = ("half", 9) if half else ("number", 10)
    if text_width(text, size) + 1.5 <= box.width:
        x, y = box.x + box.width / 2, box.y + box.height / 2 + 0.36 * size
        yield Label(text_on(scales.styles[box.style], style), round(x, 2), round(y, 2), text)


def _memory(timeline: Timeline, rank: int, scales: Scales, y: float) -> Iterator[Mark]:
    """The memory of the rank over time as stacked areas, and its peak."""
    if not scales.peak_memory:
        return
    memory = timeline.memory[rank]
    last = np.append(memory.times[1:] != memory.times[:-1], values=True)[: len(memory.times)]
    xs = [float(LEFT), *scales.x(memory.times[last]), *scales.x(np.array([timeline.makespan]))]
    base = y + scales.row_height - GAP
    below = np.zeros(len(xs) - 1)
    for part in MEMORY:
        used = memory.fixed if part == "fixed" else np.insert(getattr(memory, part)[last], 0, 0.0)
        above = below + used
        if (above > below).any():
            lower = staircase(xs, base - below * STRIP / scales.peak_memory)
            yield Area(part, staircase(xs, base - above * STRIP / scales.peak_memory) + lower[::-1])
        below = above
    yield Line("axis", LEFT, base, xs[-1], base)
    yield Label("peak", LEFT + scales.width + 8, base - 3, f"peak {scales.memory.text(memory.peak, 4)}")
    if len(memory.times):
        (x,) = scales.x(memory.times[[memory.total.argmax()]])
        top = round(base - memory.peak * STRIP / scales.peak_memory, 2)
        yield Line("at-peak", x, base, x, top)


def staircase(xs: Sequence[float], heights: Floats) -> list[tuple[float, float]]:
    """From left to right, horizontal from each x to the next."""
    points: list[tuple[float, float]] = []
    level = None
    for x, to_x, y in zip(xs, xs[1:], np.round(heights, 2).tolist()):
        if y == level:
            points[-1] = (to_x, y)
        else:
            points += [(x, y), (to_x, y)]
        level = y
    return points


# The picture of timelines with too many steps to draw each: what ranks do over time, as shares.
#
# name                     makespan, bubble      one panel per timeline, all on one time axis
# ranks 0-3    ___/''''''''''''''\___            per column of time, the share of each kind of compute;
# ranks 4-7    __/''''''''''''''''\__  peak 3    what is left up to the top is idle


_COLUMN = 4  # pixels of the time axis that one share is computed over
_MAX_ROWS = 32


def summary(timelines: Sequence[Timeline]) -> Picture:
    """One panel per timeline, the time axis, the legend."""
    return assemble(timelines, SummaryScales(tuple(timelines)), _summary_panel)


class SummaryScales(Scales):
    """A time axis of fixed width, and rows without numbers and memory strips."""

    width = 720
    row_height = ROW + GAP

    def panel_height(self, timeline: Timeline) -> int:
        """Height of a timeline with its title."""
        return TITLE + self.row_height * len(_rows(timeline)) + GAP

    @cached_property
    def legend(self) -> Legend:
        """The kinds of compute only."""
        return Legend([kind for kind in self.kinds if kind in kinds_on("compute")])


def _rows(timeline: Timeline) -> list[range]:
    """The ranks of each row: one, or as many as are needed for a limited number of rows."""
    ranks = timeline.schedule.num_ranks
    each = -(-ranks // _MAX_ROWS)
    return [range(first, min(first + each, ranks)) for first in range(0, ranks, each)]


def _summary_panel(timeline: Timeline, scales: Scales, top: float) -> Iterator[Group]:
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
