"""The legend of a picture: a box and its meaning for each kind and each part of memory that is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.ir.action import Kind
from penstock.ir.messages import VALUES
from penstock.view.kinds import HOST_TRACKS, KIND_STYLES, kinds_on
from penstock.view.marks import Box, Group, Label, Mark, text_width
from penstock.view.palette import box_style

__all__ = ["NUMBER", "STAGES", "Legend", "legend"]

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
