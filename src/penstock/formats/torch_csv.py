"""The CSV format of torch.distributed.pipelining: one row per rank, one cell per step, no header.

An empty cell is an idle slot; reading drops it. The file has no placement, no number of microbatches and no
name: reading infers the first two from the actions and takes the name from the caller.

A schedule whose stages are not a chain, which torch does not have, begins with a row of its edges:

    edges,0>1,0>2,1>2
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from itertools import count

from penstock.errors import FormatError, PlacementError, ScheduleError
from penstock.formats.step_texts import parse_row, schedule_of, steps_of
from penstock.ir.graph import Edge, StageGraph, parse_edge
from penstock.ir.schedule import Schedule

_EDGES = "edges"
_SEPARATORS = re.compile(r"[;\s|]+")


def dumps(schedule: Schedule) -> str:
    """Format a schedule as CSV."""
    rows = [schedule.texts(rank) for rank in range(schedule.num_ranks)]
    if empty := [rank for rank, row in enumerate(rows) if not row]:
        problem = f"CSV cannot represent a rank without steps (rank {empty[0]}); use JSON"
        raise FormatError(schedule.name, [problem])
    if not schedule.graph.is_chain:
        rows.insert(0, [_EDGES, *(f"{source}>{target}" for source, target in schedule.graph.edges)])
    return "".join(f"{','.join(row)}\r\n" for row in rows)  # no text has a character that CSV quotes


def loads(text: str, source: str, name: str) -> Schedule:
    """Parse a schedule from CSV; `source` names the text in error messages."""
    rows = _cells(text, source)
    problems: list[str] = []
    edges = None
    if rows and rows[0][:1] == [_EDGES]:
        edges = list(_parse_edges(rows.pop(0), problems))
    first = 1 if edges is None else 2
    ranks = [
        parse_row(row, (f"row {r}, column {c}" for c in count(1)), problems)
        for r, row in enumerate(rows, first)
    ]
    problems += [
        f"row {r}: a rank needs at least one step" for r, row in enumerate(rows, first) if not any(row)
    ]
    if not rows:
        problems.append("no rows: a schedule has one row per rank")
    if problems:
        raise FormatError(source, _hint(rows) + problems)
    try:
        if edges is None:
            return schedule_of(ranks, name)
        steps = (step for row in ranks for step in steps_of(row))
        stages = {part.stage for step in steps for part in step.parts}
        return schedule_of(ranks, name, graph=StageGraph(max(stages) + 1, tuple(edges)))
    except PlacementError as error:
        raise FormatError(source, [f"row 1: {error}"]) from None
    except ScheduleError as error:
        raise FormatError(source, [str(error)]) from None


def _hint(rows: list[list[str]]) -> list[str]:
    """What is wrong with the whole file, if it is: another separator, or a header."""
    if rows and all(len(row) == 1 and len(_SEPARATORS.split(row[0])) > 1 for row in rows):
        return ["the steps of a row are separated by commas: 0F0,0F1,0B0"]
    steps = [any(cell[:1].isdigit() or cell[:1] == "(" for cell in row) for row in rows[:2]]
    if steps == [False, True]:
        return ["row 1: remove it: a schedule file has no header, its first row is rank 0"]
    return []


def _parse_edges(row: list[str], problems: list[str]) -> Iterator[Edge]:
    """The edges of the first row; append its errors to `problems`."""
    for column, cell in enumerate(row[1:], 2):
        if cell:
            try:
                yield parse_edge(cell)
            except PlacementError as error:
                problems.append(f"row 1, column {column}: {error}")


def _cells(text: str, source: str) -> list[list[str]]:
    """Split the text into rows of cells, without blank rows at the end."""
    rows: list[list[str]] = []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            rows.append([cell.strip() for cell in row])  # noqa: PERF401 -- the error below needs their number
    except csv.Error as error:
        raise FormatError(source, [f"row {len(rows) + 1}: invalid CSV: {error}"]) from None
    while rows and not any(rows[-1]):
        rows.pop()
    return rows
