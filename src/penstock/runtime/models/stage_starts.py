"""Where stages begin in a model, and the errors in a list of such positions."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TypeAlias

from penstock.arguments import printable, some

Start: TypeAlias = tuple[int, ...]
"""Where a stage begins: the index of a child, of a child of that child, and so on.

A module and the first module in it begin at the same position, so a start never ends in 0, and the model begins
at ().
"""


def unknown_name(name: object, valid: Sequence[str], *, exists: bool = False) -> str:
    """The error for a name at which no stage can begin."""
    problem = f"there is no module {printable(repr(name))} in the model"
    if exists:
        problem = f"no stage can begin at {name!r}, which is inside a layer, or belongs to the stage before"
    if close := get_close_matches(str(name), valid):
        return f"{problem}: did you mean {' or '.join(map(repr, close))}?"
    return f"{problem}; stages can begin at {some(list(map(repr, valid)))}"


def order_problems(starts: Sequence[tuple[str, Start]]) -> list[str]:
    """Starts that would leave a stage empty, or that are not in the order of the model."""
    problems = [
        f"{name!r} is the very first module, so the first stage would be empty: leave it out"
        for name, start in starts
        if not start
    ]
    seen: dict[Start, str] = {}
    for name, start in starts:
        if start in seen:
            both = "is a duplicate" if seen[start] == name else f"begins where {seen[start]!r} begins"
            problems.append(f"{name!r} {both}, so a stage would be empty: leave one out")
        seen.setdefault(start, name)
    seen.pop((), None)
    in_order = sorted(seen)
    if list(seen) != in_order:
        expected = ", ".join(repr(seen[start]) for start in in_order)
        problems.append(f"names must be in the order of the model: {expected}")
    return problems
