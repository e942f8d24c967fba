"""Schedules in files: the file extension selects the format, `.csv` (torch CSV) or `.json` (Penstock JSON).

Files are parsed, never evaluated. A `FormatError` lists every problem of a file with its location.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import FormatError
from penstock.formats import penstock_json, torch_csv
from penstock.formats.files import read_text, require_extension, write_text
from penstock.ir.schedule import Schedule


def read(path: str | os.PathLike[str]) -> Schedule:
    """Read a schedule from a `.csv` or `.json` file."""
    path = Path(path)
    file_format = format_of(path)
    return reads(read_text(path), file_format, source=str(path), name=path.stem)


def write(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a schedule to a `.csv` or `.json` file, atomically."""
    path = Path(path)
    write_text(dumps(schedule, format_of(path)), path)


def reads(text: str, file_format: str, *, source: str = "<text>", name: str = "custom") -> Schedule:
    """Parse a schedule from `csv` or `json` text.

    `source` names the text in error messages. `name` is the schedule's name if the format is CSV, which has
    no place for one.
    """
    _require_format(source, file_format)
    return torch_csv.loads(text, source, name) if file_format == "csv" else penstock_json.loads(text, source)


def dumps(schedule: Schedule, file_format: str) -> str:
    """Format a schedule as `csv` or `json` text."""
    _require_format(schedule.name, file_format)
    return torch_csv.dumps(schedule) if file_format == "csv" else penstock_json.dumps(schedule)


def format_of(path: Path) -> str:
    """Return `csv` or `json`, from the file extension."""
    return require_extension(path, ".csv", ".json")[1:]


def _require_format(source: str, file_format: str) -> None:
    if file_format not in ("csv", "json"):
        raise FormatError(source, [f"unknown format {file_format!r}; use csv or json"])
