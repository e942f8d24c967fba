"""Promises of the action table: its columns, and the dependency rule that follows from kinds and graph."""

from __future__ import annotations

import numpy as np

import penstock
from penstock import Schedule
from penstock.ir.kinds import Kind
from penstock.ir.table import Need

PAIR = Schedule.parse("0F0 0F1 0B0 0B1 | 1F0 (1F1;1B0)OVERLAP_F_B 1B1")


def named(schedule: Schedule, need: Need) -> set[str]:
    """`producer -> consumer` of every pair that exists."""
    parts = [str(part) for row in schedule.ranks for step in row for part in step.parts]
    pairs = zip(need.producer.ravel().tolist(), need.consumer.ravel().tolist())
    return {f"{parts[p]} -> {parts[c]}" for p, c in pairs if p >= 0 and c >= 0}


def test_parts_and_slots_are_numbered_through_all_ranks() -> None:
    table = PAIR.table
    assert table.slot.tolist() == [0, 1, 2, 3, 4, 5, 5, 6]
    assert table.rank.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert (table.part_bounds.tolist(), table.slot_bounds.tolist()) == ([0, 4, 8], [0, 4, 7])
    assert table.stage.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert table.microbatch.tolist() == [0, 1, 0, 1, 0, 1, 0, 1]


def test_the_dependency_rule_is_the_one_of_the_docstring() -> None:
    schedule = Schedule.parse("0F0 0I0 0W0 | 1F0 1B0")
    activation, gradient = schedule.table.between_stages
    assert (activation.what, named(schedule, activation)) == ("activation", {"0F0 -> 1F0"})
    assert (gradient.what, named(schedule, gradient)) == ("gradient", {"1B0 -> 0I0"})
    forward, input_gradient = schedule.table.within_stage
    assert (forward.what, named(schedule, forward)) == ("forward", {"0F0 -> 0I0", "1F0 -> 1B0"})
    assert (input_gradient.what, named(schedule, input_gradient)) == ("input gradient", {"0I0 -> 0W0"})


def test_memory_actions_are_needed_where_they_are() -> None:
    schedule = Schedule.parse("0F0 0F1 0OFFLOAD0 0RELOAD0 0RECOMPUTE0 0I0 0W0 0RECOMPUTE1 0B1")
    needs = {need.what: named(schedule, need) for need in schedule.table.within_stage}
    assert needs["forward to recompute"] == {"0F0 -> 0RECOMPUTE0", "0F1 -> 0RECOMPUTE1"}
    assert needs["forward to offload"] == {"0F0 -> 0OFFLOAD0"}
    assert needs["offloaded activation"] == {"0OFFLOAD0 -> 0RELOAD0"}
    assert needs["reloaded checkpoint"] == {"0RELOAD0 -> 0RECOMPUTE0"}
    assert needs["reloaded activation"] == {"0RELOAD0 -> 0I0"}
    assert needs["recomputed activation"] == {"0RECOMPUTE0 -> 0I0", "0RECOMPUTE1 -> 0B1"}
    copies, waiting = schedule.table.host_copy_waits
    assert set(zip(copies.tolist(), waiting.tolist(), strict=True)) == {(2, 3), (3, 4), (3, 5)}


def test_only_stages_on_different_ranks_cross() -> None:
    v = penstock.build("zbv", ranks=2, microbatches=2)
    assert v.table.crosses_ranks.tolist() == [True, False, True]


def test_the_kinds_of_a_table_are_those_of_its_parts() -> None:
    lowered = penstock.lower(PAIR)
    assert PAIR.table.kinds == [Kind.F, Kind.B]
    assert PAIR.table.only_compute
    assert not lowered.table.only_compute
    assert lowered.table.has_communication
    assert lowered.table.has(Kind.SEND_F, Kind.I)
    assert not lowered.table.has(Kind.I)


def test_a_message_belongs_to_its_edge() -> None:
    lowered = penstock.lower(penstock.build("1f1b", ranks=3, microbatches=1))
    parts = [part for row in lowered.ranks for step in row for part in step.parts]
    edges = {
        str(part): int(lowered.table.edges_of(part.kind, np.array([number]))[0])
        for number, part in enumerate(parts)
        if part.kind.is_communication
    }
    assert edges == {
        "0SEND_F0": 0,
        "1RECV_F0": 0,
        "1SEND_B0": 0,
        "0RECV_B0": 0,
        "1SEND_F0": 1,
        "2RECV_F0": 1,
        "2SEND_B0": 1,
        "1RECV_B0": 1,
    }
