"""Promises of add-communication, as text in and text out."""

from __future__ import annotations

import pytest

import penstock
from penstock import Costs, Placement, Schedule, SendModel, StageGraph
from penstock.lowering import AddCommunication, DeferReceives, lower
from tests.support.passes import after


def test_a_value_is_sent_at_once_and_received_at_that_moment() -> None:
    assert after(AddCommunication(), "0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1") == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 | "
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )


def test_neighbours_on_one_rank_need_no_messages() -> None:
    lowered = after(AddCommunication(), "0F0 3F0 3B0 0B0 | 1F0 2F0 2B0 1B0")
    assert "1SEND_F0" not in lowered
    assert "2SEND_B0" not in lowered
    assert lowered.count("SEND") == lowered.count("RECV") == 4


def test_messages_of_a_pair_follow_the_whole_pair() -> None:
    text = "0F0 0F1 0B0 0B1 | 1F0 (1F1;1B0)OVERLAP_F_B 1B1"
    assert "(1F1;1B0)OVERLAP_F_B 1SEND_B0" in after(AddCommunication(), text)


def test_lowering_works_on_uneven_placements() -> None:
    uneven = Schedule.parse(
        "0F0 1F0 4F0 4B0 1B0 0B0 | 2F0 3F0 3B0 2B0", Placement.custom({0: [0, 1, 4], 1: [2, 3]})
    )
    lowered = lower(uneven)
    assert penstock.validate(lowered) == []
    assert [str(step) for step in lowered.ranks[1] if step.kind.is_communication] == [
        "2RECV_F0",
        "3SEND_F0",
        "3RECV_B0",
        "2SEND_B0",
    ]


# --- stage graphs: a value that several stages of a rank use -------------------------------------------


FAN = StageGraph(4, ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3)))
"""Stage 0 feeds 1, 2 and 3."""


def fan(hosts: tuple[int, ...] = (0, 1, 1, 2)) -> Schedule:
    ranks = max(hosts) + 1
    return penstock.build("1f1b", ranks=ranks, microbatches=3, graph=FAN, placement=Placement(hosts))


def test_a_value_that_several_stages_of_a_rank_use_crosses_once() -> None:
    lowered = AddCommunication()(fan())
    texts = [str(step) for row in lowered.ranks for step in row]
    assert [text for text in texts if text.startswith("0SEND_F")] == [
        text for k in range(3) for text in (f"0SEND_F{k}", f"0SEND_F{k}>3")
    ]
    assert not any(text.startswith("2RECV_F") for text in texts)
    # the gradients of two stages are two values
    assert {text for text in texts if text.endswith("SEND_B0") or "SEND_B0>" in text} == {
        *("1SEND_B0", "2SEND_B0>0", "3SEND_B0", "3SEND_B0>0"),
    }
    assert penstock.validate(lowered) == []


def test_the_value_is_there_for_whichever_stage_uses_it_first() -> None:
    graph = StageGraph(3, ((0, 1), (0, 2)))
    text = "0F0 0SEND_F0 0RECV_B0<2 0RECV_B0 0B0 | 1RECV_F0 2F0 2B0 2SEND_B0>0 1F0 1B0 1SEND_B0"
    schedule = Schedule.parse(text, Placement((0, 1, 1)), 1, "late", graph)
    assert penstock.validate(schedule) == []
    costs = Costs(latency=(5, 7), activation_message=8)
    timeline = penstock.simulate(schedule, costs)
    starts = {str(event.step): event.start for event in timeline.events}
    assert (starts["2F0"], starts["1F0"]) == (6, 9)
    # the receive buffer is held until the last use
    memory = timeline.memory[1]
    assert memory.receive_buffers[memory.times < 9].max() == 8
    assert memory.receive_buffers[memory.times > 9].max() == 0
    early = Schedule.parse(text.replace("1RECV_F0 2F0", "2F0 1RECV_F0"), Placement((0, 1, 1)), 1, "e", graph)
    assert [violation.code for violation in penstock.validate(early)] == ["used-before-received"]


def test_a_second_message_with_the_same_value_is_needless() -> None:
    graph = StageGraph(3, ((0, 1), (0, 2)))
    text = "0F0 0SEND_F0 0SEND_F0>2 | 1RECV_F0 1F0 2RECV_F0<0 2F0"
    violations = penstock.validate(Schedule.parse(text, Placement((0, 1, 1)), 1, "twice", graph))
    assert {violation.code for violation in violations} == {"needless-message"}
    assert "stage 1, on the same rank, gets the value of stage 0" in violations[0].message


@pytest.mark.parametrize("hosts", [(0, 1, 1, 2), (0, 1, 1, 1), (1, 0, 0, 2), (0, 1, 2, 1)])
def test_deferred_receives_come_before_the_first_use_of_a_shared_value(hosts: tuple[int, ...]) -> None:
    lowered = AddCommunication()(fan(hosts))
    for past_sends in (False, True):
        deferred = DeferReceives(past_sends=past_sends)(lowered)
        assert penstock.validate(deferred, SendModel.EDGE_STREAMS) == []
        costs = Costs(latency=0.5)
        assert penstock.simulate(deferred, costs).makespan == penstock.simulate(fan(hosts), costs).makespan
