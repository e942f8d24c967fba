"""Promise: no code depends on the wording of a message of Penstock; only foreign text is searched."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "penstock"

FOREIGN = {
    ("runtime/transport/transport_errors.py", "'gloo' in str(error)"): "gloo raises plain RuntimeErrors",
    ("runtime/transport/transport_errors.py", "'CUDA error' not in str(error)"): "so do CUDA's libraries",
    ("runtime/transport/transport_errors.py", "'Timed out' in str(error)"): "gloo's timeouts have no type",
    ("cli/usage_errors.py", "error.message.startswith(name)"): "typer names an option in some messages only",
}
"""Where text is searched, and why there is no other way."""

TEXT = re.compile(
    r"\bstr\((error|cause|exc)\w*\)|\b(error|cause)\.(message|args|report)\b|first_line\(|\.awaited\b"
)
"""Expressions whose value is the text of an error or of a wait."""
METHODS = {"startswith", "endswith", "partition", "rpartition", "split", "find", "removeprefix"}
PATTERNS = {"search", "match", "fullmatch", "findall", "finditer", "sub"}


def searches(code: str) -> Iterator[str]:
    """The expressions that search the text of an error or of a wait."""
    for node in ast.walk(ast.parse(code)):
        texts: list[ast.expr] = []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn | ast.Eq):
            sides = [node.left, *node.comparators]
            constants = [
                each for each in sides if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
            texts = sides if constants else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            texts = [node.func.value] * (method in METHODS) + node.args * (method in PATTERNS)
        if any(TEXT.search(ast.unparse(each)) for each in texts):
            yield ast.unparse(node)


def test_no_code_searches_the_text_of_a_message() -> None:
    found = {
        (file.relative_to(SOURCE).as_posix(), expression)
        for file in SOURCE.rglob("*.py")
        for expression in searches(file.read_text(encoding="utf-8"))
    }
    assert found == FOREIGN.keys(), "give the error a field, or say here why the text is foreign"


@pytest.mark.parametrize(
    "code",
    ["'lost' in str(error)", "re.search('rank [0-9]+', str(error))", "first_line(error).startswith('rank')"],
)
def test_a_search_is_found(code: str) -> None:
    assert list(searches(code))
