"""Promises of prices: seconds of steps and messages are what the costs say, for every kind."""

from __future__ import annotations

import pytest

import penstock
from penstock import Costs, Schedule
from penstock.cost.prices import action_seconds, edge_prices, message_bytes, message_seconds, step_seconds
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind


def test_each_kind_takes_its_own_cost() -> None:
    costs = Costs(forward=(1, 2), backward_input=3, backward_weight=4, unshard=5, reshard=6, reduce_grad=(7, 8))
    seconds = action_seconds(costs, 2)
    assert {kind.value: seconds[kind.number].tolist() for kind in Kind if seconds[kind.number].any()} == {
        "F": [1, 2],
        "I": [3, 3],
        "W": [4, 4],
        "B": [7, 7],
        "UNSHARD": [5, 5],
        "RESHARD": [6, 6],
        "REDUCE_GRAD": [7, 8],
    }
    assert action_seconds(Costs(backward=9), 1)[Kind.B.number].tolist() == [9]


@pytest.mark.parametrize(
    ("given", "seconds"), [({}, 3), ({"overlap_factor": 0.5}, 2.5), ({"overlap": 1.5}, 1.5)]
)
def test_an_overlapped_pair_is_one_step(given: dict[str, float], seconds: float) -> None:
    schedule = Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert step_seconds(schedule.table, Costs(**given)).tolist() == [1, seconds, 2]


def test_the_launch_overhead_is_added_once_to_every_compute_step() -> None:
    schedule = Schedule.parse("0UNSHARD 0F0 (0F1;0B0)OVERLAP_F_B 0B1 0RESHARD")
    assert step_seconds(schedule.table, Costs(launch_overhead=10)).tolist() == [0, 11, 13, 12, 0]


def test_a_message_takes_bytes_over_bandwidth_and_then_the_latency() -> None:
    graph = StageGraph.chain(3)
    costs = Costs(latency=(1, 2), bandwidth=(4, 8), activation_message=16, gradient_message=(8, 32))
    forward, backward = (edge_prices(costs, graph, value) for value in ("activation", "gradient"))
    assert (forward.transfer.tolist(), forward.total.tolist()) == ([4, 2], [5, 4])
    assert (backward.transfer.tolist(), backward.total.tolist()) == ([2, 4], [3, 6])
    assert edge_prices(Costs(activation_message=5), graph, "activation").total.tolist() == [0, 0]


def test_messages_have_the_prices_of_their_edge_and_direction() -> None:
    schedule = penstock.build("1f1b", ranks=3, microbatches=1)
    costs = Costs(latency=(1, 2), bandwidth=2, activation_message=(2, 4), gradient_message=(6, 8))
    transfer, latency = message_seconds(schedule.messages, costs)
    assert (transfer.tolist(), latency.tolist()) == ([1, 2, 3, 4], [1, 2, 1, 2])
    assert message_bytes(schedule.messages, costs).tolist() == [2, 4, 6, 8]
