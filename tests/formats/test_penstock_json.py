"""Promises of the JSON format: nothing is lost, and every problem is reported with its key."""

from __future__ import annotations

import json
import re

import pytest

from penstock import Placement, Schedule
from penstock.formats import dumps, reads
from tests.support.schedule_files import DOCUMENT, SMALL, document, problems_of


def test_json_has_the_documented_keys_and_a_line_per_rank() -> None:
    text = dumps(SMALL, "json")
    assert json.loads(text) == DOCUMENT
    assert len(text.splitlines()) == SMALL.num_ranks + 2


def test_json_keeps_placement_microbatches_and_name() -> None:
    schedule = Schedule([["0F0"], [], ["9UNSHARD"]], Placement((0, 1, 2, 1)), 5, 'a "name" · with signs\n')
    again = reads(dumps(schedule, "json"), "json")
    assert again == schedule
    assert again.name == schedule.name


@pytest.mark.parametrize("key", DOCUMENT)
def test_a_missing_key_is_named(key: str) -> None:
    without = {k: v for k, v in DOCUMENT.items() if k != key}
    (problem,) = problems_of(json.dumps(without), "json")
    assert problem.startswith(f"{key}: missing; expected ")


WRONG: list[tuple[str, object]] = [
    ("format", "penstock"),
    ("format", ["penstock-schedule"]),
    ("version", 2),
    ("version", True),
    ("version", 1.0),
    ("version", "1"),
    ("name", None),
    ("name", 1),
    ("microbatches", True),
    ("microbatches", 2.0),
    ("microbatches", "2"),
    ("microbatches", 0),
    ("microbatches", -1),
    ("microbatches", None),
    ("microbatches", float("nan")),
    ("level", "compiled"),
    ("level", []),
    ("level", {}),
    ("stage_to_rank", None),
    ("stage_to_rank", {"0": 0}),
    ("stage_to_rank", "01"),
    ("stage_to_rank", [False, True]),
    ("stage_to_rank", [0, 1.0]),
    ("stage_to_rank", [0, None]),
    ("stage_to_rank", [0, [1]]),
    ("ranks", None),
    ("ranks", "0F0"),
    ("ranks", {"0": ["0F0"]}),
    ("ranks", ["0F0", "1F0"]),
    ("ranks", [["0F0"], [1]]),
    ("ranks", [["0F0"], [None]]),
    ("ranks", [["0F0"], [["1F0"]]]),
    ("ranks", [["0F0"], [""]]),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=[f"{key}={value!r}" for key, value in WRONG])
def test_a_value_of_the_wrong_type_is_reported_with_what_is_expected(key: str, value: object) -> None:
    (problem,) = problems_of(document(**{key: value}), "json")
    assert problem.startswith(f"{key}: expected ")


def test_all_problems_of_keys_are_reported() -> None:
    changed = {**DOCUMENT, "version": 3, "comment": "hello", "level": 0}
    del changed["name"]
    problems = problems_of(json.dumps(changed), "json")
    assert {problem.split(":")[0] for problem in problems} == {"version", "comment", "level", "name"}


def test_all_invalid_actions_are_reported_with_their_location() -> None:
    problems = problems_of(document(ranks=[["0F0", "zz"], ["1F0", "1B0x", " "]]), "json")
    assert [problem.split(":")[0] for problem in problems] == ["ranks[0][1]", "ranks[1][1]", "ranks[1][2]"]


def test_problems_of_keys_and_actions_are_reported_together() -> None:
    problems = problems_of(document(version=3, ranks=[["0F0", "zz"], ["1F0"]]), "json")
    assert [problem.split(":")[0] for problem in problems] == ["version", "ranks[0][1]"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stage_to_rank", []),
        ("stage_to_rank", [-1, 0]),
        ("stage_to_rank", [0, 2]),
        ("stage_to_rank", [0, 10**12]),
        ("microbatches", 10**12),
        ("ranks", []),
        ("ranks", [["0F0"]]),
    ],
    ids=repr,
)
def test_inconsistent_numbers_are_rejected_with_their_key(key: str, value: object) -> None:
    (problem,) = problems_of(document(**{key: value}), "json")
    assert re.match(r"(stage_to_rank|microbatches|ranks)(\[\d+\])?: ", problem)


def test_a_level_that_does_not_match_the_steps_is_rejected() -> None:
    assert problems_of(document(level="lowered"), "json") == [
        "level: 'lowered' does not match the steps, which are 'compute'"
    ]


@pytest.mark.parametrize("text", ["{", "{'a': 1}", '{"a": 1,}', "0F0,0B0", '{"a": 1} {}', "\ufeff{}"])
def test_invalid_json_is_rejected_with_line_and_column(text: str) -> None:
    (problem,) = problems_of(text, "json")
    assert re.match(r"line 1, column \d+: invalid JSON: ", problem)


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_is_called_empty(text: str) -> None:
    assert problems_of(text, "json") == ["invalid JSON: the file is empty"]


def test_an_object_without_any_key_of_a_schedule_is_one_problem() -> None:
    (problem,) = problems_of('{"a": 1}', "json")
    assert problem.startswith("not a schedule: it has none of the keys format, version, ")


@pytest.mark.parametrize("text", ["[]", "null", "1", "true", '"0F0"'])
def test_json_that_is_not_an_object_is_rejected_with_the_expected_keys(text: str) -> None:
    (problem,) = problems_of(text, "json")
    assert "expected a JSON object with the keys format, version, name" in problem
    assert "NoneType" not in problem


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000])
def test_deep_nesting_is_rejected(text: str) -> None:
    (problem,) = problems_of(text, "json")
    assert "JSON" in problem


@pytest.mark.parametrize("digits", [30, 4000, 100_000])
@pytest.mark.parametrize("key", ["version", "microbatches", "stage_to_rank"])
def test_huge_numbers_are_rejected_with_a_short_message(key: str, digits: int) -> None:
    huge = "9" * digits
    text = document(**{key: None}).replace("null", f"[0, {huge}]" if key == "stage_to_rank" else huge)
    (problem,) = problems_of(text, "json")
    assert len(problem) < 500


def test_a_duplicate_key_is_rejected() -> None:
    (problem,) = problems_of('{"microbatches": 3, ' + document()[1:], "json")
    assert problem == "microbatches: duplicate key"


@pytest.mark.parametrize("key", ["a\nb", "\x1b[2J", "", "k" * 100_000])
def test_an_unknown_key_is_reported_in_one_short_printable_line(key: str) -> None:
    (problem,) = problems_of(document(**{key: 1}), "json")
    assert problem.isprintable()
    assert len(problem) < 500
