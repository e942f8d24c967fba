"""Promises of policies: their text, and what is refused."""

from __future__ import annotations

import pytest

from penstock import ScheduleError
from penstock.lowering import Policy, parse_policy


@pytest.mark.parametrize(
    ("text", "stages", "policy"),
    [
        ("all", None, Policy()),
        ("every=2", None, Policy(every=2)),
        ("longer=4", None, Policy(longer=4)),
        ("3", (3,), Policy()),
        ("0-2", (0, 1, 2), Policy()),
        ("0,2-3,3:all", (0, 2, 3), Policy()),
        ("0,3:every=2", (0, 3), Policy(every=2)),
        ("0-2:longer=4", (0, 1, 2), Policy(longer=4)),
    ],
)
def test_a_policy_is_read_from_text(text: str, stages: tuple[int, ...] | None, policy: Policy) -> None:
    assert parse_policy(text) == (stages, policy)


@pytest.mark.parametrize("text", ["", "0:", ":all", "every=", "some", "0-2every=2", "every=2,longer=3"])
def test_other_text_is_refused_with_the_forms_that_there_are(text: str) -> None:
    with pytest.raises(
        ScheduleError, match=r"unknown policy .*; policies are all, every=N, longer=N, or stages"
    ):
        parse_policy(text)


def test_stages_that_are_none_or_not_there_are_refused() -> None:
    with pytest.raises(ScheduleError, match="the stages 3-1 are none; write 1-3"):
        parse_policy("0,3-1")
    with pytest.raises(ScheduleError, match=r"stages must be from 0 to 3 \(given 0-999999999\)"):
        parse_policy("0-999999999:every=2", 4)
    assert parse_policy("0-3", 4) == ((0, 1, 2, 3), Policy())


@pytest.mark.parametrize("given", [{"every": 0}, {"every": 1.5}, {"longer": -2}])
def test_numbers_that_choose_nothing_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(ScheduleError, match="must be a whole number of at least"):
        Policy(**given)
