"""A timeline on a terminal: one row per rank, the makespan scaled to the width.

    time    0              50             100
    rank 0  F0F1F2F3·······B0───F4B1───F5B2──···
    rank 1  ··F0F1F2····B0───F3B1───F4B2───F5B3─

A step starts with its name, or its kind where the name does not fit, followed by a line for its duration; a dot
is idle time. Steps shorter than a character share one. Colour adds no information.
"""

from __future__ import annotations

from itertools import pairwise

from rich.text import Text

from penstock.simulation.timeline import Timeline
from penstock.view.grid import cell_text
from penstock.view.kinds import style_of

__all__ = ["terminal"]


def terminal(timeline: Timeline, width: int = 80) -> Text:
    """The picture, `width` characters wide."""
    schedule = timeline.schedule
    label = max(len(f"rank {schedule.num_ranks - 1}"), len("time")) + 2
    columns = max(width - label, 10)
    lines = [Text("time".ljust(label) + _ruler(timeline.makespan, columns), style="dim")]
    bounds = schedule.table.slot_bounds.tolist()
    for rank, (first, last) in enumerate(pairwise(bounds)):
        line = Text(f"rank {rank}".ljust(label))
        for text, style in _row(timeline, rank, first, last, columns):
            line.append(text, style=style)
        line.rstrip()
        lines.append(line)
    return Text("\n").join(lines)


def _row(timeline: Timeline, rank: int, first: int, last: int, columns: int) -> list[tuple[str, str]]:
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    with_stage = timeline.schedule.num_stages > timeline.schedule.num_ranks
    pieces: list[tuple[str, str]] = []
    at = 0
    for slot in range(first, last):
        if not timeline.is_compute[slot]:
            continue
        begin = min(max(round(float(timeline.start[slot]) * scale), at), columns)
        end = min(max(round(float(timeline.end[slot]) * scale), begin), columns)
        if begin > at:
            pieces.append(("·" * (begin - at), "dim"))
        step = timeline.schedule.ranks[rank][slot - first]
        room = end - begin
        names = [cell_text(step, with_stage=with_stage), cell_text(step, with_stage=False)]
        names.append("".join(style_of(part.kind).short or part.kind.value for part in step.parts)[:room])
        short = next(name for name in names if len(name) <= room)
        pieces.append((short.ljust(room, "─"), style_of(step.kind).terminal))
        at = end
    return [*pieces, ("·" * (columns - at), "dim")]


def _ruler(makespan: float, columns: int) -> str:
    line = ""
    for tick in range(0, columns, 15):
        line = line.ljust(tick) + f"{makespan * tick / columns:.4g}"
    return line[:columns]
