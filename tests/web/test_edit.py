"""Promises of the editor's API: a verdict for every schedule, times as far as it runs, what could run next."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import FormatError
from penstock.web.answers import REQUESTS, lay_out, ready_steps
from tests.support.grids import examples
from tests.support.schedule_rows import rows_of


def edit(*rows: str, stage_to_rank: tuple[int, ...] = (0, 1), microbatches: int = 2) -> Any:
    steps = [row.split() for row in rows]
    source = {"steps": steps, "stage_to_rank": list(stage_to_rank), "microbatches": microbatches}
    return REQUESTS["edit"]({"schedules": [source]})


def test_a_valid_schedule_has_times_and_its_name() -> None:
    answer = edit("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert answer["verdict"]["valid"]
    assert "1f1b" in answer["verdict"]["order"]["families"]
    assert answer["row"]["makespan"] == 9
    assert answer["ready"] == []


def test_a_deadlock_has_its_cycle_and_the_steps_that_are_never_reached() -> None:
    answer = edit("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    (violation,) = answer["verdict"]["violations"]
    assert violation["code"] == "deadlock"
    assert [wait["action"] for wait in violation["cycle"]] == ["0B0", "1F1"]
    assert answer["row"] is None
    assert answer["unreached"] == [1, 2, 3, 4, 5, 6, 7]
    assert answer["blocked"][:2] == [1, 4]
    assert len(answer["data"]["timelines"][0]["steps"]["start"]) == 8


@given(st.data())
@settings(max_examples=examples(200))
def test_every_order_of_steps_is_drawn_without_overlaps(data: st.DataObject) -> None:
    built = penstock.build(data.draw(st.sampled_from(["1f1b", "zb-h1", "zbv"])), ranks=3, microbatches=3)
    rows = [data.draw(st.permutations([str(step) for step in row])) for row in built.ranks]
    kept = [row[: data.draw(st.integers(0, len(row)))] for row in rows]
    schedule = penstock.Schedule(kept, built.placement, 3, "edited")
    found = lay_out(schedule, penstock.Costs(latency=0.25))
    for first, last in zip(schedule.table.slot_bounds, schedule.table.slot_bounds[1:]):
        starts, ends = found.timeline.start[first:last], found.timeline.end[first:last]
        assert (starts[1:] >= ends[:-1] - 1e-9).all()
    REQUESTS["edit"](
        {
            "schedules": [
                {"steps": kept, "stage_to_rank": list(built.placement.stage_to_rank), "microbatches": 3}
            ]
        }
    )


def test_ready_steps_build_a_valid_schedule_from_nothing() -> None:
    rows: list[list[str]] = [[], []]
    placement = penstock.Placement((0, 1))
    for _ in range(100):
        schedule = penstock.Schedule(rows, placement, 2, "mine")
        ready = ready_steps(schedule, penstock.Costs(), split=True)
        if not ready:
            break
        chosen = min(ready, key=lambda each: each["start"])
        rows[chosen["rank"]].append(chosen["text"])
    assert penstock.validate(penstock.Schedule(rows, placement, 2)) == []


def test_a_building_block_is_stamped_for_all_microbatches() -> None:
    source = {"family": "1f1b", "ranks": 3, "microbatches": 6}
    stamped = REQUESTS["stamp"]({"schedules": [source], "microbatch": 0, "interval": 3})
    built = penstock.build("1f1b", ranks=3, microbatches=6)
    assert stamped["steps"] == rows_of(built)


@pytest.mark.parametrize("wrong", [{"microbatch": 9, "interval": 1}, {"microbatch": 0, "interval": 0}])
def test_a_wrong_stamp_is_refused(wrong: dict[str, Any]) -> None:
    source = {"family": "1f1b", "ranks": 2, "microbatches": 2}
    with pytest.raises(FormatError, match="interval: above 0"):
        REQUESTS["stamp"]({"schedules": [source], **wrong})
