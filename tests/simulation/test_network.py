"""Promises of the network engine: send models, channels, collectives; it agrees with the dataflow engine."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Costs, Schedule, ScheduleError, simulate
from penstock.bounds import bounds_of
from penstock.ir.kinds import Kind
from penstock.lowering import DeferReceives
from penstock.simulation.simulator import Simulator
from penstock.validation import SendModel
from tests.support.grids import examples
from tests.support.random_costs import random_costs
from tests.support.random_schedules import random_compute, random_valid, with_memory_actions
from tests.support.schedule_rows import with_moved_step


def test_messages_of_one_channel_follow_each_other() -> None:
    two = Schedule.parse("0F0 0F1 | 1F0 1F1")
    slow = Costs(bandwidth=1, activation_message=10)
    assert simulate(two, slow).makespan == 1 + 10 + 10 + 1
    assert simulate(two, Costs(latency=10)).makespan == 1 + 10 + 2


def test_unsharding_delays_its_stage_and_reduction_ends_the_step() -> None:
    lowered = penstock.lower(Schedule.parse("0F0 0B0"))
    assert simulate(lowered, Costs(unshard=4, reduce_grad=10)).makespan == 4 + 3 + 10


def test_an_unshard_of_the_next_stage_hides_behind_work() -> None:
    text = "0UNSHARD 1UNSHARD 0F0 1F0 1RESHARD 0RESHARD"
    assert simulate(Schedule.parse(text), Costs(forward=5, unshard=3)).makespan == 3 + 10


def test_a_posted_receive_that_blocks_makes_warm_up_wait() -> None:
    lowered = penstock.lower(penstock.build("interleaved-1f1b", ranks=4, microbatches=8))
    costs = Costs(latency=0.1)
    free, blocked = (simulate(lowered, costs, blocking_receives=b).makespan for b in (False, True))
    deferred = simulate(DeferReceives()(lowered), costs, blocking_receives=True).makespan
    assert free < deferred < blocked


def test_a_value_leaves_when_its_send_is_reached() -> None:
    late = Schedule.parse("0F0 0F1 0SEND_F0 0SEND_F1 | 1RECV_F0 1F0 1RECV_F1 1F1")
    for bandwidth in (None, 1e9):
        costs = Costs(forward=(10, 1), latency=1, bandwidth=bandwidth)
        assert simulate(late, costs).makespan == 23


def test_blocking_receives_can_deadlock_where_sends_do_not_and_the_error_says_where() -> None:
    schedule = Schedule.parse("0F0 0RECV_B0 0SEND_F0 0B0 | 1RECV_F0 1F0 1B0 1SEND_B0")
    assert simulate(schedule).makespan == 6
    with pytest.raises(ScheduleError, match="rank 0 at step 1, 0RECV_B0; rank 1 at step 0, 1RECV_F0"):
        simulate(schedule, blocking_receives=True)


def test_each_direction_of_the_host_link_is_a_stream_of_its_own() -> None:
    schedule = Schedule.parse("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0B2 0RELOAD1 0B0 0B1")
    timeline = simulate(schedule, Costs(host_bandwidth=1 / 3))
    assert timeline.start.tolist() == [0, 1, 1, 4, 4, 2, 3, 7, 7, 10]
    assert timeline.end.tolist() == [1, 4, 2, 7, 7, 3, 5, 10, 9, 12]


def test_a_reload_is_waited_for_by_its_own_recompute_or_backward_only() -> None:
    schedule = Schedule.parse("0F0 0OFFLOAD0 0F1 0RELOAD0 0B1 0RECOMPUTE0 0B0")
    costs = Costs(checkpoint=1, host_latency=(4,))
    timeline = simulate(schedule, costs)
    assert timeline.end.tolist() == [1, 5, 2, 9, 4, 10, 12]


def test_copies_of_different_ranks_do_not_wait_for_each_other() -> None:
    text = " | ".join(f"{s}F0 {s}OFFLOAD0 {s}RELOAD0 {s}B0" for s in range(2))
    timeline = simulate(Schedule.parse(text), Costs(host_latency=(1, 2)))
    assert timeline.end.tolist() == [1, 2, 3, 10, 2, 4, 6, 8]


seeds = st.integers(min_value=0, max_value=2**32)


@settings(max_examples=examples(300), deadline=None)
@given(seeds)
def test_the_dataflow_and_the_network_engine_agree(seed: int) -> None:
    """A channel that takes any number of bytes at once is followed message by message, and changes nothing."""
    rng = random.Random(seed)
    schedule = random_valid(rng)
    stages = schedule.num_stages
    costs = Costs(
        forward=tuple(rng.choice((0, 1, 2.5)) for _ in range(stages)),
        backward_input=tuple(rng.choice((1, 3)) for _ in range(stages)),
        latency=tuple(rng.choice((0, 1, 2)) for _ in range(stages - 1)) or 0,
    )
    fast = simulate(schedule, costs)
    followed = simulate(schedule, Costs(**{**vars(costs), "bandwidth": 1e18}))
    compute = followed.is_compute
    assert np.array_equal(fast.end[fast.is_compute], followed.end[compute])
    assert np.array_equal(fast.start[fast.is_compute], followed.start[compute])


@settings(max_examples=examples(200), deadline=None)
@given(seeds)
def test_stricter_send_models_are_never_faster(seed: int) -> None:
    rng = random.Random(seed)
    lowered = penstock.lower(random_compute(rng))
    costs = random_costs(rng, lowered.num_stages)
    times = [simulate(lowered, costs, send_model=model).makespan for model in SendModel]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(times)), times


@settings(max_examples=examples(500), deadline=None)
@given(seeds)
def test_the_simulation_gets_stuck_exactly_where_the_validator_says(seed: int) -> None:
    rng = random.Random(seed)
    schedule = with_moved_step(penstock.lower(random_compute(rng)), rng)
    found = penstock.validate(schedule)
    if {violation.code for violation in found} <= {"deadlock"}:
        stuck = tuple(
            m for m in SendModel if (Simulator(schedule, Costs(bandwidth=1), send_model=m).run().end < 0).any()
        )
        assert stuck == (found[0].send_models if found else ())


@settings(max_examples=examples(200), deadline=None)
@given(seeds)
def test_host_copies_that_take_time_make_nothing_faster_and_bounds_stay_below(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_compute(rng)
    if schedule.table.has(Kind.I, Kind.B):
        schedule = with_memory_actions(rng, schedule)
    costs = replace(random_costs(rng, schedule.num_stages), activation=4, checkpoint=rng.choice((0, 1, 4)))
    costs = replace(costs, recompute=rng.choice((None, 0, 0.5)), offloadable=rng.choice((None, 3)))
    free = simulate(schedule, costs)
    slow = simulate(
        schedule, replace(costs, host_bandwidth=rng.choice((1, 3)), host_latency=rng.choice((0, 1)))
    )
    assert (free.end <= slow.end + 1e-9).all()
    for timeline in (free, slow):
        assert timeline.bound.seconds <= timeline.makespan + 1e-9
        for memory in timeline.memory:
            last = np.append(np.diff(memory.times), 1) > 0  # at one instant, frees come before takes
            assert memory.activations[last[: len(memory.times)]].min(initial=0) >= 0
            assert memory.total[-1:].tolist() in ([], [memory.fixed])
        for bound in bounds_of(schedule, costs, memory_limit=max(timeline.peak_memory)):
            assert bound.seconds <= timeline.makespan + 1e-9, bound
