"""Promises of `lower`: passes in order, a valid schedule in, a valid schedule out."""

from __future__ import annotations

import pytest

import penstock
from penstock import Schedule, ScheduleError
from penstock.lowering import (
    DEFAULT_PASSES,
    AddSharding,
    DeferReceives,
    Pass,
    lower,
)
from tests.support.passes import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_lowering_keeps_the_compute_order_and_its_input(name: str) -> None:
    schedule = penstock.build(name, ranks=3, microbatches=5)
    before = str(schedule)
    lowered = lower(schedule, (*DEFAULT_PASSES, DeferReceives()))
    assert str(schedule) == before
    compute, given = (
        [[step for step in row if step.kind.is_compute] for row in each.ranks] for each in (lowered, schedule)
    )
    assert compute == given


def test_the_trace_shows_the_schedule_after_every_pass() -> None:
    seen: list[tuple[str, int]] = []
    lower(
        penstock.build("1f1b", ranks=2, microbatches=2), trace=lambda name, s: seen.append((name, s.num_steps))
    )
    assert seen == [("add-sharding", 12), ("add-reduce-grad", 14), ("add-communication", 22)]


@pytest.mark.parametrize("again", DEFAULT_PASSES)
def test_a_pass_rejects_a_schedule_that_has_what_it_adds(again: Pass) -> None:
    lowered = lower(penstock.build("1f1b", ranks=2, microbatches=2))
    with pytest.raises(ScheduleError, match=f"{again.name}: the schedule already has"):
        again(lowered)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0F0 0B0 0F1 0B1 | 1F1 1B1 1F0 1B0", "deadlock"),
        ("0F0 0F0 0B0 | 1F0", "duplicate-action"),
    ],
)
def test_an_invalid_schedule_is_rejected_with_its_report(text: str, code: str) -> None:
    for passes in (DEFAULT_PASSES, (AddSharding(),), ()):
        with pytest.raises(ScheduleError, match=rf"error\[{code}\]"):
            lower(Schedule.parse(text), passes)
