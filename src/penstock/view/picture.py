r"""Where everything goes in a picture of timelines; svg and png only draw what is listed here.

name                    makespan, bubble       one panel per timeline, all on one axis of time
rank 0  [0][1][2]   [ 0 ]   [ 1 ]              a box per step, an overlapped pair in two halves
        | |            |                       collectives
        __/''''''\____/'''\___     peak 3      memory, at the same scale everywhere
...
        0         10        20 ms
        [ ] F forward  [ ] B backward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import floor, log10

import numpy as np

from penstock.arguments import printable
from penstock.cost.costs import Costs, size_text
from penstock.errors import PenstockError
from penstock.ir.action import Kind
from penstock.ir.table import Floats
from penstock.simulation.timeline import Timeline
from penstock.view.palette import (
    COLLECTIVES,
    KINDS,
    MEMORY,
    Area,
    Box,
    Group,
    Label,
    Legend,
    Line,
    Mark,
    Picture,
    Style,
    box_style,
    legend,
    letters_on,
    styles,
    text_width,
)

__all__ = ["picture"]

# sizes in pixels
MARGIN, LEFT = 14, 64
NARROWEST, WIDEST = 440, 2200  # the axis of time
TITLE, ROW, TICKS, STRIP, GAP = 26, 22, 6, 16, 8
_KINDS = tuple(Kind)


def picture(timelines: Sequence[Timeline]) -> Picture:
    """One panel per timeline, the axis of time, the legend."""
    if not timelines:
        raise PenstockError("a picture needs at least one timeline (given none)")
    frame = _Frame(tuple(timelines))
    groups: list[Group] = []
    top = float(MARGIN)
    for timeline in timelines:
        groups += _panel(timeline, frame, top)
        top += frame.panel_height(timeline)
    groups.append(_axis(frame, top))
    key, bottom = legend(frame.shown, LEFT, frame.width, round(top) + 40)
    title = ", ".join(printable(timeline.schedule.name) for timeline in timelines)
    return Picture(title, LEFT + frame.width + frame.right, bottom + MARGIN, frame.styles, [*groups, key])


@dataclass(frozen=True)
class _Frame:
    """What all panels share: the axis of time and the scale of memory."""

    timelines: tuple[Timeline, ...]

    @cached_property
    def length(self) -> float:
        """Seconds along the axis."""
        return max(timeline.makespan for timeline in self.timelines) or 1.0

    @cached_property
    def width(self) -> int:
        """Wide enough for most boxes to have room for their number."""
        lasts = np.concatenate([(t.end - t.start)[t.is_compute] for t in self.timelines])
        short = float(np.quantile(lasts[lasts > 0], 0.1)) if (lasts > 0).any() else self.length
        digits = max(len(str(t.schedule.microbatches - 1)) for t in self.timelines)
        wanted = self.length / short * (text_width("0" * digits, 10) + 6)
        return round(min(max(wanted, NARROWEST), WIDEST))

    def x(self, seconds: Floats) -> list[float]:
        """Where these times are, to a hundredth of a pixel."""
        places: list[float] = np.round(LEFT + seconds * (self.width / self.length), 2).tolist()
        return places

    @cached_property
    def most_memory(self) -> float:
        """The highest peak of any rank."""
        return max(max(timeline.peak_memory) for timeline in self.timelines)

    @cached_property
    def right(self) -> int:
        """Room for what stands to the right of the axis."""
        peaks = [_bytes(peak, t.costs) for t in self.timelines for peak in t.peak_memory]
        return round(max(text_width(f"peak {peak}", 10) for peak in [*peaks, "1.2 us"])) + 8 + MARGIN

    @cached_property
    def styles(self) -> dict[str, Style]:
        return styles(self.shown.stages_per_rank)

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kinds of steps there are."""
        return [kind for kind in Kind if any(t.schedule.table.has(kind) for t in self.timelines)]

    @cached_property
    def shown(self) -> Legend:
        """What there is to explain."""
        rows = [own for t in self.timelines for own in t.schedule.placement.stages_of_rank]
        pairs = any(len(t.schedule.table.slot) > t.schedule.num_steps for t in self.timelines)
        memories = [memory for t in self.timelines for memory in t.memory]
        held = [part for part in MEMORY if any(np.any(getattr(memory, part)) for memory in memories)]
        return Legend(self.kinds, max(map(len, rows)), pairs, held)

    @cached_property
    def unit(self) -> tuple[float, str]:
        """How many seconds the unit of the axis has, and its name; none in the unit world of `Costs()`."""
        names = ("forward", "backward_input", "backward_weight")
        if all(getattr(t.costs, name) == 1 for t in self.timelines for name in names):
            return 1, ""
        return next(((u, name) for u, name in ((1, "s"), (1e-3, "ms")) if self.length >= u), (1e-6, "us"))

    @cached_property
    def row_height(self) -> int:
        """Of a rank with all that stands below it."""
        ticks = any(kind in COLLECTIVES for kind in self.kinds)
        return ROW + TICKS * ticks + (STRIP + 2 if self.most_memory else 0) + GAP

    def panel_height(self, timeline: Timeline) -> int:
        """Of a timeline with its title."""
        return TITLE + self.row_height * timeline.schedule.num_ranks + GAP


def _panel(timeline: Timeline, frame: _Frame, top: float) -> Iterator[Group]:
    schedule, (unit, name) = timeline.schedule, frame.unit
    facts = (
        f"{schedule.num_ranks} ranks, {schedule.microbatches} microbatches  ·  "
        f"makespan {_short(timeline.makespan / unit)} {name}".rstrip()
        + f"  ·  bubble {timeline.bubble():.1%}"
    )
    room = int((frame.width - text_width(facts, 11)) / text_width("m", 13))
    right = LEFT + frame.width
    title: list[Mark] = [
        Label("name", LEFT, top + 14, printable(schedule.name, max(room, 8))),
        Label("facts", right, top + 14, facts),
    ]
    rows = top + TITLE
    bottom = rows + frame.row_height * schedule.num_ranks - GAP / 2
    lines = [Line("grid", x, rows - 4, x, bottom) for x in frame.x(np.array(_ticks(frame)))]
    yield Group(printable(schedule.name), [*lines, *title])
    for rank in range(schedule.num_ranks):
        y = rows + rank * frame.row_height
        marks = chain(_memory(timeline, rank, frame, y), _steps(timeline, rank, frame, y))
        label = Label("rank", LEFT - 8, y + ROW / 2 + 4, f"rank {rank}")
        yield Group(f"rank {rank}", [label, *marks])


def _steps(timeline: Timeline, rank: int, frame: _Frame, y: float) -> Iterator[Mark]:
    """The boxes, the numbers in them and the marks of collectives, those of one style side by side."""
    columns = timeline.schedule.table
    own = slice(*columns.part_bounds[rank : rank + 2].tolist())
    slots = columns.slot[own]
    begins, ends = frame.x(timeline.start[slots]), frame.x(timeline.end[slots])
    joined = (np.diff(slots, prepend=-1) == 0).tolist()
    nth = {stage: n for n, stage in enumerate(timeline.schedule.placement.stages_of_rank[rank])}
    boxes: list[Box] = []
    labels: list[Label] = []
    parts = zip(*(column[own].tolist() for column in (columns.kind, columns.stage, columns.microbatch)))
    for (number, stage, microbatch), x, end, lower, upper in zip(
        parts, begins, ends, joined, [*joined[1:], False]
    ):
        kind, width = _KINDS[number], round(end - x, 2)
        if kind in COLLECTIVES:
            before = 2 if kind is Kind.REDUCE_GRAD and not width else 0  # beside RESHARD
            boxes.append(Box(kind.value, x - before, y + ROW + 1.5, max(width, 2), 4))
        elif kind in KINDS:
            half = lower or upper
            height, box_y = (ROW / 2, y + ROW / 2 * lower) if half else (ROW, y)
            style = box_style(kind, nth.get(stage, 0), narrow=width < 3)
            boxes.append(Box(style, x, box_y, width, height))
            letters, size = ("half", 9) if half else ("number", 10)
            if text_width(str(microbatch), size) + 1.5 <= width:
                letters = letters_on(frame.styles[style], letters)
                place = box_y + height / 2 + 0.36 * size
                labels.append(Label(letters, round(x + width / 2, 2), round(place, 2), str(microbatch)))
    yield from sorted(boxes, key=lambda box: box.style)
    yield from sorted(labels, key=lambda label: label.style)


def _memory(timeline: Timeline, rank: int, frame: _Frame, y: float) -> Iterator[Mark]:
    """What the rank holds, layer on layer, and where it holds the most."""
    if not frame.most_memory:
        return
    memory = timeline.memory[rank]
    last = np.append(memory.times[1:] != memory.times[:-1], values=True)[: len(memory.times)]
    xs = [float(LEFT), *frame.x(memory.times[last]), *frame.x(np.array([timeline.makespan]))]
    base = y + frame.row_height - GAP
    floor_of = np.zeros(len(xs) - 1)
    for part in MEMORY:
        held = memory.fixed if part == "fixed" else getattr(memory, part)[last]
        top_of = floor_of + (held if part == "fixed" else np.insert(held, 0, 0.0))
        if (top_of > floor_of).any():
            lower = _stairs(xs, base - floor_of * STRIP / frame.most_memory)
            yield Area(part, _stairs(xs, base - top_of * STRIP / frame.most_memory) + lower[::-1])
        floor_of = top_of
    yield Line("axis", LEFT, base, xs[-1], base)
    yield Label("peak", LEFT + frame.width + 8, base - 3, f"peak {_bytes(memory.peak, timeline.costs)}")
    if len(memory.times):
        (x,) = frame.x(memory.times[[memory.total.argmax()]])
        top = round(base - memory.peak * STRIP / frame.most_memory, 2)
        yield Line("at-peak", x, base, x, top)


def _stairs(xs: Sequence[float], heights: Floats) -> list[tuple[float, float]]:
    """From left to right, level from each x to the next."""
    points: list[tuple[float, float]] = []
    level = None
    for x, to_x, y in zip(xs, xs[1:], np.round(heights, 2).tolist()):
        if y == level:
            points[-1] = (to_x, y)
        else:
            points += [(x, y), (to_x, y)]
        level = y
    return points


# --- scales ----------------------------------------------------------------------------------------


def _ticks(frame: _Frame) -> list[float]:
    """Round times, in seconds, 50 to 125 pixels apart."""
    unit, _ = frame.unit
    least = frame.length / unit * 50 / frame.width
    power = 10.0 ** floor(log10(least))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= least)
    return [n * step * unit for n in range(int(frame.length / unit / step * (1 + 1e-9)) + 1)]


def _axis(frame: _Frame, y: float) -> Group:
    unit, name = frame.unit
    ticks = _ticks(frame)
    places = frame.x(np.array(ticks))
    marks: list[Mark] = [Line("axis", LEFT, y, LEFT + frame.width, y)]
    marks += [Line("axis", x, y, x, y + 4) for x in places]
    marks += [Label("tick", x, y + 16, f"{time / unit:.10g}") for x, time in zip(places, ticks)]
    marks.append(Label("key", LEFT + frame.width + 8, y + 16, f"time ({name})" if name else "time"))
    return Group("time", marks)


def _short(number: float) -> str:
    """Four digits, or all before the point."""
    return f"{number:.4g}" if number < 9999.5 else f"{number:.0f}"


def _bytes(count: float, costs: Costs) -> str:
    """Bytes; a bare number where an activation is one byte and nothing else is held."""
    return _short(count) if costs.activation == 1 else size_text(count)
