"""Promise: trace events are read one by one, from text that is cut anywhere, and errors name their place."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from penstock.errors import TraceError
from penstock.traces.read.files import EventStream

TEXT = json.dumps(
    {
        "schemaVersion": 1,
        "distributedInfo": {"rank": 3, "text": 'a "quoted" } ] \\ é'},
        "number": -12.5e3,
        "traceEvents": [{"ph": "X", "name": "a]}"}, {"ph": "M", "args": {"deep": [1, [2, {"x": None}]]}}, {}],
        "traceName": "x",
        "last": 12345,
    },
    indent=1,
)


def pieces(text: str, length: int) -> Iterator[str]:
    return (text[i : i + length] for i in range(0, len(text), length))


def all_of(text: str, length: int = 1000) -> tuple[list[object], dict[str, object]]:
    stream = EventStream(pieces(text, length), "t.json")
    return list(stream), stream.header


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 10_000])
def test_chunks_of_any_length_give_the_same_events(length: int) -> None:
    whole = json.loads(TEXT)
    assert all_of(TEXT, length) == (whole.pop("traceEvents"), whole)


def test_a_bare_list_may_end_without_its_bracket() -> None:
    assert all_of('[{"a": 1}, {"b": 2}]')[0] == [{"a": 1}, {"b": 2}]
    assert all_of('[{"a": 1},\n{"b": 2},\n', 4)[0] == [{"a": 1}, {"b": 2}]
    assert all_of("[]")[0] == []


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_is_called_empty(text: str) -> None:
    with pytest.raises(TraceError, match=r"t\.json: the file is empty"):
        all_of(text, 8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hello", "character 0: a trace begins with { or [ at 'hello'"),
        ('{"traceEvents": [{"a": 1}, {"b" 2}]}', "event 1: invalid JSON"),
        ('{"traceEvents": [{"a": 1} {"b": 2}]}', "',' or ']' is missing"),
        (
            '{"traceEvents": [{"a": 1}, {"b": "',
            "character 33, event 1: invalid JSON: Unterminated string at '\"'",
        ),
        ('{"traceEvents": [{"a": 1}', "',' or ']' is missing at the end of the file"),
        ('{"traceEvents": []} extra', "text after the end"),
        ("{1: 2}", "a key in quotes is missing"),
        ('{"a" 2}', "':' is missing"),
        ("[" * 100_000, "invalid JSON"),
        ('[{"n": ' + "9" * 5000 + "}]", "invalid JSON"),
    ],
)
def test_what_is_no_json_is_refused_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(TraceError) as error:
        all_of(text, 8)
    assert error.value.problems[0].startswith("t.json: character ")
    assert problem in str(error.value)
