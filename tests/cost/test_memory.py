"""Promises of memory: what every action takes and frees, the peak of an order, and every line over time."""

from __future__ import annotations

import random

import numpy as np
import pytest

import penstock
from penstock import Costs, Schedule, simulate
from penstock.cost.memory import activation_bytes, fixed_bytes, live_activations, memory_over_time
from penstock.ir.kinds import Kind
from tests.support.random_schedules import random_compute


def test_fixed_bytes_are_parameters_gradients_and_optimizer_state_of_the_rank() -> None:
    placement = penstock.Placement.v(2)
    costs = Costs(parameters=(1, 2, 3, 4), gradients=10, optimizer_state=(100, 0, 0, 200))
    assert fixed_bytes(costs, placement).tolist() == [1 + 4 + 20 + 300, 2 + 3 + 20]


def test_the_input_gradient_frees_its_part_of_the_activation() -> None:
    sizes = activation_bytes(Costs(activation=(5, 7), activation_freed_by_input=(2, 0)), 2)
    assert (sizes.full.tolist(), sizes.after_input_gradient.tolist()) == ([5, 7], [3, 7])


@pytest.mark.parametrize("seed", range(40))
def test_the_peak_of_an_order_is_the_peak_over_time_for_any_costs(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_compute(rng)
    while not schedule.table.has(Kind.I, Kind.B):  # what a forward-only schedule holds, only a clock shows
        schedule = random_compute(rng)
    held = tuple(rng.randint(1, 9) for _ in range(schedule.num_stages))
    costs = Costs(
        forward=tuple(rng.randint(1, 5) for _ in range(schedule.num_stages)),
        latency=rng.randint(0, 3),
        activation=held,
        activation_freed_by_input=tuple(rng.randint(0, each) for each in held),
        parameters=rng.randint(0, 5),
    )
    peaks = [each.peak(costs, schedule.num_stages) for each in live_activations(schedule.table)]
    assert peaks == pytest.approx(simulate(schedule, costs).peak_memory)


def test_at_one_instant_a_free_comes_before_an_unshard_earlier_in_the_list() -> None:
    # UNSHARD of stage 1 is posted first, waits for the collective stream, and starts when B of stage 0 ends
    schedule = Schedule.parse("0UNSHARD 0F0 1UNSHARD 0B0 1F0 1B0 0RESHARD 1RESHARD", microbatches=1)
    table = schedule.table
    start = np.array([0.0, 0, 3, 1, 3, 4, 6, 6])
    end = np.array([0.0, 1, 3, 3, 4, 6, 6, 6])
    (memory,) = memory_over_time(
        table, schedule.messages, Costs(activation=8, unsharded_parameters=8), start, end
    )
    assert memory.peak == 8 + 16  # never two activations, nor one of stage 0 while stage 1 is unsharded
    assert memory.total[-1] == 0


def test_a_step_of_no_length_frees_nothing_before_it_has_taken_it() -> None:
    costs = Costs(forward=0, backward=0)
    assert simulate(Schedule.parse("0F0 0B0 0F1 0B1"), costs).peak_memory == (1,)
    assert simulate(Schedule.parse("0F0 0F1"), costs).peak_memory == (1,)


def test_receive_buffers_are_held_from_the_posted_receive_to_the_use() -> None:
    schedule = Schedule.parse("0F0 0SEND_F0 0RECV_B0 0B0 | 1RECV_F0 1F0 1B0 1SEND_B0")
    costs = Costs(activation_message=100, gradient_message=30, activation=7)
    first, second = simulate(schedule, costs).memory
    # rank 1 posts at 0 and F starts at 1: from then on the input is part of the activation
    assert (second.times[0], second.receive_buffers[0]) == (0, 100)
    assert second.receive_buffers[1:].max() == 0
    # rank 0 posts its receive at 1; the gradient is held until the end of B
    assert first.receive_buffers.max() == 30
    assert (first.peak, second.peak) == (7 + 30, 100)


def test_without_receives_there_are_no_receive_buffers() -> None:
    timeline = simulate(penstock.build("1f1b", ranks=2, microbatches=2), Costs(activation_message=5))
    assert all(not memory.receive_buffers.any() for memory in timeline.memory)


def test_a_forward_only_schedule_keeps_no_activation_after_its_forward() -> None:
    timeline = simulate(penstock.build("forward-only", ranks=2, microbatches=4))
    assert timeline.peak_memory == (1, 1)


@pytest.mark.parametrize("family", ["1f1b", "zbv", "interleaved-1f1b"])
@pytest.mark.parametrize("latency", [0, 1])
def test_no_line_of_memory_is_ever_negative(family: str, latency: float) -> None:
    costs = Costs(forward=2, latency=latency, activation_message=1, gradient_message=1)
    schedule = penstock.lower(penstock.build(family, ranks=4, microbatches=8))
    for memory in penstock.simulate(schedule, costs).memory:
        assert min(memory.receive_buffers.min(), memory.activations.min(), memory.unsharded.min()) >= 0
        assert memory.receive_buffers[-1] == 0


def held(text: str, costs: Costs) -> list[tuple[float, float]]:
    """Time and bytes of the activations of one rank, the last of each instant."""
    (memory,) = simulate(Schedule.parse(text), costs).memory
    return list(dict(zip(memory.times.tolist(), memory.activations.tolist(), strict=True)).items())


def test_f_keeps_the_checkpoint_and_recompute_holds_the_whole_activation_from_its_start() -> None:
    costs = Costs(activation=10, checkpoint=3, activation_freed_by_input=4)
    assert held("0F0 0F1 0RECOMPUTE1 0B1 0RECOMPUTE0 0I0 0W0", costs) == [
        *((0, 3), (1, 6)),
        *((2, 13), (5, 10)),  # at 5 B1 frees, and RECOMPUTE0 starts
        *((7, 6), (8, 0)),
    ]
    assert simulate(Schedule.parse("0F0 0RECOMPUTE0 0B0"), costs).peak_memory == (10,)


def test_an_offload_frees_at_its_end_and_a_reload_takes_at_its_start() -> None:
    costs = Costs(activation=10, offloadable=8, host_bandwidth=4)
    text = "0F0 0OFFLOAD0 0F1 0F2 0B2 0B1 0RELOAD0 0B0"
    assert held(text, costs) == [(0, 10), (1, 20), (2, 30), (3, 22), (5, 12), (7, 10), (11, 0)]


def test_of_a_recomputed_microbatch_only_the_checkpoint_is_offloaded() -> None:
    costs = Costs(activation=10, checkpoint=3, host_bandwidth=1)
    text = "0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0RECOMPUTE0 0B0"
    assert held(text, costs) == [(0, 3), (1, 13), (4, 3), (7, 10), (10, 0)]
