"""Promises of the report: it stays short, and shows the steps around each place."""

from __future__ import annotations

import penstock
from penstock import Schedule
from penstock.validation import report


def test_the_report_shows_the_first_violations_of_a_code_and_counts_the_rest() -> None:
    schedule = Schedule.parse(" ".join(["0F0"] * 31))
    text = report(schedule, penstock.validate(schedule))
    assert text.count("duplicate action: ") == 20
    assert text.endswith("error[duplicate-action]: 10 more of these")


def test_a_long_list_is_shown_only_around_the_violation() -> None:
    schedule = Schedule.parse(" ".join(f"0F{k}" for k in range(20)) + " 0F19")
    (violation,) = penstock.validate(schedule)
    assert report(schedule, [violation]).split("\n")[-1] == "    rank 0 | ... 0F16 0F17 0F18 0F19 [0F19]"
