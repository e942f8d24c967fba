"""Promise: costs from timelines are those the timelines were made with, and predict other schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock import Costs, Schedule, Timeline, build, lower, simulate
from penstock.errors import CostsError
from penstock.lowering import DEFAULT_PASSES, Offload, Pass, Recompute
from penstock.simulation.calibration import calibrate, errors_by_kind, measured_jitter

TRUE = Costs(
    forward=(1.0, 1.5),
    backward_input=(1.0, 0.5),
    backward_weight=(2.0, 1.0),
    backward=(2.5, 1.25),
    latency=0.25,
)


def timeline(family: str, costs: Costs = TRUE) -> Timeline:
    """As it would be measured: of the schedule that runs."""
    return simulate(lower(build(family, ranks=2, microbatches=4)), costs)


def test_the_costs_of_a_schedule_with_b_and_of_one_with_i_and_w_together_are_all_costs() -> None:
    found = calibrate([timeline("1f1b"), timeline("zb-h1")])
    for name in ("forward", "backward_input", "backward_weight", "backward"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name))
    assert found.latency == pytest.approx((0.25,))
    assert found.launch_overhead == pytest.approx(0)


def test_costs_from_some_schedules_predict_another() -> None:
    found = calibrate([timeline("1f1b"), timeline("zb-h1")])
    assert timeline("zb-h2", found).makespan == pytest.approx(timeline("zb-h2").makespan)


def test_what_a_split_backward_adds_to_f_is_in_i() -> None:
    longer = replace(TRUE, forward=(1.2, 1.8))
    found = calibrate([timeline("1f1b"), timeline("zb-h1", longer)])
    assert found.forward == pytest.approx((1.0, 1.5))
    assert found.backward_input == pytest.approx((1.2, 0.8))
    assert calibrate([timeline("zb-h1", longer)]).forward == pytest.approx((1.2, 1.8))
    assert measured_jitter([timeline("1f1b"), timeline("zb-h1", longer)]) == pytest.approx(0)


def test_times_that_vary_become_their_means() -> None:
    slow = TRUE.scaled(3)
    found = calibrate([timeline("1f1b"), timeline("1f1b", slow)])
    assert found.forward == pytest.approx((2.0, 3.0))
    assert found.backward == pytest.approx((5.0, 2.5))
    assert found.backward_weight == (2.0, 1.0)  # it was not measured


def test_overlapped_pairs_do_not_count_as_single_actions() -> None:
    pairs = Costs(overlap_factor=0.5)
    found = calibrate([simulate(lower(build("dualpipev", ranks=2, microbatches=6)), pairs)])
    assert found.forward == pytest.approx((1.0,) * 4)


def test_all_to_all_is_not_counted_twice() -> None:
    experts = replace(TRUE, forward_all_to_all=(0.5, 1), backward_input_all_to_all=0.25)
    found = calibrate([timeline("1f1b", experts), timeline("zb-h1", experts)])
    for name in ("forward", "backward_input", "backward_weight", "backward", "forward_all_to_all"):
        assert getattr(found, name) == pytest.approx(getattr(experts, name))
    wrong = replace(timeline("1f1b"), costs=replace(TRUE, forward_all_to_all=(0.5, 4)))
    with pytest.raises(
        CostsError, match=r"F of stage 1 took 1\.5 s, less than .* 4 s: lower forward_all_to_all"
    ):
        calibrate([wrong])


def test_the_host_link_of_each_rank_and_recomputation() -> None:
    memory = replace(TRUE, recompute=(0.75, 1.25), activation=(8, 4), host_bandwidth=(16, 2), host_latency=0.5)
    schedule = build("gpipe", ranks=2, microbatches=6)
    rows: list[list[Pass]] = [[Recompute(), Offload(stages=(0,))], [Offload()], [Recompute(stages=(1,))]]
    timelines = [simulate(lower(schedule, [*passes, *DEFAULT_PASSES]), memory) for passes in rows]
    unknown = replace(memory, host_bandwidth=None, recompute=None)
    found = calibrate([replace(each, costs=unknown) for each in timelines])
    assert found.recompute == pytest.approx(memory.recompute)
    assert found.host_bandwidth == pytest.approx(memory.host_bandwidth)
    assert found.launch_overhead == pytest.approx(0)
    # a rank without copies gets the bandwidth of the others
    one = simulate(lower(schedule, [Offload(stages=(1,)), *DEFAULT_PASSES]), memory)
    assert calibrate([one]).host_bandwidth == pytest.approx((2, 2))
    assert calibrate([timeline("1f1b", memory)]).host_bandwidth == (16, 2)


def test_errors_are_shares_of_what_was_measured_by_kind_and_for_the_step() -> None:
    predicted, measured = timeline("1f1b"), [timeline("1f1b", TRUE.scaled(2))]
    rows = errors_by_kind(predicted, measured)
    assert [row.kind for row in rows] == ["F", "B", "step"]
    assert [row.error for row in rows] == pytest.approx([-0.5] * 3)
    assert [row.kind for row in errors_by_kind(timeline("zb-h1"), [timeline("zb-h1")])] == [
        "F",
        "I",
        "W",
        "step",
    ]


def test_timelines_are_required_and_must_have_the_same_stages() -> None:
    with pytest.raises(CostsError, match="no timelines"):
        calibrate([])
    other = simulate(Schedule.parse("0F0 0B0"))
    with pytest.raises(CostsError, match=r"different numbers of stages: \[1, 2\]"):
        calibrate([other, timeline("1f1b")])
