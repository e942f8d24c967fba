"""The CSV format of torch.distributed.pipelining: one row per rank, one cell per step, no header.

An empty cell is an idle slot; reading drops it. The file has no placement, no number of microbatches and no
name: reading infers the first two from the actions and takes the name from the caller.
"""

from __future__ import annotations

import csv
import io

from penstock.errors import FormatError, ScheduleError
from penstock.formats.step_texts import parse_steps
from penstock.ir.schedule import Schedule

__all__ = ["dumps", "loads"]


def dumps(schedule: Schedule) -> str:
    """Format a schedule as CSV."""
    if not schedule.graph.is_chain:
        problem = "CSV cannot represent a stage graph that is not a chain; use JSON"
        raise FormatError(schedule.name, [problem])
    rows = [[str(step) for step in steps] for steps in schedule.ranks]
    if empty := [rank for rank, row in enumerate(rows) if not row]:
        problem = f"CSV cannot represent a rank without steps (rank {empty[0]}); use JSON"
        raise FormatError(schedule.name, [problem])
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue()


def loads(text: str, source: str, name: str) -> Schedule:
    """Parse a schedule from CSV; `source` names the text in error messages."""
    rows = _cells(text, source)
    problems: list[str] = []
    ranks = [
        list(parse_steps(((f"row {r}, column {c}", cell) for c, cell in enumerate(row, 1)), problems))
        for r, row in enumerate(rows, 1)
    ]
    problems += [f"row {r}: a rank needs at least one step" for r, row in enumerate(rows, 1) if not any(row)]
    if not rows:
        problems.append("no rows: a schedule has one row per rank")
    if problems:
        raise FormatError(source, problems)
    try:
        return Schedule(ranks, name=name)
    except ScheduleError as error:
        raise FormatError(source, [str(error)]) from None


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
