"""Arguments and messages: accept integers of any type, and format foreign text and lists for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from operator import index

from penstock.errors import Message, Parameter


def whole_number(value: object) -> int | None:
    """Convert an integer of any type, such as numpy's, to `int`; return None for a bool and everything else."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def printable(text: str, most: int = 60) -> str:
    """Shorten foreign text to `most` characters on one line, and escape control characters."""
    shown = text if len(text) <= most else text[: most - 3] + "..."
    return shown if shown.isprintable() else ascii(shown)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the nearest known name as the end of a message, or nothing if none is near."""
    by_key = {each.lower().lstrip("-"): each for each in known}  # ignore leading dashes
    close = get_close_matches(name.lower().lstrip("-"), by_key, n=1, cutoff=cutoff)
    return f"; did you mean {by_key[close[0]]}?" if close else ""


def listed(values: Iterable[object]) -> str:
    """Join all values with commas."""
    return ", ".join(map(str, values))


def plural(count: object, noun: str, nouns: str = "") -> str:
    """Return a count with its noun: `1 rank`, `2 ranks`, `2 processes`."""
    regular = f"{noun}es" if noun.endswith(("ch", "ss")) else f"{noun}s"
    return f"{count} {noun if str(count) == '1' else nouns or regular}"


def some(values: Sequence[object], most: int = 8, separator: str = ", ") -> str:
    """Join the first values, and append the number of the others."""
    more = len(values) - most
    return separator.join(map(str, values[:most])) + (f", and {more} more" if more > 0 else "")


def index_problem(name: str, given: int, count: int, noun: str) -> Message:
    """Return why a number from 0 is wrong: `step must be from 0 to 2: there are 3 steps (given 9)`."""
    valid, verb = ("0", "is") if count == 1 else (f"from 0 to {count - 1}", "are")
    return Message(Parameter(name), f" must be {valid}: there {verb} {plural(count, noun)} (given {given})")


def number_ranges(numbers: Iterable[int], separator: str = ", ", most: int = 8) -> str:
    """Return ascending numbers with consecutive ones as first and last: `0-3, 5, 7-8`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    shown = separator.join("-".join(map(str, each)) for each in ranges[:most])
    return shown + f", ... ({len(ranges)} ranges)" * (len(ranges) > most)


def install_command(extra: str) -> str:
    """Return what to type to install an extra."""
    return f"pip install 'penstock[{extra}]', or in a clone: pip install -e '.[{extra}]'"
