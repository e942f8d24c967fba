"""What all panels of a picture share: the time axis, the memory scale, the heights of rows, the legend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import floor, log10
from typing import NamedTuple

import numpy as np

from penstock.cost.units import Scale, Units
from penstock.ir.encoding import Floats
from penstock.ir.kinds import Kind
from penstock.ir.messages import VALUES
from penstock.simulation.timeline import Timeline
from penstock.view.kinds import HOST_TRACKS, KIND_STYLES, kinds_on, style_of
from penstock.view.marks import MEMORY, Box, Group, Label, Mark, Style, box_style, styles, text_width

# The legend of a picture: a box and its meaning for each kind and each part of memory that is drawn.


STAGES = "first to last stage of a rank"
"""What the shades of a colour are."""
NUMBER = "number in a box: microbatch"


class Legend(NamedTuple):
    """What the legend explains."""

    kinds: list[Kind]
    stages_per_rank: int
    pairs: bool
    memory: list[str]
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
    """What is drawn besides the boxes of steps."""
    if shown.all_to_all:
        yield [Box("all-to-all", 0, 8, 16, 3)], "exposed all-to-all"
    for kind in (kind for track in ("collective", *HOST_TRACKS) for kind in kinds_on(track)):
        if kind in shown.kinds:
            yield [Box(kind.value, 0, 4, 6, 4)], KIND_STYLES[kind].meaning
    if shown.edges:
        for value in VALUES:
            yield [Box(f"edge-{value}", 0, 5, 16, 1)], f"{value} of microbatch 0 between ranks"
    for part in shown.memory:
        yield [Box(part, 0, 0, 16, 11)], f"memory: {part}"


# What all panels of a picture share: the time axis, the memory scale, the heights of rows, the styles.


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
    def _units(self) -> Units:
        return Units.common(timeline.costs.units for timeline in self.timelines)

    @cached_property
    def time(self) -> Scale:
        """The unit of the time axis."""
        return self._units.time_scale(self.length)

    @cached_property
    def memory(self) -> Scale:
        """The unit of the memory strips."""
        return self._units.memory_scale(self.peak_memory)

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


def round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least this."""
    power = 10.0 ** floor(log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least)
