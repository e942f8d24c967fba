"""Promise: mutated files are read, or rejected with the location of every problem; nothing else happens."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock import FormatError
from penstock.formats import dumps, reads
from tests.support.grids import repetitions
from tests.support.schedule_files import DOCUMENT

CASES = repetitions(5_000, 1_500)
CHARACTERS = "0123456789FIWBSENDRCV_()[]{};:,\"'\\ \t\r\n-+.·\x00\ufeff\u0660éntrue"
LOCATIONS = {
    "csv": r"row \d+|no rows|the steps of a row are|rank \d+.*: ",
    "json": r"line \d+, column \d+: |expected a JSON object|invalid JSON|.*: unknown key"
    rf"|({'|'.join(DOCUMENT)})(\[\d+\])*: "
    r"|.*: duplicate key",
}


def valid_texts(file_format: str) -> list[str]:
    built = [penstock.build(family, ranks=2, microbatches=2) for family in ("1f1b", "zbv", "interleaved-1f1b")]
    overlapped = penstock.build("dualpipev", ranks=2, microbatches=4)
    return [dumps(s, file_format) for s in (*built, *map(penstock.lower, built), overlapped)]


def edit_character(rng: random.Random, text: str) -> str:
    i = rng.randrange(len(text) + 1)
    return text[:i] + rng.choice(["", rng.choice(CHARACTERS)]) + text[i + rng.randrange(2) :]


def edit_byte(rng: random.Random, text: str) -> str:
    data = bytearray(text.encode("utf-8", "replace"))
    for _ in range(min(rng.randrange(1, 3), len(data))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data.decode("utf-8", "replace")


def edit_piece(rng: random.Random, text: str) -> str:
    """Delete, repeat or move a piece."""
    i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    piece = text[i : min(j, i + 40)]
    return rng.choice([text.replace(piece, "", 1), text[:i] + piece + text[i:], piece + text, text[:i]])


def edit_line(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return "\n".join(rng.choice([lines, lines + lines[i : i + 1], lines[:i] + lines[i + 1 :]]))


def edit_cell(rng: random.Random, text: str) -> str:
    cells = text.split(",")
    i = rng.randrange(len(cells))
    new = rng.choice([*cells, "", "9F9", "0F0", '"1F0"', "null", "-1", "1e9", "[]", "65535W1048575"])
    return ",".join([*cells[:i], new, *cells[i + rng.randrange(2) :]])


JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    1.5,
    10**30,
    "",
    "1F9",
    "0UNSHARD",
    "lowered",
    [],
    [[]],
    ["0F0"],
    {},
    [0, 1, 1, 0],
]


def edit_value(rng: random.Random, text: str) -> str:
    """Change a nested value; the text remains valid JSON."""
    try:
        top = place = json.loads(text)
    except ValueError:
        return text
    while isinstance(place, (dict, list)) and place:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if rng.random() < 0.2 or not isinstance(place[key], list):
            others = [*place, *place, *place] if isinstance(place, list) else []
            place[key] = rng.choice(JUNK + others)
            break
        place = place[key]
    return json.dumps(top)


EDITS: list[Callable[[random.Random, str], str]] = [edit_character, edit_byte, edit_piece, edit_line, edit_cell]


def mutated(rng: random.Random, texts: list[str]) -> str:
    if rng.random() < 0.1:
        return "".join(rng.choices(CHARACTERS, k=rng.randrange(60)))
    text = rng.choice(texts)
    edits = [edit_value] if text.startswith("{") and rng.random() < 0.5 else EDITS
    for _ in range(rng.randrange(1, 5)):
        text = rng.choice(edits)(rng, text)
    return text


@pytest.mark.parametrize("file_format", ["csv", "json"])
def test_mutated_texts_are_read_or_rejected_with_their_problems(file_format: str) -> None:
    rng = random.Random(f"mutated {file_format}")
    texts = valid_texts(file_format)
    location = re.compile(LOCATIONS[file_format], re.DOTALL)
    accepted = 0
    for _ in range(CASES):
        text = mutated(rng, texts)
        try:
            schedule = reads(text, file_format)
        except FormatError as error:
            assert error.problems, text  # noqa: PT017 -- both outcomes are allowed
            assert all(location.match(problem) for problem in error.problems), text  # noqa: PT017
        else:
            accepted += 1
            assert isinstance(penstock.validate(schedule), list), text
    assert CASES / 100 < accepted < CASES * 99 / 100
