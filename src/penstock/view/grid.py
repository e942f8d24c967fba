"""A schedule as a grid of characters: over time for compute schedules, step by step for lowered ones.

    time    0           5
    rank 0  F0 F1 ·  ·  ·  B0─── B1───        one row per rank, time from left to right, B two units long
    rank 1  ·  F0 B0─── F1 B1───

    step  rank 0    rank 1                    one column per rank, steps from top to bottom
       0  0UNSHARD  1UNSHARD
       1  0F0       1RECV_F0

What does not fit into the width continues below, in further panels. Colour adds no information.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import numpy as np
from rich.text import Text

from penstock.ir.action import Step
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.view.kinds import style_of


def grid(schedule: Schedule, width: int = 80, marked: Mapping[int, int] | None = None) -> Text:
    """The grid, at most `width` characters wide where possible.

    `marked` has a step number for some ranks; over time, the name of that step is in brackets.
    """
    times = unit_time(schedule) if schedule.level == "compute" and schedule.num_steps else None
    lines = _by_step(schedule, width) if times is None else _over_time(schedule, width, marked or {}, *times)
    return Text("\n").join(lines)


def unit_time(schedule: Schedule) -> tuple[list[int], list[int]] | None:
    """Start and end of each slot at unit costs and free communication; None if the ranks deadlock."""
    table = schedule.table
    units = np.array([style_of(kind).units if table.has(kind) else 0 for kind in Kind])
    per_slot = np.bincount(table.slot, weights=units[table.kind], minlength=schedule.num_steps)
    durations = per_slot.astype(np.int64).tolist()
    producer, consumer = table.crossings
    inputs = Inputs.of(schedule.num_steps, producer, consumer, np.zeros_like(producer))
    done = run_dataflow(table, inputs, durations, [0] * schedule.num_ranks)
    if done.stuck:
        return None
    ends = [int(end) for end in done.ends]
    return [end - duration for end, duration in zip(ends, durations)], ends


# --- over time -------------------------------------------------------------------------------------


def _over_time(
    schedule: Schedule, width: int, marked: Mapping[int, int], starts: list[int], ends: list[int]
) -> Iterator[Text]:
    steps = [step for row in schedule.ranks for step in row]
    with_stage = schedule.num_stages > schedule.num_ranks
    texts = [cell_text(step, with_stage=with_stage) for step in steps]
    for rank, number in marked.items():
        slot = int(schedule.table.slot_bounds[rank]) + number
        texts[slot] = f"[{texts[slot]}]"
    cell = max([2] + [-(-(len(text) + 1) // (end - start)) for text, start, end in zip(texts, starts, ends)])
    drawn, length = list(zip(steps, texts, starts, ends)), max(ends)
    bounds = schedule.table.slot_bounds.tolist()
    rows = [_cells(drawn[begin:end], length, cell) for begin, end in pairwise(bounds)]
    label = label_width(schedule)
    per_panel = max((width - label) // cell, 1)
    for begin in range(0, length, per_panel):
        units = range(begin, min(begin + per_panel, length))
        panel = [row[units.start : units.stop] for row in rows]
        yield from time_panel(label, _ruler(units, cell), panel, gap=begin > 0)


def label_width(schedule: Schedule) -> int:
    """Return the characters to the left of the rows."""
    return max(len(f"rank {schedule.num_ranks - 1}"), len("time")) + 2


def time_panel(label: int, ruler: str, rows: Iterable[Iterable[Text]], *, gap: bool) -> Iterator[Text]:
    """Yield the lines of a panel: a blank one between panels, the ruler, and the cells of each rank."""
    if gap:
        yield Text()
    yield Text("time".ljust(label) + ruler, style="dim")
    for rank, cells in enumerate(rows):
        line = Text(f"rank {rank}".ljust(label))
        for cell in cells:
            line.append_text(cell)
        line.rstrip()
        yield line


def cell_text(step: Step, *, with_stage: bool) -> str:
    """The name of a step in a cell, with or without its stage."""
    names = ((part, style_of(part.kind).short or part.kind) for part in step.parts)
    return "+".join(f"{part.stage if with_stage else ''}{name}{part.microbatch}" for part, name in names)


def _cells(drawn: Iterable[tuple[Step, str, int, int]], length: int, cell: int) -> list[Text]:
    """One text per time unit: the name of a step, a line for its duration, a dot where the rank is idle."""
    cells = [Text("·".ljust(cell), style="dim")] * length
    for step, text, start, end in drawn:
        whole = text.ljust((end - start) * cell - 1, "─")
        for unit in range(start, end):
            piece = whole[(unit - start) * cell : (unit - start + 1) * cell]
            cells[unit] = Text(piece, style=style_of(step.kind).terminal).append(
                " " * (cell - len(piece)), style="default on default"
            )
    return cells


def _ruler(units: range, cell: int) -> str:
    every = 5 if cell * 5 > len(str(units.stop)) + 1 else 10
    line = ""
    for unit in units:
        if unit % every == 0 or unit == units.start:
            line = line.ljust((unit - units.start) * cell)
            if not line or line.endswith(" "):
                line += f"{unit} "
    return line.rstrip()


# --- step by step ----------------------------------------------------------------------------------


def _by_step(schedule: Schedule, width: int) -> Iterator[Text]:
    columns = [schedule.texts(rank) for rank in range(schedule.num_ranks)]
    widths = [max([len(f"rank {rank}"), *map(len, column)]) + 2 for rank, column in enumerate(columns)]
    height = max(map(len, columns))
    label = max(len("step"), len(str(height - 1))) + 2
    for n, ranks in enumerate(_panels(widths, width - label)):
        if n:
            yield Text()
        head = "".join(f"rank {rank}".ljust(widths[rank]) for rank in ranks)
        yield Text(("step".ljust(label) + head).rstrip(), style="dim")
        for step in range(height):
            line = Text(str(step).rjust(label - 2) + "  ")
            for rank in ranks:
                text = style = ""
                if step < len(columns[rank]):
                    text, style = columns[rank][step], style_of(schedule.ranks[rank][step].kind).terminal
                line.append(text, style=style)
                line.append(" " * (widths[rank] - len(text)))
            line.rstrip()
            yield line


def _panels(widths: list[int], width: int) -> list[list[int]]:
    """The ranks that fit side by side; at least one per panel."""
    panels: list[list[int]] = [[]]
    used = 0
    for rank, needed in enumerate(widths):
        if panels[-1] and used + needed - 2 > width:
            panels.append([])
            used = 0
        panels[-1].append(rank)
        used += needed
    return panels
