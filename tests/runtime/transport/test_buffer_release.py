"""Promise: a send is released only where it is known to be received, and at the first such point."""

from __future__ import annotations

import random

import numpy as np
import pytest

import penstock
from penstock.ir.kinds import Kind
from penstock.ir.messages import Messages
from penstock.ir.schedule import Schedule
from penstock.lowering import AddCommunication
from penstock.runtime.program.program import release_points
from tests.support.random_schedules import random_valid

FAMILIES = ("gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev", "zb-h2")


def used_messages(schedule: Schedule) -> list[tuple[int, int]]:
    """The slots of send and consumer of every message."""
    messages = Messages.of(schedule.table)
    there = messages.used
    slot = schedule.table.slot
    return list(zip(slot[messages.send[there]].tolist(), slot[messages.consumer[there]].tolist()))


def reached_before(schedule: Schedule) -> list[set[int]]:
    """Per slot: every slot that must finish before it starts, by a plain graph traversal."""
    table = schedule.table
    needs: dict[int, list[int]] = {}
    for send, consumer in used_messages(schedule):
        needs.setdefault(consumer, []).append(send)
    found: dict[int, set[int]] = {}

    def before(slot: int) -> set[int]:
        todo = [slot]
        while todo:
            at = todo[-1]
            earlier = [at - 1] if at - 1 >= table.slot_bounds[table.rank[at]] else []
            inputs = [*earlier, *needs.get(at, [])]
            missing = [other for other in inputs if other not in found]
            if missing:
                todo += missing
            else:
                found[at] = {at, *(done for other in inputs for done in found[other])}
                todo.pop()
        return found[slot]

    return [before(slot) for slot in range(schedule.num_steps)]


def assert_first_points(schedule: Schedule) -> None:
    table = schedule.table
    consumer_of = dict(used_messages(schedule))
    before = reached_before(schedule)
    for rank in range(schedule.num_ranks):
        first, last = table.slot_bounds[rank : rank + 2].tolist()
        found = release_points(schedule, rank)
        position_of = {send: position for position, sends in found.at.items() for send in sends}
        sends = {i - first for i in range(first, last) if i in consumer_of}
        assert sends == set(position_of) | set(found.at_end)
        assert len(position_of) + len(found.at_end) == len(sends)
        for send in sends:
            used = consumer_of[send + first]
            known = [i - first for i in range(first, last) if used in before[i]]
            assert position_of.get(send) == (known[0] if known else None)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 5), (4, 8)])
def test_release_points_of_families_are_the_first_possible(name: str, ranks: int, microbatches: int) -> None:
    assert_first_points(penstock.lower(penstock.build(name, ranks=ranks, microbatches=microbatches)))


@pytest.mark.parametrize("seed", range(25))
def test_release_points_of_random_schedules_are_the_first_possible(seed: int) -> None:
    schedule = random_valid(random.Random(seed))
    assert_first_points(schedule if schedule.table.has_communication else AddCommunication()(schedule))


def test_an_activation_of_1f1b_is_released_by_its_own_gradient() -> None:
    schedule = penstock.lower(penstock.build("1f1b", ranks=2, microbatches=4))
    row = schedule.ranks[0]
    for position, sends in release_points(schedule, 0).at.items():
        for send in sends:
            (action,) = row[send].parts
            assert action.kind is Kind.SEND_F
            assert str(row[position]) == f"0B{action.microbatch}"


def test_the_number_of_pending_sends_does_not_grow_with_the_microbatches() -> None:
    def most_pending(microbatches: int) -> int:
        schedule = penstock.lower(penstock.build("1f1b", ranks=4, microbatches=microbatches))
        found = release_points(schedule, 1)
        pending = np.zeros(len(schedule.ranks[1]) + 1, dtype=np.int64)
        for position, sends in found.at.items():
            for send in sends:
                pending[send] += 1
                pending[position] -= 1
        return int(pending.cumsum().max())

    assert most_pending(64) == most_pending(16)


def test_limits_bound_the_pending_sends_of_each_channel() -> None:
    schedule = penstock.lower(penstock.build("gpipe", ranks=2, microbatches=32))
    for rank in range(2):
        points = release_points(schedule, rank, 3)
        release_at = {send: position for position, sends in points.at.items() for send in sends}
        for position, sends in points.limits.items():
            for send in sends:
                assert release_at.get(send, len(schedule.ranks[rank])) >= position
                release_at[send] = position
        pending = [0] * (len(schedule.ranks[rank]) + 1)
        for send in {*release_at, *points.at_end}:
            pending[send] += 1
            pending[release_at.get(send, -1)] -= 1
        assert np.cumsum(pending[:-1]).max() == 3


def test_limits_leave_the_known_release_points_as_they_are() -> None:
    schedule = penstock.lower(penstock.build("gpipe", ranks=2, microbatches=32))
    assert release_points(schedule, 0, 3)._replace(limits={}) == release_points(schedule, 0)
