"""Promise: valid schedules are accepted, and each violation is reported by its rule."""

from __future__ import annotations

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Schedule
from penstock.ir.kinds import SEND_WAITS, Kind
from penstock.lowering import AddCommunication, DeferReceives
from penstock.validation import SendModel
from tests.oracles.naive import NaiveValidator
from tests.support.grids import examples
from tests.support.random_schedules import mutate, random_compute, random_valid, with_waits
from tests.support.schedule_rows import rows_of, with_moved_step

seeds = st.integers(min_value=0, max_value=2**32)


def naive(schedule: Schedule) -> NaiveValidator:
    rows = rows_of(schedule)
    return NaiveValidator(rows, schedule.placement.stage_to_rank, schedule.microbatches)


@settings(max_examples=examples(400), deadline=None)
@given(seeds)
def test_any_legal_interleaving_is_accepted(seed: int) -> None:
    schedule = random_valid(random.Random(seed))
    assert naive(schedule).is_valid()
    assert penstock.validate(schedule) == []


# What each change may be called. A change of id makes something missing and something there that should not
# be; a changed order shows wherever the order matters.
_ORDER = {
    "backward-before-forward",
    "weight-before-input",
    "used-before-computed",
    "overlap-dependent",
    "used-before-received",
    "send-before-compute",
    "channel-order",
    "deadlock",
    "reduce-before-last-backward",
    "compute-while-sharded",
    "double-unshard",
    "unused-unshard",
    "reshard-without-unshard",
    "left-unsharded",
    "recompute-before-forward",
    "offload-before-forward",
    "reload-before-offload",
    "used-before-recomputed",
    "used-before-reloaded",
    "offload-after-backward",
    "offload-after-recompute",
    "wait-before-send",
    "wait-before-reduction",
}
_MISSING = {
    "missing-forward",
    "missing-backward",
    "missing-weight-gradient",
    "missing-input-gradient",
    "unmatched-send",
    "unmatched-receive",
    "missing-message",
    "missing-reduce-grad",
    "send-before-compute",
    "needless-reduce-grad",
    "compute-while-sharded",
    "double-unshard",
    "unused-unshard",
    "reshard-without-unshard",
    "left-unsharded",
    "missing-reload",
    "reload-without-offload",
    "missing-send-wait",
    "missing-reduction-wait",
    "wait-without-send",
    "wait-without-reduction",
    "needless-recompute",
    "needless-offload",
}
_RENAMED = {"duplicate-action", "mixed-backward", "needless-message", "wrong-rank"}
CAUSES = {
    "drop": _MISSING,
    "duplicate": {"duplicate-action"} | _ORDER,
    "swap": _ORDER,
    "shift": _ORDER,
    "move": {"wrong-rank"} | _ORDER,
    "stage": {"stage-out-of-range"} | _RENAMED | _MISSING | _ORDER,
    "microbatch": {"microbatch-out-of-range"} | _RENAMED | _MISSING | _ORDER,
}


@settings(max_examples=examples(3000), deadline=None)
@given(seeds)
def test_any_single_change_is_reported_by_its_rule_or_leaves_the_schedule_valid(seed: int) -> None:
    rng = random.Random(seed)
    mutation = mutate(random_valid(rng), rng)
    found = penstock.validate(mutation.schedule)
    assert (found == []) == naive(mutation.schedule).is_valid(), (mutation, str(mutation.schedule))
    codes = {violation.code for violation in found}
    assert not codes or codes & CAUSES[mutation.what], (mutation.what, codes, str(mutation.schedule))


@settings(max_examples=examples(2000), deadline=None)
@given(seeds)
def test_a_deadlock_is_reported_for_exactly_the_send_models_under_which_the_ranks_get_stuck(
    seed: int,
) -> None:
    rng = random.Random(seed)
    schedule = random_valid(rng)
    for _ in range(rng.randint(1, 4)):
        schedule = with_moved_step(schedule, rng)
    for violation in checked_deadlocks(schedule):
        assert_suggestion_helps(schedule, violation)


@settings(max_examples=examples(2000), deadline=None)
@given(seeds)
def test_lists_with_waits_for_sends_deadlock_under_exactly_the_models_that_block_a_literal_interpreter(
    seed: int,
) -> None:
    rng = random.Random(seed)
    lowered = penstock.lower(random_compute(rng), [AddCommunication(), DeferReceives(past_sends=True)])
    schedule = with_waits(rng, lowered)
    for _ in range(rng.randint(0, 2)):
        schedule = with_moved_step(schedule, rng)
    checked_deadlocks(schedule)


def test_waits_that_wait_for_each_others_later_receives_are_refused() -> None:
    """Torch 2.15 accepts this list, and hangs."""
    first = "0F0 0SEND_F0 0F1 0SEND_F1 0WAIT_SEND_F0 0WAIT_SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    second = "1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_SEND_B1"
    waiting = Schedule.parse(f"{first} | {second}")
    (violation,) = penstock.validate(waiting, "edge-streams")
    assert {"0WAIT_SEND_F1", "1WAIT_SEND_B0"} <= {str(wait.action) for wait in violation.cycle}
    assert penstock.validate(waiting, "buffered") == []
    without = waiting.only([kind for kind in Kind if kind not in SEND_WAITS])
    assert penstock.validate(without, "edge-streams") == []


def checked_deadlocks(schedule: Schedule) -> list[penstock.Violation]:
    """The deadlocks of a schedule that has no other violation, compared with a literal run under each model."""
    found = penstock.validate(schedule)
    if not {violation.code for violation in found} <= {"deadlock"}:
        return []
    blocked = tuple(model for model in SendModel if not naive(schedule).runs(model.value))
    assert blocked == (found[0].send_models if found else ())
    for violation in found:
        assert_is_cycle(schedule, violation)
    return list(found)


def assert_is_cycle(schedule: Schedule, violation: penstock.Violation) -> None:
    """Every wait is for a step that its rank reaches only after the next waiting step, round to the first."""
    waits = violation.cycle
    assert waits
    for wait, then in zip(waits, waits[1:] + waits[:1], strict=True):
        assert str(schedule.ranks[wait.rank][wait.step]) == str(wait.action)
        assert str(schedule.ranks[wait.for_rank][wait.for_step]) == str(wait.for_action)
        assert wait.for_rank == then.rank
        assert then.step <= wait.for_step


def assert_suggestion_helps(schedule: Schedule, violation: penstock.Violation) -> None:
    """A move that is suggested makes the schedule valid, or breaks nothing and says that more is to be done."""
    move = re.fullmatch(
        r"on rank (\d+), move (\S+) (before|after) (\S+)(, then check again)?", violation.suggestion
    )
    if move is None:
        assert violation.suggestion == "change the order of one of these ranks"
        return
    rows = rows_of(schedule)
    row = rows[int(move[1])]
    row.remove(move[2])
    row.insert(row.index(move[4]) + (move[3] == "after"), move[2])
    left = {v.code for v in penstock.validate(Schedule(rows, schedule.placement, schedule.microbatches))}
    assert left <= ({"deadlock"} if move[5] else set())
