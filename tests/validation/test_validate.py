"""Each rule by its smallest example: the code, the place, and the steps around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock import Placement, Schedule, ScheduleError

RIGHT = "0F0 0SEND_F0 0RECV_B0 0B0 | 1RECV_F0 1F0 1B0 1SEND_B0"


MIXED_UP = (
    "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1 | 1RECV_F1 1RECV_F0 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1"
)


# text, code, rank, step, action; two stages on two ranks, one microbatch unless the text has more
EXAMPLES = [
    ("2F0 0F0 0B0 | 1F0 1B0", "stage-out-of-range", 0, 0, "2F0"),
    ("0F0 0F1 0B0 | 1F0 1B0", "microbatch-out-of-range", 0, 1, "0F1"),
    ("0F0 0B0 1F0 | 1B0", "wrong-rank", 0, 2, "1F0"),
    ("0F0 0F0 0B0 | 1F0 1B0", "duplicate-action", 0, 1, "0F0"),
    ("0B0 | 1F0 1B0", "missing-forward", 0, None, None),
    ("0F0 | 1F0 1B0", "missing-backward", 0, None, None),
    ("0F0 0I0 | 1F0 1B0", "missing-weight-gradient", 0, None, None),
    ("0F0 0W0 | 1F0 1B0", "missing-input-gradient", 0, None, None),
    ("0F0 0I0 0W0 0B0 | 1F0 1B0", "mixed-backward", 0, None, None),
    ("0B0 0F0 | 1F0 1B0", "backward-before-forward", 0, 0, "0B0"),
    ("0F0 0W0 0I0 | 1F0 1B0", "weight-before-input", 0, 1, "0W0"),
    ("1F0 0F0 1B0 0B0", "used-before-computed", 0, 0, "1F0"),
    ("0F0 1F0 0B0 1B0", "used-before-computed", 0, 2, "0B0"),
    ("0F0 (1F0;1B0)OVERLAP_F_B 0B0", "overlap-dependent", 0, 1, "1B0"),
    ("0F0 0SEND_F0 0RECV_B0 0B0 | 1F0 1B0 1SEND_B0", "unmatched-send", 0, 1, "0SEND_F0"),
    ("0F0 0RECV_B0 0B0 | 1RECV_F0 1F0 1B0 1SEND_B0", "unmatched-receive", 1, 0, "1RECV_F0"),
    ("0F0 0SEND_F0 0B0 | 1RECV_F0 1F0 1B0", "missing-message", 0, 2, "0B0"),
    (f"{RIGHT} 1SEND_F0", "needless-message", 1, 4, "1SEND_F0"),
    ("0SEND_F0 0F0 0RECV_B0 0B0 | 1RECV_F0 1F0 1B0 1SEND_B0", "send-before-compute", 0, 0, "0SEND_F0"),
    ("0F0 0SEND_F0 0RECV_B0 0B0 | 1F0 1RECV_F0 1B0 1SEND_B0", "used-before-received", 1, 0, "1F0"),
    (
        MIXED_UP,
        "channel-order",
        1,
        0,
        "1RECV_F1",
    ),
    ("0F0 0UNSHARD 0B0 0RESHARD | 1UNSHARD 1F0 1B0 1RESHARD", "compute-while-sharded", 0, 0, "0F0"),
    ("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD | 1UNSHARD 1F0 1B0 1RESHARD", "double-unshard", 0, 2, "0UNSHARD"),
    (
        "0UNSHARD 0RESHARD 0UNSHARD 0F0 0B0 0RESHARD | 1UNSHARD 1F0 1B0 1RESHARD",
        "unused-unshard",
        0,
        0,
        "0UNSHARD",
    ),
    (
        "0UNSHARD 0F0 0B0 0RESHARD 0RESHARD | 1UNSHARD 1F0 1B0 1RESHARD",
        "reshard-without-unshard",
        0,
        4,
        "0RESHARD",
    ),
    ("0UNSHARD 0F0 0B0 | 1UNSHARD 1F0 1B0 1RESHARD", "left-unsharded", 0, 2, "0B0"),
    ("0F0 0B0 | 1F0 1B0 1REDUCE_GRAD", "missing-reduce-grad", 0, None, None),
    ("0F0 0REDUCE_GRAD | 1F0", "needless-reduce-grad", 0, 1, "0REDUCE_GRAD"),
    ("0F0 0REDUCE_GRAD 0B0 | 1F0 1B0 1REDUCE_GRAD", "reduce-before-last-backward", 0, 1, "0REDUCE_GRAD"),
    ("0F0 0B0 0F1 0B1 | 1F1 1B1 1F0 1B0", "deadlock", 0, 1, "0B0"),
    ("0RECOMPUTE0 0F0 0B0 | 1F0 1B0", "recompute-before-forward", 0, 0, "0RECOMPUTE0"),
    ("0F0 0B0 0RECOMPUTE0 | 1F0 1B0", "used-before-recomputed", 0, 1, "0B0"),
    ("0F0 0RECOMPUTE0 0RECOMPUTE0 0B0 | 1F0 1B0", "duplicate-action", 0, 2, "0RECOMPUTE0"),
    ("0F0 0RECOMPUTE0 | 1F0", "needless-recompute", 0, 1, "0RECOMPUTE0"),
    ("0F0 | 1F0 1OFFLOAD0 1RELOAD0", "needless-offload", 1, 1, "1OFFLOAD0"),
    ("0OFFLOAD0 0F0 0RELOAD0 0B0 | 1F0 1B0", "offload-before-forward", 0, 0, "0OFFLOAD0"),
    ("0F0 0OFFLOAD0 0B0 | 1F0 1B0", "missing-reload", 0, 1, "0OFFLOAD0"),
    ("0F0 0RELOAD0 0B0 | 1F0 1B0", "reload-without-offload", 0, 1, "0RELOAD0"),
    ("0F0 0RELOAD0 0OFFLOAD0 0B0 | 1F0 1B0", "reload-before-offload", 0, 1, "0RELOAD0"),
    ("0F0 0OFFLOAD0 0I0 0RELOAD0 0W0 | 1F0 1B0", "used-before-reloaded", 0, 2, "0I0"),
    ("0F0 0OFFLOAD0 0RECOMPUTE0 0RELOAD0 0B0 | 1F0 1B0", "used-before-reloaded", 0, 2, "0RECOMPUTE0"),
    ("0F0 0I0 0OFFLOAD0 0RELOAD0 0W0 | 1F0 1B0", "offload-after-backward", 0, 2, "0OFFLOAD0"),
    ("0F0 0RECOMPUTE0 0OFFLOAD0 0RELOAD0 0B0 | 1F0 1B0", "offload-after-recompute", 0, 2, "0OFFLOAD0"),
    (
        "0UNSHARD 0F0 0RESHARD 0RECOMPUTE0 0UNSHARD 0B0 0RESHARD | 1UNSHARD 1F0 1B0 1RESHARD",
        "compute-while-sharded",
        0,
        3,
        "0RECOMPUTE0",
    ),
]


def parsed(text: str) -> Schedule:
    ranks = text.count("|") + 1
    placement = Placement.loop(ranks, 2 // ranks)
    microbatches = 2 if "F1" in text and "1F1" in text else 1
    return Schedule.parse(text, placement, microbatches)


@pytest.mark.parametrize(("text", "code", "rank", "step", "action"), EXAMPLES)
def test_each_violation_is_reported_at_its_place(
    text: str, code: str, rank: int, step: int | None, action: str | None
) -> None:
    found = [v for v in penstock.validate(parsed(text)) if v.code == code]
    assert found, penstock.validate(parsed(text))
    violation = found[0]
    assert (violation.rank, violation.step) == (rank, step)
    assert (None if violation.action is None else str(violation.action)) == action
    assert violation.message[-1] not in ".,;"
    assert violation.suggestion


def test_every_code_of_the_docs_has_an_example_here() -> None:
    """The list in docs/check.md is what these examples produce."""
    with open("docs/check.md", encoding="utf-8") as file:  # noqa: PTH123 -- one line of reading
        documented = {line.split("`")[1] for line in file if line.startswith("| `")}
    assert documented >= {code for _, code, *_ in EXAMPLES}


def test_a_valid_schedule_has_no_violations() -> None:
    assert penstock.validate(Schedule.parse(RIGHT)) == []


def test_what_is_recomputed_and_offloaded_in_its_order_is_valid() -> None:
    both = "0F0 0OFFLOAD0 0F1 0RELOAD0 0RECOMPUTE0 0I0 0W0 0RECOMPUTE1 0B1 | 1F0 1B0 1F1 1OFFLOAD1 1RELOAD1 1B1"
    assert penstock.validate(Schedule.parse(both)) == []


def test_all_violations_are_reported_at_once() -> None:
    found = penstock.validate(Schedule.parse("0F0 0F0 5F0 0B1 | 1F0", Placement.loop(2), 2))
    assert {violation.code for violation in found} >= {
        "stage-out-of-range",
        "duplicate-action",
        "missing-forward",
        "missing-backward",
    }


@pytest.mark.parametrize("rows", [[[]], [[], []]])
def test_a_schedule_without_steps_is_validated(rows: list[list[str]]) -> None:
    found = penstock.validate(Schedule(rows, Placement.loop(len(rows)), 1))
    assert {violation.code for violation in found} == {"missing-forward"}


def test_forward_only_schedules_are_valid() -> None:
    assert penstock.validate(Schedule.parse("0F0 0F1 | 1F0 1F1")) == []


def test_an_unknown_send_model_is_rejected() -> None:
    with pytest.raises(ScheduleError, match="unknown send model 'nccl'; the send models are buffered"):
        penstock.validate(Schedule.parse(RIGHT), send_model="nccl")


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("0UNSHARD 0F0 0RESHARD 0UNSHARD", ["unused-unshard"]),
        ("0UNSHARD 0UNSHARD 0F0 0RESHARD", ["double-unshard"]),
        ("0F0 0SEND_F0 | 1F0 1RECV_F0", ["used-before-received"]),
    ],
)
def test_one_mistake_is_one_violation(text: str, codes: list[str]) -> None:
    assert [violation.code for violation in penstock.validate(Schedule.parse(text))] == codes


# the hand-made schedules that the project was started from, each in a few lines
SEEDS = {
    "V-shaped": "0F0 3F0 3B0 0B0 | 1F0 2F0 2B0 1B0",
    "unbalanced": "0F0 1F0 4F0 4B0 1B0 0B0 | 2F0 3F0 3B0 2B0",
    "with W": "0F0 0F1 2F0 2F1 2I0 2W0 0I0 2I1 0W0 0I1 2W1 0W1 | "
    "1F0 1F1 3F0 3I0 3F1 1I0 3I1 3W0 1I1 1W0 3W1 1W1",
    "reordered B": "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1 | "
    "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
}


@pytest.mark.parametrize("text", SEEDS.values(), ids=SEEDS)
def test_the_hand_made_schedules_of_the_seeds_are_valid(text: str) -> None:
    schedule = Schedule.parse(text)
    assert penstock.validate(schedule) == []
    if schedule.level == "compute":
        assert penstock.validate(penstock.lower(schedule)) == []


def test_the_stages_of_the_seeds_are_where_they_were() -> None:
    stages = [Schedule.parse(text).placement.stages_of_rank for text in SEEDS.values()]
    assert stages == [((0, 3), (1, 2)), ((0, 1, 4), (2, 3)), ((0, 2), (1, 3)), ((0,), (1,))]


def test_several_microbatches_are_plural() -> None:
    (violation,) = penstock.validate(Schedule.parse("0F0 0F1 | 1F0 1B0 1F1 1B1"))
    assert violation.message == "stage 0 has no backward of microbatches 0-1"


@pytest.mark.parametrize("ask", [penstock.validate, penstock.lower, penstock.simulate])
def test_what_is_no_schedule_is_reported(ask: Callable[[Any], object]) -> None:
    with pytest.raises(ScheduleError, match=r"must be a Schedule \(given 'mine.csv'\): penstock.read"):
        ask("mine.csv")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("0F1 0B1 | 1F1 1B1", "microbatches are numbered from 0"),
        ("0F0 0B0 | 2F0 2B0", "stages are numbered from 0 without gaps"),
        ("0F0 0B0 0F1 0B1 | 1F0 1B0 1B1", "every stage runs the forward of every microbatch once"),
    ],
)
def test_a_missing_forward_names_the_likely_cause(text: str, hint: str) -> None:
    missing = [each for each in penstock.validate(Schedule.parse(text)) if each.code == "missing-forward"]
    assert missing
    for each in missing:
        assert (each.suggestion or "").endswith(hint)
