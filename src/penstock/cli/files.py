"""Files named on the command line."""

from __future__ import annotations

from pathlib import Path

import typer

from penstock.errors import FormatError
from penstock.formats import format_of, read
from penstock.schedule import Schedule

__all__ = ["read_schedule"]


def read_schedule(path: Path) -> Schedule:
    """Read a file; an ending that cannot be a schedule is bad usage, not a bad schedule."""
    try:
        format_of(path)
    except FormatError as error:
        raise typer.BadParameter(str(error)) from None
    return read(path)
