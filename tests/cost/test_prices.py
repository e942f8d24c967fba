"""Promises of prices: seconds of steps and messages are what the costs say, for every kind."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import penstock
from penstock import Costs, Schedule
from penstock.cost.prices import (
    action_seconds,
    edge_prices,
    exposed_all_to_all,
    message_bytes,
    message_seconds,
    pair_seconds,
    step_seconds,
    stream_seconds,
)
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from tests.oracles.two_streams import shortest_pair


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
        "RECOMPUTE": [1, 2],
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


# --- all-to-all on a second stream --------------------------------------------------------------------


def expert_costs(**parts: tuple[float, float]) -> Costs:
    """Compute and all-to-all of F, I and W; 0 where not given."""
    names = {"F": "forward", "I": "backward_input", "W": "backward_weight"}
    seconds = {names[kind]: parts.get(kind, (0, 0))[0] for kind in names}
    return Costs(**seconds, **{f"{names[kind]}_all_to_all": a for kind, (_, a) in parts.items()})


def test_a_step_takes_its_compute_and_its_all_to_all() -> None:
    costs = expert_costs(F=(1, 10), I=(2, 20), W=(3, 30))
    seconds = action_seconds(costs, 1)
    assert [seconds[kind.number, 0] for kind in (Kind.F, Kind.I, Kind.W, Kind.B)] == [11, 22, 33, 55]


@pytest.mark.parametrize(
    ("parts", "seconds"),
    [
        ({"F": (1, 1), "I": (1, 1), "W": (1, 0)}, 3),  # all-to-all hides behind the compute of the other
        ({"F": (1, 1), "I": (1, 1), "W": (1, 1)}, 3),
        ({"F": (1, 5), "I": (1, 4), "W": (1, 0)}, 9),  # all-to-all of both
        ({"F": (1, 5), "I": (1, 0), "W": (1, 0)}, 6),  # F waits for itself
        ({"F": (0, 0), "I": (2, 3), "W": (1, 0)}, 5),  # I waits for itself, W does not
        ({"F": (0, 0), "I": (1, 0), "W": (2, 3)}, 5),
    ],
)
def test_a_pair_takes_the_longest_of_its_streams_and_its_parts(parts: Any, seconds: float) -> None:
    schedule = Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert step_seconds(schedule.table, expert_costs(**parts)).tolist()[1] == seconds


def test_fixed_pairs_factors_and_given_backwards_are_one_rule_with_all_to_all() -> None:
    schedule = Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    experts = expert_costs(F=(1, 1), I=(1, 1), W=(1, 0))

    def pair(**given: float) -> float:
        return float(step_seconds(schedule.table, replace(experts, **given))[1])

    assert [pair(overlap=1), pair(overlap_factor=0), pair(overlap_factor=0.5)] == [1, 2, 2.5]
    assert pair(overlap=1, launch_overhead=3) == 4
    # a B of 8 is divided as I and W are: 4 + 1 for I
    assert [pair(backward=8, overlap_factor=0), pair(backward=8)] == [8, 9]
    assert pair(backward=4, backward_input_all_to_all=9, overlap_factor=0) == 2 + 9


def test_exposed_all_to_all_is_what_no_compute_hides() -> None:
    schedule = Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    for parts, exposed in (({"F": (1, 1), "I": (1, 1), "W": (1, 0)}, [1, 0, 1]), ({"F": (1, 5)}, [5, 5, 0])):
        costs = replace(expert_costs(**parts), launch_overhead=7)
        timeline = penstock.simulate(schedule, costs)
        assert exposed_all_to_all(schedule.table, costs).tolist() == exposed
        assert timeline.exposed_all_to_all == (sum(exposed),)
        assert sum(timeline.exposed_all_to_all) <= sum(timeline.busy)


def test_pairs_are_as_long_as_the_best_run_of_their_layers_but_for_one_layer() -> None:
    rng = random.Random(4)
    tight = 0
    for _ in range(25):
        parts = {kind: (rng.randint(0, 3), rng.randint(0, 3)) for kind in "FIW"}
        parts["F"], parts["W"] = (parts["F"][0], parts["F"][1] + 1), (parts["W"][0] + 1, parts["W"][1])
        prices = stream_seconds(expert_costs(**parts), 1)
        forward = prices.of(Kind.F.number, 0)
        for kind, chosen in ((Kind.B, "FIW"), (Kind.I, "FI")):
            seconds = float(pair_seconds(Costs(), forward, prices.of(kind.number, 0)))
            layers = {each: parts[each] for each in chosen}
            excess = [shortest_pair(layers, n) - n * seconds for n in (1, 3, 4)]
            assert excess[0] >= 0
            assert excess[1] == excess[2] <= sum(map(sum, layers.values())) - seconds
            tight += excess[2] == 0
    assert tight > 20


def test_recompute_takes_as_long_as_f_unless_given_and_repeats_its_all_to_all() -> None:
    table = Schedule.parse("0F0 0RECOMPUTE0 0B0").table
    assert step_seconds(table, Costs(forward=3, forward_all_to_all=2, launch_overhead=1)).tolist() == [6, 6, 3]
    assert step_seconds(table, Costs(forward=3, recompute=1)).tolist() == [3, 1, 2]


def test_a_host_copy_takes_latency_and_bytes_over_bandwidth_of_its_rank() -> None:
    text = "0F0 0OFFLOAD0 0RELOAD0 0B0 | 1F0 1OFFLOAD0 1RELOAD0 1RECOMPUTE0 1B0"
    table = Schedule.parse(text).table
    assert not step_seconds(table, Costs(activation=8))[[1, 2, 5, 6]].any()
    costs = Costs(activation=8, checkpoint=2, host_bandwidth=(2, 1), host_latency=0.5)
    # on rank 1, F keeps only the checkpoint
    assert step_seconds(table, costs)[[1, 2, 5, 6]].tolist() == [4.5, 4.5, 2.5, 2.5]
    part = Costs(activation=8, checkpoint=6, offloadable=4, host_bandwidth=1)
    assert step_seconds(table, part)[[1, 2, 5, 6]].tolist() == [4, 4, 4, 4]
