"""Promises of send-budget: torch's decisions, a budget that is held at every point, and no new deadlock."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Action, Costs, Kind, Schedule, ScheduleError
from penstock.loops import Loop
from penstock.lowering import (
    AddCommunication,
    AddSendWaits,
    DeferReceives,
    SendBudget,
    lower,
    smallest_send_budget,
)
from tests.oracles.torch_schedules import as_rows, built, built_schedule, torch_schedules
from tests.support.grids import examples, is_full
from tests.support.passes import after
from tests.support.random_schedules import random_compute

BEGUN = {Kind.WAIT_SEND_F: Kind.SEND_F, Kind.WAIT_SEND_B: Kind.SEND_B}


def with_waits(schedule: Schedule, *, past_sends: bool = False) -> Schedule:
    """A compute schedule with communication and the waits of torch."""
    deferred = [DeferReceives(past_sends=True)] if past_sends else []
    return lower(schedule, [AddCommunication(), *deferred, AddSendWaits()])


def with_late_receives(schedule: Schedule) -> Schedule:
    """The same, with every receive directly before its use, whatever else that passes."""
    rows = [list(row) for row in schedule.ranks]
    for row in rows:
        for receive in [step for step in row if step.kind.is_receive]:
            (part,) = receive.parts
            uses = (Kind.F,) if part.kind is Kind.RECV_F else (Kind.I, Kind.B)
            row.remove(receive)
            used = {Action(kind, part.stage, part.microbatch) for kind in uses}
            row.insert(next(at for at, step in enumerate(row) if used & set(step.parts)), receive)
    return Schedule(rows, schedule.placement, schedule.microbatches)


def most_pending(schedule: Schedule) -> int:
    """The most sends that a rank has pending at once."""
    most = 0
    for row in schedule.ranks:
        pending = 0
        for step in row:
            pending += (step.kind in BEGUN.values()) - (step.kind in BEGUN)
            most = max(most, pending)
    return most


def without_waits(schedule: Schedule) -> list[list[str]]:
    return [[str(step) for step in row if step.kind not in BEGUN] for row in schedule.ranks]


def can_run(rows: list[list[str]], other_end: dict[str, str]) -> bool:
    """Run the lists literally: a receive needs its send, a wait the receive at the other end."""
    done: set[str] = set()
    position = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                action = row[position[rank]]
                if other_end.get(action, action) not in done | {action}:
                    break
                done.add(action)
                position[rank] += 1
                moved = True
    return all(at == len(row) for at, row in zip(position, rows))


def other_ends(schedule: Schedule) -> dict[str, str]:
    """On a chain: for each receive its send, and for each wait the receive."""
    ends: dict[str, str] = {}
    for step in itertools.chain.from_iterable(schedule.ranks):
        for part in step.parts:
            s, k = part.stage, part.microbatch
            if part.kind is Kind.SEND_F:
                ends |= {f"{s + 1}RECV_F{k}": f"{s}SEND_F{k}", f"{s}WAIT_SEND_F{k}": f"{s + 1}RECV_F{k}"}
            elif part.kind is Kind.SEND_B:
                ends |= {f"{s - 1}RECV_B{k}": f"{s}SEND_B{k}", f"{s}WAIT_SEND_B{k}": f"{s - 1}RECV_B{k}"}
    return ends


def test_waits_move_directly_before_the_send_that_needs_room() -> None:
    text = "0F0 0SEND_F0 0F1 0SEND_F1 0WAIT_SEND_F0 0WAIT_SEND_F1 | 1RECV_F0 1F0 1RECV_F1 1F1"
    budget = "0F0 0SEND_F0 0F1 0WAIT_SEND_F0 0SEND_F1 0WAIT_SEND_F1 | 1RECV_F0 1F0 1RECV_F1 1F1"
    assert after(SendBudget(1), text) == budget
    assert after(SendBudget(2), text) == text
    assert after(SendBudget(bytes=5, activation_message=3), text) == budget
    assert after(SendBudget(bytes=6, activation_message=(3,)), text) == text


def test_a_wait_that_costs_nothing_goes_before_an_older_one_that_may_stall() -> None:
    # the gradient of microbatch 0 proves that its activation was received, nothing proves it of the others
    text = str(with_waits(penstock.build("gpipe", ranks=3, microbatches=3)))
    assert smallest_send_budget(Schedule.parse(text)) == 1
    middle = str(SendBudget(1)(Schedule.parse(text))).split("\n")[1]
    assert "1WAIT_SEND_F2 1SEND_B0" in middle or "1WAIT_SEND_F2 1SEND_B2" in middle


def test_a_limit_that_cannot_be_met_names_the_place_and_the_smallest_limit() -> None:
    schedule = with_waits(
        penstock.build("looped-bfs", ranks=2, microbatches=8, stages_per_rank=2), past_sends=True
    )
    assert smallest_send_budget(schedule) == 4
    assert most_pending(SendBudget(4)(schedule)) == 4
    with pytest.raises(ScheduleError) as caught:
        SendBudget(1)(schedule)
    assert str(caught.value) == (
        "send-budget: rank 1 cannot keep to 1 pending send: at step 47, 3SEND_B4 is one too many, while "
        "3SEND_B5 cannot end before it; the smallest limit is 4"
    )
    with pytest.raises(ScheduleError, match=r"cannot keep to 2\.5 bytes of pending sends: .*; 4 can be met"):
        SendBudget(bytes=2.5, activation_message=2, gradient_message=1)(schedule)


def test_without_sends_every_budget_is_kept_and_without_waits_none() -> None:
    alone = penstock.build("gpipe", ranks=1, microbatches=2)
    assert SendBudget(0)(alone) == alone
    assert smallest_send_budget(alone) == 0
    schedule = penstock.build("1f1b", ranks=2, microbatches=2)
    for without in (schedule, lower(schedule)):
        with pytest.raises(ScheduleError, match="run add-send-waits first"):
            SendBudget(1)(without)
    with pytest.raises(ScheduleError, match="cannot keep to 0 pending sends: at step 1, 0SEND_F0 is one too"):
        SendBudget(0)(with_waits(schedule))


@pytest.mark.parametrize("limits", [{}, {"messages": 1, "bytes": 1}])
def test_a_budget_has_one_limit(limits: dict[str, int]) -> None:
    with pytest.raises(ScheduleError, match="give one of messages and bytes"):
        SendBudget(**limits)


@pytest.mark.parametrize("limit", [-1, 1.5, True, "2", float("nan")])
def test_a_limit_of_messages_is_a_whole_number(limit: object) -> None:
    with pytest.raises(ScheduleError, match="must be a whole number, 0 or more"):
        SendBudget(limit)  # type: ignore[arg-type]


def test_sizes_are_of_all_edges() -> None:
    schedule = with_waits(penstock.build("1f1b", ranks=3, microbatches=2))
    with pytest.raises(ScheduleError, match="gradient_message has 3 numbers, but the schedule has 2 edges"):
        SendBudget(bytes=5, gradient_message=(1, 2, 3))(schedule)


def test_lists_that_wait_in_a_cycle_are_rejected() -> None:
    text = "0F0 0SEND_F0 0F1 0SEND_F1 0WAIT_SEND_F0 0WAIT_SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 | "
    text += "1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_SEND_B1"
    with pytest.raises(ScheduleError, match=r"error\[deadlock\]"):
        SendBudget(1)(Schedule.parse(text))


@pytest.mark.parametrize("seed", range(examples(400)))
def test_the_budget_is_held_at_every_point_and_all_lists_still_run(seed: int) -> None:
    rng = random.Random(seed)
    compute, late = random_compute(rng), rng.random() < 0.5
    schedule = with_waits(compute, past_sends=not late)
    if late:
        schedule = AddSendWaits()(with_late_receives(lower(compute, [AddCommunication()])))
    if not len(schedule.messages.edge):
        return
    ends = other_ends(schedule)
    for limit in range(1, most_pending(schedule) + 1):
        try:
            moved = SendBudget(limit)(schedule)
        except ScheduleError:
            assert limit < smallest_send_budget(schedule)
            continue
        assert most_pending(moved) <= limit
        assert without_waits(moved) == without_waits(schedule)
        assert can_run([list(map(str, row)) for row in moved.ranks], ends)
        assert {each.code for each in penstock.validate(moved, "edge-streams")} <= {"channel-order"}
    assert SendBudget(most_pending(schedule))(schedule) == schedule


def feasible(schedule: Schedule, limit: int) -> bool:
    """Whether any waits keep to the limit, by trying which pending send each send waits for."""
    ends = other_ends(schedule)
    rows = without_waits(schedule)

    def tried(rows: list[list[str]], rank: int, at: int, pending: tuple[str, ...]) -> bool:
        if not can_run(rows, ends):
            return False
        while rank < len(rows):
            if at == len(rows[rank]):
                rank, at, pending = rank + 1, 0, ()
                continue
            action = rows[rank][at]
            if "SEND" in action and "WAIT" not in action:
                if len(pending) == limit:
                    return any(
                        tried(_inserted(rows, rank, at, send), rank, at + 1, tuple(set(pending) - {send}))
                        for send in pending
                    )
                pending = (*pending, action)
            at += 1
        return True

    return tried(rows, 0, 0, ())


def _inserted(rows: list[list[str]], rank: int, at: int, send: str) -> list[list[str]]:
    row = [*rows[rank][:at], send.replace("SEND", "WAIT_SEND"), *rows[rank][at:]]
    return [*rows[:rank], row, *rows[rank + 1 :]]


@pytest.mark.parametrize("seed", range(examples(200)))
def test_a_limit_is_refused_only_where_no_waits_keep_to_it(seed: int) -> None:
    rng = random.Random(seed)
    schedule = AddSendWaits()(with_late_receives(lower(random_compute(rng), [AddCommunication()])))
    if not 0 < len(schedule.messages.edge) <= 12:
        return
    smallest = smallest_send_budget(schedule)
    assert all(feasible(schedule, limit) == (limit >= smallest) for limit in range(1, smallest + 2))


@pytest.mark.parametrize("seed", range(examples(200)))
def test_simulated_send_buffers_stay_below_a_budget_in_bytes(seed: int) -> None:
    rng = random.Random(seed)
    schedule = with_waits(random_compute(rng))
    if not schedule.graph.edges:
        return
    sizes: dict[str, Any] = {
        name: tuple(float(rng.randint(1, 9)) for _ in schedule.graph.edges)
        for name in ("activation_message", "gradient_message")
    }
    limit = float(rng.randint(9, 30))
    try:
        moved = SendBudget(bytes=limit, **sizes)(schedule)
    except ScheduleError:
        return
    costs = Costs(**sizes, bandwidth=rng.choice((None, 3.0)))
    for model in ("buffered", "edge-streams"):
        for memory in penstock.simulate(moved, costs, send_model=model).memory:
            assert np.max(memory.send_buffers, initial=0) <= limit


def test_time_grows_about_linearly() -> None:
    Loop.compile_from_now_on()
    build: dict[str, Any] = {"ranks": 8, "stages_per_rank": 2}
    seconds = []
    for microbatches in (64, 64, 512):
        schedule = lower(penstock.build("interleaved-1f1b", microbatches=microbatches, **build), torch="2.15")
        assert len(schedule.messages.in_lists[0])
        began = time.process_time()
        SendBudget(1)(schedule)
        seconds.append(time.process_time() - began)
    assert seconds[2] < 64 * max(seconds[1], 0.002)  # quadratic would be 64 times


FAMILIES_OF_TORCH = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.skipif(not hasattr(torch_schedules, "_add_wait_send_budget"), reason="torch has it from 2.15 on")
@pytest.mark.parametrize("name", FAMILIES_OF_TORCH)
def test_the_result_is_that_of_torch(name: str) -> None:
    """Up to the sizes at which torch takes long."""
    ranks, counts = (range(1, 9), (1, 2, 3, 4, 5, 6, 8, 12, 16)) if is_full() else ((2, 3), (4, 6))
    compared = 0
    for p, v, m, defer in itertools.product(ranks, (1, 2, 3, 4), counts, (False, True)):
        if p * v == 1 or p * v * m > (128 if is_full() else 36):
            continue
        try:
            theirs = built(name, p, v, m, **({"defer_pp_recv": True} if defer else {}))
        except ValueError:  # torch refuses these sizes
            continue
        compared += 1
        schedule = built_schedule(theirs, m)
        for limit in range(1, 7):
            assert budget_of(schedule, limit) == torchs_budget(theirs, limit), (p, v, m, defer, limit)
    assert compared


def budget_of(schedule: Schedule, limit: int) -> list[list[str]] | None:
    """Our lists with a budget; None if it cannot be met."""
    try:
        return [list(map(str, row)) for row in SendBudget(limit)(schedule).ranks]
    except ScheduleError:
        return None


def torchs_budget(theirs: Any, limit: int) -> list[list[str]] | None:
    order, rank_of_stage = theirs.pipeline_order_with_comms, theirs.stage_index_to_group_rank.__getitem__
    try:
        return as_rows(torch_schedules._add_wait_send_budget(order, rank_of_stage, limit))
    except ValueError:
        return None
