"""Prints a record as JSON piece by piece: a timeline or a schedule can have millions of entries."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping

__all__ = ["write_json"]


def write_json(record: Mapping[str, object], wrote: Callable[[int], None] = lambda _: None) -> None:
    """Print a line for each entry, and for each element of a list or an iterator.

    `wrote` is called with the number of each element in its list.
    """
    separator = "{\n"
    for name, value in record.items():
        sys.stdout.write(f"{separator}  {json.dumps(name)}: ")
        if isinstance(value, Iterator | list):
            i = -1
            for i, each in enumerate(value):
                sys.stdout.write(f"{',' if i else '['}\n    {json.dumps(each)}")
                wrote(i)
            sys.stdout.write("\n  ]" if i >= 0 else "[]")
        else:
            sys.stdout.write(json.dumps(value))
        separator = ",\n"
    sys.stdout.write("\n}\n")
