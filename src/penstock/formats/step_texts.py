"""Parse the action texts of a schedule file, and collect the location of each one that is not an action."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from penstock.errors import ActionError
from penstock.ir.action import Step, parse_action
from penstock.ir.encoding import Ints, codes_of_texts, decode
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

Row = Ints | list[Step]
"""The steps of a rank in integer form, or as objects if their integer form depends on the stage graph."""


def parse_row(texts: Sequence[str], locations: Iterable[str], problems: list[str]) -> Row:
    """The steps of the non-empty texts; errors are appended to `problems` with their locations."""
    codes = codes_of_texts([text for text in texts if text])
    return list(_steps(zip(locations, texts), problems)) if codes is None else codes


def _steps(cells: Iterable[tuple[str, str]], problems: list[str]) -> Iterator[Step]:
    for location, text in cells:
        if text:
            try:
                yield parse_action(text)
            except ActionError as error:
                problems.append(f"{location}: {error}")


def schedule_of(
    rows: Sequence[Row],
    name: str,
    placement: Placement | None = None,
    microbatches: int | None = None,
    graph: StageGraph | None = None,
) -> Schedule:
    """The schedule of these rows; what is not given is inferred."""
    codes = [row for row in rows if isinstance(row, np.ndarray)]
    if len(codes) == len(rows):
        return Schedule.from_codes(codes, placement, microbatches, name, graph)
    return Schedule(list(map(steps_of, rows)), placement, microbatches, name, graph)


def steps_of(row: Row) -> list[Step]:
    """The steps of a row as objects."""
    return list(decode(row.tolist())) if isinstance(row, np.ndarray) else row
