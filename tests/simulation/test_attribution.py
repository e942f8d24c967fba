"""Promises of explanations: every idle second has a reason, and the critical path is one."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Costs, Schedule, simulate
from penstock.simulation.gaps import critical_path, gaps
from tests.support.grids import examples
from tests.support.random_costs import random_costs
from tests.support.random_schedules import random_valid


def test_every_gap_of_a_small_pipeline_is_explained() -> None:
    timeline = simulate(penstock.build("1f1b", ranks=2, microbatches=2), Costs(latency=0.5))
    assert [str(gap) for gap in gaps(timeline)] == [
        "rank 0, 2 to 5: gradient: 0B0 waits for the gradient of stage 1, microbatch 0 (1B0, rank 1)",
        "rank 0, 7 to 8: gradient: 0B1 waits for the gradient of stage 1, microbatch 1 (1B1, rank 1)",
        "rank 1, 0 to 1.5: warm-up: 1F0 waits for the activation of stage 0, microbatch 0 (0F0, rank 0)",
        "rank 1, 7.5 to 10: drain",
    ]


def test_waiting_for_a_value_in_transfer_is_attributed_to_the_link() -> None:
    timeline = simulate(Schedule.parse("0F0 0F1 | 1F0 1F1"), Costs(bandwidth=1, activation_message=10))
    late = [gap for gap in gaps(timeline) if gap.rank == 1][1]
    assert (late.reason, late.start, late.end) == ("link", 12, 21)
    assert late.cause is not None
    assert str(late.cause.step) == "0F1"


def test_a_receive_that_blocks_other_work_is_named() -> None:
    text = "0F0 0SEND_F0 2RECV_F0 0F1 0SEND_F1 2F0 2RECV_F1 2F1 | 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1"
    timeline = simulate(Schedule.parse(text), blocking_receives=True)
    held = next(gap for gap in gaps(timeline) if gap.reason == "blocked receive")
    assert held.next_step is not None
    assert str(held.next_step.step) == "0F1"
    assert held.message is not None
    assert (held.message.stage, held.message.microbatch) == (1, 0)


def test_a_send_that_blocks_its_rank_is_named_with_the_receiver() -> None:
    text = "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 | 1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2"
    timeline = simulate(Schedule.parse(text), Costs(forward=(1, 100)), send_model="rendezvous")
    held = next(gap for gap in gaps(timeline) if gap.reason == "blocked send")
    assert held.cause is not None
    assert (held.cause.rank, str(held.cause.step)) == (1, "1RECV_F1")


def test_the_critical_path_follows_the_channel_not_what_waits_behind_it() -> None:
    timeline = simulate(Schedule.parse("0F0 0F1 0F2 | 1F0 1F1 1F2"), Costs(bandwidth=1, activation_message=10))
    path = [str(event.step) for event in critical_path(timeline) if event.step.kind.is_compute]
    assert path == ["0F0", "1F2"]


def test_waiting_for_parameters_is_named() -> None:
    lowered = penstock.lower(Schedule.parse("0F0 0B0"))
    assert [gap.reason for gap in gaps(simulate(lowered, Costs(unshard=4)))] == ["unshard"]


def test_waiting_for_a_reload_is_named() -> None:
    schedule = Schedule.parse("0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0")
    timeline = simulate(schedule, Costs(host_latency=4))
    (gap,) = gaps(timeline)
    assert str(gap) == "rank 0, 4 to 9: reload: 0B0 waits for 0RELOAD0"
    assert " ".join(str(event.step) for event in critical_path(timeline)) == "0F0 0OFFLOAD0 0RELOAD0 0B0"


def test_the_critical_path_of_1f1b_goes_down_and_up() -> None:
    path = critical_path(simulate(penstock.build("1f1b", ranks=3, microbatches=4), Costs(latency=0.5)))
    text = "0F0 1F0 2F0 2B0 1B0 0B0 0F3 1F3 2F3 2B3 1B3 0B3"
    assert " ".join(str(event.step) for event in path) == text


@pytest.mark.parametrize("name", ["1f1b", "dualpipev", "v-half"])
def test_costs_without_an_exact_float_leave_no_gap_unexplained(name: str) -> None:
    costs = Costs(forward=0.0103331, backward_input=0.0111117, backward_weight=0.0090909, latency=0.0300001)
    for schedule in (made := penstock.build(name, ranks=4, microbatches=8), penstock.lower(made)):
        timeline = simulate(schedule, costs)
        assert all(gap.length > 1e-9 for gap in gaps(timeline))
        assert {gap.reason for gap in gaps(timeline)} <= {"warm-up", "activation", "gradient", "link", "drain"}
        assert critical_path(timeline)[0].start == 0


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_gaps_and_work_fill_the_time_and_the_path_leads_from_start_to_end(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_valid(rng)
    timeline = simulate(schedule, random_costs(rng, schedule.num_stages))
    found = gaps(timeline)
    for rank in range(schedule.num_ranks):
        idle = sum(gap.length for gap in found if gap.rank == rank)
        assert idle + timeline.busy[rank] == pytest.approx(timeline.makespan)
    assert "overhead" not in {gap.reason for gap in found}  # of measured timelines only
    path = critical_path(timeline)
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    assert all(a.end <= b.start for a, b in itertools.pairwise(path))


def test_records_of_gaps_are_the_gaps_in_words() -> None:
    for name in ("dualpipev", "zbv", "1f1b"):
        schedule = penstock.lower(penstock.build(name, ranks=4, microbatches=8))
        found = gaps(simulate(schedule, Costs(latency=0.25, unshard=0.5, bandwidth=2, activation_message=1)))
        assert [record["why"] for record in found.records()] == [str(gap) for gap in found]
        assert "overhead" not in {gap.reason for gap in found}
        assert found.seconds_by_rank.sum() == pytest.approx(sum(gap.length for gap in found))
