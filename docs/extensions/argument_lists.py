"""Turns the argument tables of docstrings into Markdown lists, for the API reference.

`at`      names from `model.named_modules()`, each the      ->  - `at`: names from `model.named_modules()`,
          first module of a new stage                             each the first module of a new stage
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROW = re.compile(r"^(`[^`]+`(?:, `[^`]+`)*)\s{2,}(\S.*)$")


class ArgumentLists(griffe.Extension):
    """Changes every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:  # noqa: ANN401, D102
        if obj.docstring is not None:
            obj.docstring.value = _with_lists(obj.docstring.value)


def _with_lists(text: str) -> str:
    lines: list[str] = []
    in_table = False
    for line in text.splitlines():
        row = _ROW.match(line)
        if row:
            lines += ([] if in_table else [""]) + [f"- {row[1]}: {row[2]}"]
            in_table = True
        elif in_table and line.startswith(" "):
            lines.append(f"  {line.strip()}")
        else:
            in_table = False
            lines.append(line)
    return "\n".join(lines)
