"""Parse the action texts of a schedule file, and collect the location of each one that is not an action."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.errors import ActionError
from penstock.ir.action import Step, parse_action

__all__ = ["parse_steps"]


def parse_steps(cells: Iterable[tuple[str, str]], problems: list[str]) -> Iterator[Step]:
    """Parse the non-empty texts of (location, text) pairs; append the errors to `problems`."""
    for location, text in cells:
        if text:
            try:
                yield parse_action(text)
            except ActionError as error:
                problems.append(f"{location}: {error}")
