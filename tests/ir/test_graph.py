"""Promises of the stage graph: a chain unless given, any acyclic edges, and the chain is assumed nowhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock import Costs, Placement, PlacementError, Schedule, ScheduleError, simulate
from penstock.bounds import bounds_of
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.lowering import AddCommunication, DeferReceives
from penstock.simulation.gaps import critical_path, gaps
from penstock.validation import SendModel

SKIP = StageGraph(3, ((0, 1), (1, 2), (0, 2)))
"""0 -> 1 -> 2 and 0 -> 2."""
TEXT = "0F0 0F1 0B0 0B1 | 1F0 1F1 1B0 1B1 | 2F0 2B0 2F1 2B1"


def skip(text: str = TEXT) -> Schedule:
    return Schedule.parse(text, Placement((0, 1, 2)), 2, "skip", SKIP)


def test_a_chain_is_the_graph_unless_one_is_given() -> None:
    schedule = penstock.build("1f1b", ranks=4, microbatches=4)
    assert schedule.graph == StageGraph(4, ((0, 1), (1, 2), (2, 3)))
    assert schedule.graph.is_chain
    assert not SKIP.is_chain


def test_edges_are_sorted_and_inputs_and_outputs_follow() -> None:
    assert SKIP.edges == ((0, 1), (0, 2), (1, 2))
    assert (SKIP.inputs(2), SKIP.outputs(0), SKIP.inputs(0)) == ((0, 1), (1, 2), ())
    assert SKIP.forward_order == (0, 1, 2)
    assert StageGraph(3, ((2, 1), (1, 0))).forward_order == (2, 1, 0)


@pytest.mark.parametrize(
    ("edges", "reason"),
    [
        (((0, 3),), "edge 0 -> 3: stages are 0 to 2"),
        (((0, 1), (0, 1)), "duplicate edge 0 -> 1"),
        (((0, 1), (1, 2), (2, 0)), "in a cycle: .*0 -> .*1"),
        (((1, 1),), "in a cycle: 1 -> 1"),
        (((0, "a"),), "two stage numbers"),
    ],
)
def test_invalid_edges_are_rejected(edges: tuple[tuple[int, int], ...], reason: str) -> None:
    with pytest.raises(PlacementError, match=reason):
        StageGraph(3, edges)


def test_a_graph_of_another_number_of_stages_is_rejected() -> None:
    with pytest.raises(ScheduleError, match="3 stages, but the placement has 2"):
        Schedule.parse("0F0 | 1F0", graph=SKIP)


def test_messages_off_the_chain_name_both_ends_and_read_back() -> None:
    lowered = AddCommunication()(skip())
    text = str(lowered)
    assert {word for word in text.split() if word[-2:] in (">0", "<0", ">2", "<2")} == {
        *("0SEND_F0>2", "0SEND_F1>2", "2RECV_F0<0", "2RECV_F1<0"),
        *("2SEND_B0>0", "2SEND_B1>0", "0RECV_B0<2", "0RECV_B1<2"),
    }
    assert Schedule.parse(text, graph=SKIP) == lowered
    assert Schedule.parse(text, graph=SKIP).ranks == lowered.ranks


def test_a_message_along_no_edge_is_rejected() -> None:
    with pytest.raises(
        ScheduleError, match="SEND_F of stage 0 names stage 2 as its other end, but no edge joins"
    ):
        Schedule.parse("0F0 0SEND_F0>2 | 1F0 | 2RECV_F0<0 2F0")


def test_every_edge_carries_one_activation_and_one_gradient_per_microbatch() -> None:
    lowered = AddCommunication()(skip())
    messages = lowered.messages
    assert messages.used.all()
    assert len(messages.send) == 2 * 2 * len(SKIP.edges)
    sends = [part.kind for row in lowered.ranks for step in row for part in step.parts if part.kind.is_send]
    assert (sends.count(Kind.SEND_F), sends.count(Kind.SEND_B)) == (6, 6)


def test_lowering_a_skip_edge_is_valid_under_every_send_model() -> None:
    lowered = penstock.lower(skip())
    assert penstock.validate(lowered) == []
    for past_sends in (False, True):
        deferred = DeferReceives(past_sends=past_sends)(lowered)
        assert penstock.validate(deferred, SendModel.EDGE_STREAMS) == []


def test_an_input_that_a_skip_edge_lacks_is_a_violation() -> None:
    lowered = AddCommunication()(skip())
    rows = [[step for step in row if str(step) != "2RECV_F1<0"] for row in lowered.ranks]
    broken = Schedule(rows, lowered.placement, 2, graph=SKIP)
    assert [violation.code for violation in penstock.validate(broken)] == ["unmatched-send"]
    rows = [[step for step in row if "F1" not in str(step) or ">2" not in str(step)] for row in lowered.ranks]
    broken = Schedule(rows, lowered.placement, 2, graph=SKIP)
    assert [violation.code for violation in penstock.validate(broken)] == ["unmatched-receive"]


def test_a_stage_on_the_skip_edge_waits_for_both_inputs() -> None:
    costs = Costs(latency=(0, 100, 0))  # edges 0->1, 0->2, 1->2: the skip edge is slow
    for schedule in (skip(), AddCommunication()(skip())):
        timeline = simulate(schedule, costs)
        first = next(event for event in timeline.events if str(event.step) == "2F0")
        assert first.start == 101
        assert "0F0" in [str(event.step) for event in critical_path(timeline)]
        late = next(gap for gap in gaps(timeline) if gap.rank == 2 and gap.reason == "warm-up")
        assert late.message is not None
        assert SKIP.edges[late.message.edge] == (0, 2)


def test_both_engines_agree_on_a_skip_edge_and_keep_to_the_bounds() -> None:
    costs = Costs(forward=(1, 2, 3), latency=(1, 2, 3), activation_message=2, gradient_message=1)
    lowered = AddCommunication()(skip())
    plain = simulate(lowered, costs)
    followed = simulate(lowered, costs, send_model=SendModel.EDGE_STREAMS)
    assert followed.makespan >= plain.makespan
    fast = Costs(forward=(1, 2, 3), latency=(1, 2, 3), bandwidth=1e12, activation_message=2, gradient_message=1)
    for schedule in (skip(), lowered):
        timeline = simulate(schedule, fast)
        assert timeline.schedule is schedule
        compute = timeline.is_compute
        assert np.allclose(timeline.end[compute], plain.end[plain.is_compute])
    assert all(bound.seconds <= plain.makespan + 1e-9 for bound in bounds_of(lowered, costs))


def test_memory_counts_the_receive_buffers_of_both_edges() -> None:
    costs = Costs(activation_message=(10, 20, 40))
    timeline = simulate(AddCommunication()(skip()), costs)
    assert timeline.memory[2].receive_buffers.max() >= 20 + 40
    assert timeline.memory[2].receive_buffers[-1] == 0


def test_costs_have_one_entry_for_each_edge() -> None:
    with pytest.raises(penstock.CostsError, match="latency: 2 entries, but the schedule has 3 edges"):
        simulate(skip(), Costs(latency=(1, 2)))


def test_a_file_keeps_the_graph(tmp_path: Path) -> None:
    for schedule in (skip(), penstock.lower(skip())):
        for name in ("skip.csv", "skip.json"):
            schedule.write(tmp_path / name)
            assert penstock.read(tmp_path / name) == schedule
    text = (tmp_path / "skip.json").read_text().replace("[0, 2]", "[0, 7]")
    (tmp_path / "skip.json").write_text(text)
    with pytest.raises(penstock.FormatError, match="edges: edge 0 -> 7: stages are 0 to 2"):
        penstock.read(tmp_path / "skip.json")


def test_sources_take_the_batch_and_sinks_return_the_output() -> None:
    chain, two_inputs = StageGraph.chain(3), StageGraph(4, ((0, 2), (1, 2), (2, 3)))
    assert (chain.sources, chain.sinks) == ((0,), (2,))
    assert (two_inputs.sources, two_inputs.sinks) == ((0, 1), (3,))
    assert StageGraph.chain(1).sources == StageGraph.chain(1).sinks == (0,)


def test_the_text_of_edges_is_a_graph() -> None:
    assert StageGraph.parse("0>1, 1>2,0>2") == SKIP
    for text, expected in (
        ("", "'' is not an edge; write 0>2"),
        ("0>1,1-2", "'1-2' is not an edge"),
        ("0>1,2>x", "'2>x' is not an edge"),
        ("0>1,1>2,2>0", "stages feed each other in a cycle: 0 -> 1 -> 2 -> 0"),
        ("0>1,1>999999999", "2 edges cannot connect stages 0 to 999999999; stage numbers have no gaps"),
    ):
        with pytest.raises(PlacementError, match=expected):
            StageGraph.parse(text)
