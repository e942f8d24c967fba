"""Promise: each lesson has a solution, its par is the proved optimum, and its start does not reach it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

import penstock
from penstock import Placement, SearchResult
from penstock.errors import PenstockError
from penstock.web.lessons import Lesson, judge, lesson_catalogue, lessons
from tests.oracles.best_order import best_value
from tests.support.grids import small
from tests.support.schedule_rows import rows_of

KEYS = (
    "warm-up",
    "1f1b",
    "deadlock",
    "zero-bubble",
    "v",
    "memory-limit",
    "heavy-last-stage",
    "slow-link",
    "recompute",
    "overlap",
)


SOLUTIONS = {
    "warm-up": "0F0 0F1 0F2 0B0 0B1 0B2|1F0 1B0 1F1 1B1 1F2 1B2",
    "1f1b": "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4|1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4|"
    "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    "deadlock": "0F0 0F1 0F2 0B0 0B1 0B2|1F0 1F1 1B0 1F2 1B1 1B2|2F0 2B0 2F1 2B1 2F2 2B2",
    "zero-bubble": "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3|1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3|"
    "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    "v": "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2|"
    "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    "memory-limit": "0F0 0F1 0I0 0W0 0I1 0F2 0W1 0F3 0I2 0W2 0I3 0W3|"
    "1F0 1F1 1I0 1W0 1I1 1W1 1F2 1F3 1I2 1W2 1I3 1W3|2F0 2I0 2F1 2I1 2W0 2W1 2F2 2I2 2F3 2I3 2W2 2W3",
    "heavy-last-stage": "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3|1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3|"
    "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    "slow-link": "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5|"
    "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5",
    "recompute": "0F0 0F1 0F2 0B0 0B1 0RECOMPUTE2 0B2|1F0 1F1 1B0 1F2 1B1 1B2|2F0 2B0 2F1 2B1 2F2 2B2",
    "overlap": "0F0 0F1 0F2 0B0 0B1 0B2|1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B 1B2",
}


def best(lesson: Lesson, *, split: bool | None = None, recompute: bool | None = None) -> SearchResult:
    return penstock.search(
        ranks=len(lesson.steps),
        microbatches=lesson.start.microbatches,
        costs=lesson.costs,
        placement=Placement(lesson.stage_to_rank),
        memory_limit=lesson.memory_limit,
        seconds=30,  # a proof ends it earlier
        split="I" in lesson.kinds if split is None else split,
        recompute="RECOMPUTE" in lesson.kinds if recompute is None else recompute,
    )


@cache
def proof(key: str) -> SearchResult:
    return best(lessons()[key])


def test_the_lessons_are_the_ten_of_the_list() -> None:
    assert tuple(lessons()) == KEYS
    assert [entry["key"] for entry in lesson_catalogue()["lessons"]] == list(KEYS)
    json.dumps(lesson_catalogue(), allow_nan=False)


@pytest.mark.parametrize("key", KEYS)
@small(lambda key: key != "overlap")
def test_par_is_the_proved_optimum(key: str) -> None:
    result = proof(key)
    assert result.proved
    assert result.value == lessons()[key].par == pytest.approx(result.bound.seconds)


@pytest.mark.parametrize("key", [key for key in KEYS if key != "recompute"])
def test_par_is_the_best_of_all_orders(key: str) -> None:
    lesson = lessons()[key]
    least = best_value(
        Placement(lesson.stage_to_rank),
        lesson.start.microbatches,
        lesson.costs,
        lesson.memory_limit,
        split="I" in lesson.kinds,
        objective="makespan",
        pairs="OVERLAP_F_B" in lesson.kinds,
    )
    assert least == pytest.approx(lesson.par)


@pytest.mark.parametrize("key", KEYS)
@small(lambda key: key != "overlap")
def test_a_schedule_that_reaches_par_solves_the_lesson(key: str) -> None:
    verdict = judge({"lesson": key, "steps": rows_of(proof(key).schedule)})
    assert verdict["solved"], verdict["message"]
    assert verdict["makespan"] == lessons()[key].par
    assert verdict["explanation"]


@pytest.mark.parametrize("key", KEYS)
def test_the_start_does_not_solve_the_lesson(key: str) -> None:
    lesson = lessons()[key]
    verdict = judge({"lesson": key, "steps": rows_of(lesson.start)})
    assert not verdict["solved"]
    assert verdict["explanation"] is None
    assert verdict["message"]
    codes = {violation.code for violation in penstock.validate(lesson.start)}
    assert codes == ({"deadlock"} if key == "deadlock" else set())


@pytest.mark.parametrize("key", KEYS)
@small(lambda key: key != "overlap")
def test_the_allowed_moves_lead_to_par(key: str) -> None:
    lesson = lessons()[key]
    rows = [row.split() for row in SOLUTIONS[key].split("|")]
    assert judge({"lesson": key, "steps": rows})["solved"]
    start = sorted(step for row in rows_of(lesson.start) for step in row)
    assert sorted(undone(lesson, " ".join(map(" ".join, rows))).split()) == start


def undone(lesson: Lesson, steps: str) -> str:
    """The steps of an attempt before the moves that the lesson allows."""
    if "split" in lesson.moves:
        steps = re.sub(r"(\d)I(\d)", r"\1B\2", re.sub(r"\dW\d", "", steps))
    if "recompute" in lesson.moves:
        steps = re.sub(r"\dRECOMPUTE\d", "", steps)
    if "pair" in lesson.moves:
        steps = re.sub(r"\((\w+);(\w+)\)OVERLAP_F_B", r"\1 \2", steps)
    return steps


@pytest.mark.parametrize(
    ("key", "other", "least"), [("zero-bubble", {"split": False}, 18), ("recompute", {"recompute": False}, 18)]
)
def test_without_the_technique_the_optimum_is_what_the_explanation_says(
    key: str, other: dict[str, bool], least: float
) -> None:
    result = best(lessons()[key], **other)
    assert (result.value, result.proved) == (least, True)
    assert str(least) in lessons()[key].explanation


def test_without_the_limit_fourteen_seconds_are_possible() -> None:
    result = best(replace(lessons()["memory-limit"], memory_limit=None))
    assert (result.value, result.proved) == (14, True)
    assert "14" in lessons()["memory-limit"].explanation


def test_the_cycle_of_the_deadlock_is_the_one_in_its_explanation() -> None:
    (violation,) = penstock.validate(lessons()["deadlock"].start)
    text = lessons()["deadlock"].explanation
    waits = {(str(wait.action), str(wait.for_action)) for wait in violation.cycle}
    named = re.findall(r"\d[FB]\d", text)
    assert waits <= set(pairwise(named)), waits


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "lesson: use warm-up"),
        ({"lesson": "chess", "steps": [["0F0"]]}, "given 'chess'"),
        ({"lesson": "v"}, "steps: expected a list"),
        ({"lesson": "v", "steps": [[1]]}, "a step is a text"),
        ({"lesson": "v", "steps": [["0F0"] * 201, []]}, "at most 200"),
        ({"lesson": "v", "steps": [["0F0"]]}, "the placement has 2 ranks"),
        ({"lesson": "v", "steps": [["<b>"], []]}, "<b>"),
        ({"lesson": "v", "steps": [["0F67108864"], []]}, "67108864"),
    ],
)
def test_a_document_that_is_no_attempt_gets_a_message(document: object, message: str) -> None:
    with pytest.raises(PenstockError, match=re.escape(message)):
        judge(document)


def test_other_kinds_than_those_of_the_lesson_are_refused() -> None:
    rows = [["0F0", "0I0", "0W0", "0F1", "0B1", "0F2", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]
    verdict = judge({"lesson": "warm-up", "steps": rows})
    assert verdict["message"] == "This lesson uses F, B only: remove I, W."
    assert not verdict["solved"]


def test_leaving_work_out_solves_nothing() -> None:
    verdict = judge({"lesson": "warm-up", "steps": [["0F0", "0B0"], ["1F0", "1B0"]]})
    assert verdict["message"].startswith("Not valid yet")
