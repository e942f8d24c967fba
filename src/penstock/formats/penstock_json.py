"""Penstock's JSON format, which keeps everything about a schedule.

{"format": "penstock-schedule", "version": 1, "name": "1f1b", "microbatches": 8, "level": "compute",
 "stage_to_rank": [0, 1], "ranks": [["0F0", ...], ["1F0", ...]]}

A schedule whose stages are not a chain also has `"edges": [[0, 1], [1, 2], [0, 2]]`, its stage graph.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from penstock.arguments import printable
from penstock.errors import FormatError, Message, PlacementError, ScheduleError
from penstock.formats.files import SCHEDULE, JsonError, kind_of_file, parse_json
from penstock.formats.step_texts import Row, parse_row, schedule_of
from penstock.ir.action import MAX_MICROBATCH, MAX_STAGE
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

_FORMAT, _VERSION = "penstock-schedule", 1


def dumps(schedule: Schedule) -> str:
    """Format a schedule as JSON, with one line per rank."""
    edges = {} if schedule.graph.is_chain else {"edges": schedule.graph.edges}
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "level": schedule.level,
        "stage_to_rank": schedule.placement.stage_to_rank,
        **edges,
        "ranks": [],
    }
    head = json.dumps(header, ensure_ascii=False)
    ranks = ",\n  ".join(json.dumps(schedule.texts(rank)) for rank in range(schedule.num_ranks))
    return f"{head[: -len('[]}')]}[\n  {ranks}\n]}}\n"


def loads(text: str, source: str) -> Schedule:
    """Parse a schedule from JSON; `source` names the text in error messages."""
    document, problems = _load_object(text, source)
    ranks: list[Row] = []
    if "ranks" in document and _EXPECTED["ranks"][0](document["ranks"]):
        for rank, texts in enumerate(document["ranks"]):
            ranks.append(parse_row(texts, (f"ranks[{rank}][{i}]" for i in count()), problems))
    if problems:
        raise FormatError(source, problems)
    key = "stage_to_rank"
    try:
        placement = Placement(tuple(document["stage_to_rank"]))
        key, graph = "edges", None
        if "edges" in document:
            graph = StageGraph(placement.num_stages, tuple(map(tuple, document["edges"])))
        key = "ranks" if len(ranks) != placement.num_ranks else "microbatches"
        schedule = schedule_of(ranks, document["name"], placement, document["microbatches"], graph)
    except (PlacementError, ScheduleError) as error:
        raise FormatError(source, [f"{key}: {error}"]) from None
    if schedule.level != document["level"]:
        problem = f"level: {document['level']!r} does not match the steps, which are {schedule.level!r}"
        raise FormatError(source, [problem])
    return schedule


def _load_object(text: str, source: str) -> tuple[dict[str, Any], list[str]]:
    """Parse the top-level object, and list the problems of its keys."""
    duplicates: list[str] = []

    def collect_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        document = parse_json(text, collect_duplicates)
    except JsonError as error:
        raise FormatError(source, [str(error)]) from None
    if not isinstance(document, dict):
        raise FormatError(source, [f"expected a JSON object with the keys {', '.join(_EXPECTED)}"])
    if (kind := kind_of_file(document)) and kind != SCHEDULE:
        raise FormatError(source, [Message("not a schedule: it is ", kind)])
    if not _EXPECTED.keys() & document.keys():
        raise FormatError(source, [f"not a schedule: it has none of the keys {', '.join(_EXPECTED)}"])
    problems = [f"{printable(key)}: duplicate key" for key in duplicates]
    return document, problems + _key_problems(document)


def _key_problems(document: dict[str, Any]) -> list[str]:
    """List the keys that are missing, unknown or have a value of the wrong type."""
    problems = [
        f"{key}: missing; expected {what}"
        for key, (_, what) in _EXPECTED.items()
        if key not in document and key not in _OPTIONAL
    ]
    known = ", ".join(_EXPECTED)
    problems += [
        f"{printable(key)}: unknown key; the keys of a schedule are {known}"
        for key in document
        if key not in _EXPECTED
    ]
    problems += [
        f"{key}: expected {what}"
        for key, (accepts, what) in _EXPECTED.items()
        if key in document and not accepts(document[key])
    ]
    return problems


def _is_integer(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_unicode(value: object) -> bool:
    """Whether the value is a string that UTF-8 can encode: JSON can escape lone surrogates, UTF-8 cannot."""
    return isinstance(value, str) and value.encode("utf-8", "replace").decode("utf-8") == value


def _is_edge(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(_is_integer(stage, 0, MAX_STAGE) for stage in value)
    )


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) and text for text in value)


_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "format": (lambda x: x == _FORMAT, f'"{_FORMAT}"'),
    "version": (lambda x: type(x) is int and x == _VERSION, f"{_VERSION}, the only version so far"),
    "name": (_is_unicode, "a string"),
    "microbatches": (
        lambda x: _is_integer(x, 1, MAX_MICROBATCH + 1),
        f"an integer from 1 to {MAX_MICROBATCH + 1}",
    ),
    "level": (lambda x: x in ("compute", "lowered"), '"compute" or "lowered"'),
    "stage_to_rank": (
        lambda x: isinstance(x, list) and all(_is_integer(rank, 0, MAX_STAGE) for rank in x),
        "a list with the rank of every stage",
    ),
    "edges": (
        lambda x: isinstance(x, list) and all(map(_is_edge, x)),
        "a list of [source, target] pairs of stages",
    ),
    "ranks": (
        lambda x: isinstance(x, list) and all(map(_is_list_of_texts, x)),
        "a list of action strings for every rank",
    ),
}
"""Per key of a file: a check of its value, and the words for what is expected."""
_OPTIONAL = frozenset({"edges"})
