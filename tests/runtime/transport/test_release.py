"""Promise: a send is released only where it is certain to be received, and as early as that is certain."""

from __future__ import annotations

import random

import numpy as np
import pytest

import penstock
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import AddCommunication
from penstock.runtime.transport.release import releases
from penstock.validation.communication import Messages
from tests.support.random_schedules import random_right

FAMILIES = ("gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev", "zb-h2")


def used_messages(schedule: Schedule) -> list[tuple[int, int]]:
    """The slots of send and consumer of every message."""
    messages = Messages.of(schedule.table)
    there = messages.used
    slot = schedule.table.slot
    return list(zip(slot[messages.send[there]].tolist(), slot[messages.consumer[there]].tolist()))


def reached_before(schedule: Schedule) -> list[set[int]]:
    """Per slot: every slot that must be over before it can be worked on, followed step by step."""
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


def check(schedule: Schedule) -> None:
    table = schedule.table
    consumer_of = dict(used_messages(schedule))
    before = reached_before(schedule)
    for rank in range(schedule.num_ranks):
        first, last = table.slot_bounds[rank : rank + 2].tolist()
        found = releases(schedule, rank)
        place_of = {send: place for place, sends in found.at.items() for send in sends}
        sends = {i - first for i in range(first, last) if i in consumer_of}
        assert sends == set(place_of) | set(found.at_end)
        assert len(place_of) + len(found.at_end) == len(sends)
        for send in sends:
            used = consumer_of[send + first]
            certain = [i - first for i in range(first, last) if used in before[i]]
            assert place_of.get(send) == (certain[0] if certain else None)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 5), (4, 8)])
def test_releases_are_where_a_walk_over_all_waits_puts_them(name: str, ranks: int, microbatches: int) -> None:
    check(penstock.lower(penstock.build(name, ranks=ranks, microbatches=microbatches)))


@pytest.mark.parametrize("seed", range(25))
def test_releases_of_random_schedules_are_where_a_walk_over_all_waits_puts_them(seed: int) -> None:
    schedule = random_right(random.Random(seed))
    check(schedule if schedule.table.has_communication else AddCommunication()(schedule))


def test_an_activation_of_1f1b_is_released_by_its_own_gradient() -> None:
    schedule = penstock.lower(penstock.build("1f1b", ranks=2, microbatches=4))
    row = schedule.ranks[0]
    for place, sends in releases(schedule, 0).at.items():
        for send in sends:
            (action,) = row[send].parts
            assert action.kind is Kind.SEND_F
            assert str(row[place]) == f"0B{action.microbatch}"


def test_the_number_of_sends_held_at_once_does_not_grow_with_the_microbatches() -> None:
    def most_held(microbatches: int) -> int:
        schedule = penstock.lower(penstock.build("1f1b", ranks=4, microbatches=microbatches))
        found = releases(schedule, 1)
        held = np.zeros(len(schedule.ranks[1]) + 1, dtype=np.int64)
        for place, sends in found.at.items():
            for send in sends:
                held[send] += 1
                held[place] -= 1
        return int(held.cumsum().max())

    assert most_held(64) == most_held(16)
