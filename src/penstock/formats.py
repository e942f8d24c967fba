"""Schedules in files that can be read back: CSV as torch writes it, and JSON that leaves nothing out.

CSV   one row per rank, one cell per step, an empty cell is idle; no header. Placement and microbatches are
      inferred on reading, idle cells are dropped, the name is that of the file.
JSON  {"format": "penstock-schedule", "version": 1, "name": "1f1b", "microbatches": 8, "level": "compute",
      "stage_to_rank": [0, 1], "ranks": [["0F0", ...], ["1F0", ...]]}

Reading parses and never evaluates. It collects every fault with its place before it gives up. Writing goes
to a file beside the target that then takes its place, so a file is there whole or as it was before.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.action import Step, parse_action
from penstock.errors import ActionError, FormatError, PlacementError, ScheduleError
from penstock.placement import Placement
from penstock.schedule import Schedule

__all__ = ["dumps", "read", "reads", "write", "write_text"]

_FORMAT, _VERSION = "penstock-schedule", 1
_KEYS = ("format", "version", "name", "microbatches", "level", "stage_to_rank", "ranks")


def read(path: str | os.PathLike[str]) -> Schedule:
    """Read a `.csv` or `.json` file."""
    path = Path(path)
    file_format = _format_of(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(str(path), [f"byte {error.start} is not UTF-8 text"]) from None
    return reads(text, file_format, source=str(path), name=path.stem)


def write(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a `.csv` or `.json` file, whole or not at all."""
    path = Path(path)
    write_text(dumps(schedule, _format_of(path)), path)


def reads(text: str, file_format: str, *, source: str = "<text>", name: str = "custom") -> Schedule:
    """The schedule in a text; `source` is what messages call it, `name` what a CSV is called."""
    try:
        return _from_csv(text, source, name) if file_format == "csv" else _from_json(text, source)
    except (PlacementError, ScheduleError) as error:
        raise FormatError(source, [str(error)]) from None


def dumps(schedule: Schedule, file_format: str) -> str:
    """The text of a schedule as `csv` or `json`."""
    rows = [[str(step) for step in row] for row in schedule.ranks]
    if file_format == "csv":
        out = io.StringIO()
        csv.writer(out).writerows(rows)
        return out.getvalue()
    values: tuple[object, ...] = (
        _FORMAT,
        _VERSION,
        schedule.name,
        schedule.microbatches,
        schedule.level,
        schedule.placement.stage_to_rank,
        [],
    )
    head = json.dumps(dict(zip(_KEYS, values)), ensure_ascii=False)
    body = ",\n  ".join(json.dumps(row) for row in rows)
    return f"{head[: -len('[]}')]}[\n  {body}\n]}}\n"


def write_text(text: str, path: Path) -> None:
    """Put a text into a file at once: a reader sees the old file or the new one, never a part."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():  # a pipe or a device has no old content to keep
        path.write_text(text, encoding="utf-8", newline="")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def _format_of(path: Path) -> str:
    ending = path.suffix.lower()
    if ending not in (".csv", ".json"):
        raise FormatError(str(path), [f"the ending {ending or '(none)'} is not known; it is .csv or .json"])
    return ending[1:]


# --- CSV -------------------------------------------------------------------------------------------


def _from_csv(text: str, source: str, name: str) -> Schedule:
    try:
        cells = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise FormatError(source, [f"it is not CSV: {error}"]) from None
    while cells and not any(cell.strip() for cell in cells[-1]):
        cells.pop()
    faults: list[str] = []
    rows = [
        list(_steps(((f"row {r}, column {c}", cell.strip()) for c, cell in enumerate(row, 1)), faults))
        for r, row in enumerate(cells, 1)
    ]
    faults += [f"row {r}: a rank needs at least one step" for r, row in enumerate(cells, 1) if not any(row)]
    if not cells:
        faults.append("it is empty: a schedule has one row per rank")
    if faults:
        raise FormatError(source, faults)
    return Schedule(rows, name=name)


def _steps(cells: Iterator[tuple[str, str]], faults: list[str]) -> Iterator[Step]:
    """Parse the texts that are not empty, and note the place of those that are no actions."""
    for place, text in cells:
        if text:
            try:
                yield parse_action(text)
            except ActionError as error:
                faults.append(f"{place}: {error}")


# --- JSON ------------------------------------------------------------------------------------------


def _from_json(text: str, source: str) -> Schedule:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(
            source, [f"line {error.lineno}, column {error.colno}: it is not JSON: {error.msg}"]
        ) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets within brackets
        raise FormatError(source, ["it is not JSON that a schedule could be in"]) from None
    faults = _faults_of(document)
    rows: list[list[Step]] = []
    if not faults:
        for r, row in enumerate(document["ranks"]):
            named = ((f"ranks[{r}][{i}]", cell) for i, cell in enumerate(row))
            rows.append(list(_steps(named, faults)))
    if faults:
        raise FormatError(source, faults)
    schedule = Schedule(
        rows, Placement(tuple(document["stage_to_rank"])), document["microbatches"], document["name"]
    )
    if schedule.level != document["level"]:
        raise FormatError(
            source, [f"level: it says {document['level']!r}, but the steps are {schedule.level!r}"]
        )
    return schedule


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(x, kind) and not isinstance(x, bool) for x in value)


_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "format": (lambda x: x == _FORMAT, f'"{_FORMAT}"'),
    "version": (lambda x: type(x) is int and x == _VERSION, f"{_VERSION}, the only version there is"),
    "name": (lambda x: isinstance(x, str), "a text"),
    "microbatches": (_is_count, "a whole number of at least 1"),
    "level": (lambda x: x in ("compute", "lowered"), '"compute" or "lowered"'),
    "stage_to_rank": (lambda x: _is_list_of(int, x), "a list with the rank of every stage"),
    "ranks": (
        lambda x: isinstance(x, list) and all(_is_list_of(str, row) and all(row) for row in x),
        "a list with a list of actions, as texts, for every rank",
    ),
}


def _faults_of(document: object) -> list[str]:
    """What is missing, unknown or of the wrong form at the top of a JSON file."""
    if not isinstance(document, dict):
        return [f"it is a JSON {type(document).__name__}, not an object with {', '.join(_KEYS)}"]
    faults = [
        f"{key}: missing; it must be {what}" for key, (_, what) in _EXPECTED.items() if key not in document
    ]
    faults += [
        f"{key}: not a key of a schedule; they are {', '.join(_KEYS)}" for key in document if key not in _KEYS
    ]
    faults += [
        f"{key}: it must be {what}"
        for key, (fits, what) in _EXPECTED.items()
        if key in document and not fits(document[key])
    ]
    return faults
