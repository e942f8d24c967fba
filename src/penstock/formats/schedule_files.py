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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from penstock.arguments import printable
from penstock.errors import ActionError, FormatError, PlacementError, ScheduleError
from penstock.ir.action import MAX_ID, Step, parse_action
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

__all__ = ["dumps", "format_of", "read", "reads", "write", "write_bytes", "write_text"]

_FORMAT, _VERSION = "penstock-schedule", 1
_KEYS = ("format", "version", "name", "microbatches", "level", "stage_to_rank", "ranks")


def read(path: str | os.PathLike[str]) -> Schedule:
    """Read a `.csv` or `.json` file."""
    path = Path(path)
    file_format = format_of(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(str(path), [f"byte {error.start} is not UTF-8 text"]) from None
    return reads(text, file_format, source=str(path), name=path.stem)


def write(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a `.csv` or `.json` file, whole or not at all."""
    path = Path(path)
    write_text(dumps(schedule, format_of(path)), path)


def reads(text: str, file_format: str, *, source: str = "<text>", name: str = "custom") -> Schedule:
    """The schedule in a text; `source` is what messages call it, `name` what a CSV is called."""
    _check_format(source, file_format)
    return _from_csv(text, source, name) if file_format == "csv" else _from_json(text, source)


def dumps(schedule: Schedule, file_format: str) -> str:
    """The text of a schedule as `csv` or `json`."""
    _check_format(schedule.name, file_format)
    rows = [[str(step) for step in row] for row in schedule.ranks]
    if file_format == "csv":
        if empty := [rank for rank, row in enumerate(rows) if not row]:
            raise FormatError(schedule.name, [f"CSV cannot hold ranks without steps, such as rank {empty[0]}"])
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
    """Put a text into a file at once, as `write_bytes` does."""
    write_bytes(text.encode("utf-8"), path)


def write_bytes(content: bytes, path: Path) -> None:
    """Put it into a file at once: a reader sees the old file or the new one, never a part."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a pipe or a device has no old content to keep
        target.write_bytes(content)
        return
    beside = target.with_name(f".{token_hex(8)}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            beside.chmod(target.stat().st_mode)
        beside.replace(target)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # the name that somebody gave
        raise


def format_of(path: Path) -> str:
    """`csv` or `json`, by the ending of the name."""
    ending = path.suffix.lower()
    if ending not in (".csv", ".json"):
        raise FormatError(str(path), [f"the ending {ending or '(none)'} is not known; it is .csv or .json"])
    return ending[1:]


def _check_format(source: str, file_format: str) -> None:
    if file_format not in ("csv", "json"):
        raise FormatError(source, [f"no format is called {file_format!r}; it is csv or json"])


# --- CSV -------------------------------------------------------------------------------------------


def _from_csv(text: str, source: str, name: str) -> Schedule:
    cells: list[list[str]] = []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            cells.append([cell.strip() for cell in row])  # noqa: PERF401 -- counts the rows before a fault
    except csv.Error as error:
        raise FormatError(source, [f"row {len(cells) + 1}: it is not CSV: {error}"]) from None
    while cells and not any(cells[-1]):
        cells.pop()
    faults: list[str] = []
    rows = [
        list(_steps(((f"row {r}, column {c}", cell) for c, cell in enumerate(row, 1)), faults))
        for r, row in enumerate(cells, 1)
    ]
    faults += [f"row {r}: a rank needs at least one step" for r, row in enumerate(cells, 1) if not any(row)]
    if not cells:
        faults.append("it is empty: a schedule has one row per rank")
    if faults:
        raise FormatError(source, faults)
    try:
        return Schedule(rows, name=name)
    except ScheduleError as error:
        raise FormatError(source, [str(error)]) from None


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
    document, faults = _load_json(text, source)
    rows: list[list[Step]] = []
    if "ranks" in document and _EXPECTED["ranks"][0](document["ranks"]):
        for r, row in enumerate(document["ranks"]):
            named = ((f"ranks[{r}][{i}]", cell) for i, cell in enumerate(row))
            rows.append(list(_steps(named, faults)))
    if faults:
        raise FormatError(source, faults)
    key = "stage_to_rank"
    try:
        placement = Placement(tuple(document["stage_to_rank"]))
        key = "ranks" if len(rows) != placement.num_ranks else "microbatches"
        schedule = Schedule(rows, placement, document["microbatches"], document["name"])
    except (PlacementError, ScheduleError) as error:
        raise FormatError(source, [f"{key}: {error}"]) from None
    if schedule.level != document["level"]:
        fault = f"level: it says {document['level']!r}, but the steps are {schedule.level!r}"
        raise FormatError(source, [fault])
    return schedule


def _load_json(text: str, source: str) -> tuple[dict[str, Any], list[str]]:
    """The object in a text, and what is wrong at its top."""
    twice: list[str] = []

    def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return found

    try:
        document = json.loads(text, object_pairs_hook=no_key_twice)
    except json.JSONDecodeError as error:
        fault = f"line {error.lineno}, column {error.colno}: it is not JSON: {error.msg}"
        raise FormatError(source, [fault]) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets within brackets
        raise FormatError(source, ["it is not JSON that a schedule could be in"]) from None
    if not isinstance(document, dict):
        fault = f"it is JSON, but not an object with {', '.join(_KEYS)}"
        raise FormatError(source, [fault])
    faults = [f"{printable(key)}: it stands there twice" for key in twice]
    return document, faults + _faults_of(document)


def _is_number(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= MAX_ID


def _is_text(value: object) -> bool:
    """Whether it can be written again: JSON can name halves of characters that no file can hold."""
    return isinstance(value, str) and value.encode("utf-8", "replace").decode("utf-8") == value


_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "format": (lambda x: x == _FORMAT, f'"{_FORMAT}"'),
    "version": (lambda x: type(x) is int and x == _VERSION, f"{_VERSION}, the only version there is"),
    "name": (_is_text, "a text"),
    "microbatches": (lambda x: _is_number(x, 1), f"a whole number from 1 to {MAX_ID}"),
    "level": (lambda x: x in ("compute", "lowered"), '"compute" or "lowered"'),
    "stage_to_rank": (
        lambda x: isinstance(x, list) and all(_is_number(rank, 0) for rank in x),
        "a list with the rank of every stage",
    ),
    "ranks": (
        lambda x: (
            isinstance(x, list)
            and all(isinstance(row, list) and all(isinstance(cell, str) and cell for cell in row) for row in x)
        ),
        "a list with a list of actions, as texts, for every rank",
    ),
}


def _faults_of(document: dict[str, Any]) -> list[str]:
    """What is missing, unknown or of the wrong form at the top of a JSON file."""
    faults = [
        f"{key}: missing; it must be {what}" for key, (_, what) in _EXPECTED.items() if key not in document
    ]
    known = ", ".join(_KEYS)
    faults += [
        f"{printable(key)}: not a key of a schedule; they are {known}" for key in document if key not in _KEYS
    ]
    faults += [
        f"{key}: it must be {what}"
        for key, (fits, what) in _EXPECTED.items()
        if key in document and not fits(document[key])
    ]
    return faults
