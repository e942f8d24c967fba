"""A timeline on a terminal: one row per rank, time from left to right.

    time    0              50             100
    rank 0  F0F1F2F3·······B0───F4B1───F5B2──···
    rank 1  ··F0F1F2····B0───F3B1───F4B2───F5B3─

A step starts with its name, followed by a line for its duration; a dot is idle time. What does not fit into the
width continues below, in further panels. Where that would be too many lines, each character is the kind that
takes most of its time: all steps of a picture have names, or none has. Colour adds no information.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import numpy as np
from rich.text import Text

from penstock.cost.units import Scale, number_text
from penstock.ir.encoding import Floats, Ints
from penstock.ir.kinds import Kind
from penstock.simulation.timeline import Timeline
from penstock.view.grid import cell_text, label_width, time_panel
from penstock.view.kinds import style_of
from penstock.view.marks import round_step

_MAX_LINES = 100
"""Lines of all panels together; beyond, steps have no names."""
_SHORT = 0.25
"""Steps shorter than this share of the median have their name only where it fits."""
_SHORTEST_NAME = 2
"""Letters of a name: its kind and its microbatch."""


def terminal(timeline: Timeline, width: int = 80) -> Text:
    """The picture, at most `width` characters wide where possible."""
    label = label_width(timeline.schedule)
    columns = max(width - label, 10)
    rows = _names_if_few(timeline, columns)
    scale = timeline.costs.units.time_scale(timeline.makespan)
    if rows is None:
        per_letter = timeline.makespan / columns
        ranks = range(timeline.schedule.num_ranks)
        cells = [_without_names(timeline, rank, per_letter, columns) for rank in ranks]
        note = f"\n\neach letter is {scale.text(per_letter, 3)}; every step: penstock show -o FILE.html"
        return _joined(label, scale, timeline, [(0, columns, cells)], columns).append(note, "dim")
    length = _length(timeline, _columns_needed(timeline, rows), columns)
    drawn = [_named(row, length / timeline.makespan if timeline.makespan else 0.0, length) for row in rows]
    ranges = _panels(drawn, length, columns)
    panels = [(first, last, [_part(row, first, last) for row in drawn]) for first, last in ranges]
    return _joined(label, scale, timeline, panels, length)


_Cell = tuple[str, str, int]
"""A character, its style, and its place in a name after the first letter, else 0."""
_Step = tuple[float, float, str, Kind]


def _names_if_few(timeline: Timeline, columns: int) -> list[list[_Step]] | None:
    """The steps of each rank; None if panels with their names would be too many lines.

    Of a long timeline that is known from the shortest possible names, without an object for each step.
    """
    ranks = timeline.schedule.num_ranks

    def are_too_many(needed: int) -> bool:
        return ceil(needed / columns) * (ranks + 2) > max(_MAX_LINES, ranks + 2)

    lengths = (timeline.end - timeline.start)[timeline.is_compute]
    if are_too_many(_columns_for(timeline, lengths, np.array(_SHORTEST_NAME))):
        return None
    rows = [_steps(timeline, rank) for rank in range(ranks)]
    return None if are_too_many(_columns_needed(timeline, rows)) else rows


def _steps(timeline: Timeline, rank: int) -> list[_Step]:
    first, last = timeline.schedule.table.slot_bounds[rank : rank + 2].tolist()
    with_stage = timeline.schedule.num_stages > timeline.schedule.num_ranks
    steps = zip(
        timeline.schedule.ranks[rank], timeline.start[first:last].tolist(), timeline.end[first:last].tolist()
    )
    space = " " * with_stage  # names that begin with a digit need one between them
    return [
        (start, end, cell_text(step, with_stage=with_stage) + space, step.kind)
        for (step, start, end), drawn in zip(steps, timeline.is_compute[first:last])
        if drawn
    ]


def _columns_needed(timeline: Timeline, rows: list[list[_Step]]) -> int:
    """The columns of the whole timeline in which all names fit their steps."""
    lengths = np.array([end - start for row in rows for start, end, _, _ in row])
    return _columns_for(timeline, lengths, np.array([len(name) for row in rows for _, _, name, _ in row]))


def _columns_for(timeline: Timeline, lengths: Floats, letters: Ints) -> int:
    """The columns of the whole timeline in which steps of these lengths have room for so many letters."""
    if not lengths.size or not timeline.makespan:
        return 0
    is_long = lengths > _SHORT * np.median(lengths)
    most = (letters / np.where(is_long, lengths, np.inf)).max(initial=0)
    return ceil(round(float(most) * timeline.makespan, 6))


def _length(timeline: Timeline, needed: int, columns: int) -> int:
    """The columns of the whole timeline: a panel, or a whole number for the step that all are multiples of."""
    drawn = timeline.is_compute
    times = np.concatenate((timeline.start[drawn], timeline.end[drawn]))
    lengths = (timeline.end - timeline.start)[drawn]
    if not (lengths > 0).any():
        return columns
    units = times / lengths[lengths > 0].min()
    steps = round(float(units.max()))
    if steps > _MAX_LINES * columns or not np.allclose(units, np.round(units), rtol=0, atol=1e-6):
        return max(needed, columns)
    return steps * max(ceil(needed / steps), columns // steps, 1)


def _named(row: list[_Step], scale: float, length: int) -> list[_Cell]:
    """One cell per column: the name of a step, then a line for its duration."""
    cells: list[_Cell] = [("·", "dim", 0)] * length
    at = 0
    for start, end, name, kind in row:
        begin = min(max(int(start * scale + 1e-6), at), length)
        to = min(max(int(end * scale + 1e-6), begin), length)
        room, text = to - begin, name.rstrip()
        shown = text if len(text) <= room else ""
        space = " " * (name.endswith(" ") and len(shown) < room)
        drawn = shown.ljust(room - len(space), "─") + space
        style = style_of(kind).terminal
        for place, letter in enumerate(drawn):
            cells[begin + place] = (letter, style if letter != " " else "", place if place < len(shown) else 0)
        at = to
    return cells


def _panels(rows: list[list[_Cell]], length: int, columns: int) -> Iterator[tuple[int, int]]:
    """The columns of each panel: equally many; where a name would be cut, the next panel begins before it."""
    first = 0
    while length - first > columns:
        rest = length - first
        even = first + ceil(rest / ceil(rest / columns))
        later, earlier = range(even, first + columns + 1), range(even - 1, even - columns // 4, -1)
        free = (at for at in (*later, *earlier) if not any(row[at][2] for row in rows))
        last = next(free, even)
        yield first, last
        first = last - max(row[last][2] for row in rows)
    yield first, length


def _part(row: list[_Cell], first: int, last: int) -> list[_Cell]:
    """The cells of a panel, with lines instead of names that begin or end in another panel."""
    cells = row[first:last]
    begins = next((n for n, (_, _, place) in enumerate(cells) if not place), len(cells))
    ends = row[last][2] if last < len(row) else 0
    whole = range(begins, len(cells) - ends)
    return [cell if n in whole else ("─", cell[1], 0) for n, cell in enumerate(cells)]


def _without_names(timeline: Timeline, rank: int, width: float, columns: int) -> list[_Cell]:
    """One cell per column; the kinds, and dots, are as frequent as the time that they take."""
    begin, stop = timeline.schedule.table.slot_bounds[rank : rank + 2].tolist()
    own = begin + np.flatnonzero(timeline.is_compute[begin:stop])
    start, end = timeline.start[own], timeline.end[own]
    numbers, index = np.unique(timeline.schedule.table.kind_of_slot[own], return_inverse=True)
    kinds = [tuple(Kind)[number] for number in numbers.tolist()]
    first, last = ((start / width).astype(np.int64), np.minimum((end / width).astype(np.int64), columns - 1))
    counts = np.maximum(last - first + 1, 0)
    step = np.repeat(np.arange(len(own)), counts)  # a step is in each column from its first to its last
    column = np.arange(len(step)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    edges = column * width
    inside = np.clip(np.minimum(end[step], edges + width) - np.maximum(start[step], edges), 0, None) / width
    spent = np.zeros((len(kinds) + 1, columns))  # the last row is idle time
    spent[:-1] = np.bincount(index[step] * columns + column, inside, len(kinds) * columns).reshape(-1, columns)
    spent[-1] = np.clip(1 - spent.sum(axis=0), 0, None)
    styles = [style_of(kind) for kind in kinds]
    names = [style.short or kind.value for kind, style in zip(kinds, styles)]
    letters = [(name if len(name) == 1 else "+", style.terminal, 0) for name, style in zip(names, styles)]
    letters.append(("·", "dim", 0))
    cells: list[_Cell] = []
    owed = np.zeros(len(kinds) + 1)
    for share in spent.T:
        owed += share
        most = int(np.where(share > 0, owed, -np.inf).argmax())
        owed[most] -= 1
        cells.append(letters[most])
    return cells


def _joined(
    label: int, scale: Scale, timeline: Timeline, panels: list[tuple[int, int, list[list[_Cell]]]], length: int
) -> Text:
    lines: list[Text] = []
    for first, last, rows in panels:
        ruler = _ruler(timeline.makespan, scale, length, range(first, last))
        letters = ([Text(letter, style) for letter, style, _ in row] for row in rows)
        lines += time_panel(label, ruler, letters, gap=first > 0)
    return Text("\n").join(lines)


def _ruler(makespan: float, scale: Scale, length: int, columns: range) -> str:
    """Round times, each at its column; the unit behind the last one, but for relative costs."""
    if not makespan:
        return "0"
    step = round_step(makespan / scale.size / length * 12)
    line = ""
    for n in range(ceil(columns.start / length * makespan / scale.size / step - 1e-9), length):
        column = round(n * step * scale.size / makespan * length)
        text = number_text(n * step, 6)
        if column + len(text) > columns.stop:
            break
        line = line.ljust(column - columns.start) + text
    unit = "" if scale.name == "units" else f" {scale.name}"
    return line + unit if len(line + unit) <= len(columns) else line
