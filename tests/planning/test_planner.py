"""Plans are valid, fit the memory limit, and are no slower than any family."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Costs, PlanError
from penstock.families import families
from penstock.planning import Model
from penstock.planning.planner import LayerPlan
from penstock.search import Progress
from tests.support.grids import small
from tests.support.planning_models import decoder, layer, quick_plan


def simulated_families(made: LayerPlan) -> dict[tuple[str, int, int], float]:
    """The seconds of every family that fits, in every configuration that was evaluated."""
    request, found = made.request, {}
    evaluated = [
        *(option.configuration for option in made.options),
        *(rejected.configuration for rejected in made.evaluation.pruned),
    ]
    for placement, counts in {(each.placement, each.counts) for each in evaluated}:
        stages_per_rank = placement.num_stages // placement.num_ranks
        for m in (m for m in range(1, request.samples + 1) if request.samples % m == 0):
            costs = request.model.costs(counts, request.samples // m)
            for name, family in families().items():
                if family.stages_per_rank in (None, stages_per_rank) and name != "forward-only":
                    schedule = penstock.build(
                        name, ranks=request.ranks, microbatches=m, stages_per_rank=stages_per_rank
                    )
                    timeline = penstock.simulate(schedule, costs)
                    limit = request.memory_limit or float("inf")
                    if schedule.placement == placement and max(timeline.peak_memory) <= limit:
                        found[name, stages_per_rank, m] = timeline.makespan + costs.optimizer_step
    return found


@pytest.mark.parametrize(
    ("common", "limit"),
    [
        ({}, None),
        ({"latency": 0.2, "optimizer_step": 3}, 400),
        ({"launch_overhead": 0.3, "bandwidth": 20.0, "overlap_factor": 0.4}, 600),
    ],
)
@small(lambda limit: limit == 400)
def test_the_winner_is_no_slower_than_any_family_that_fits(
    common: dict[str, float], limit: float | None
) -> None:
    made = quick_plan(decoder(10, **common), memory_limit=limit)
    simulated = simulated_families(made)
    assert len(simulated) > 20
    assert made.best.seconds <= min(simulated.values()) * (1 + 1e-9)
    assert made.bound <= made.best.seconds * (1 + 1e-9)


@pytest.mark.parametrize("limit", [None, 420.0, 300.0])
@small(lambda limit: limit == 300)
def test_every_option_is_valid_fits_and_has_its_simulated_time(limit: float | None) -> None:
    made = quick_plan(decoder(10, latency=0.1, optimizer_step=2), memory_limit=limit, seconds=1.0)
    assert [option.seconds for option in made.options] == sorted(option.seconds for option in made.options)
    for option in made.options:
        configuration = option.configuration
        assert penstock.validate(option.schedule) == []
        assert option.schedule.table.only_compute
        assert sum(configuration.counts) == len(made.request.model.layers)
        assert configuration.microbatches * configuration.samples == 16
        costs = made.request.model.costs(configuration.counts, configuration.samples)
        timeline = penstock.simulate(option.schedule, costs)
        assert timeline.makespan + 2 == option.seconds == option.seconds_without_jitter
        assert option.memory == max(timeline.peak_memory) <= (limit or float("inf"))
        assert option.bound.seconds <= option.seconds * (1 + 1e-9)


def test_microbatches_balance_launch_overhead_and_bubble() -> None:
    small, large = (quick_plan(decoder(6, launch_overhead=each)) for each in (0.0, 30.0))
    assert small.best.configuration.microbatches == 16
    assert large.best.configuration.microbatches < 8


def test_one_rank_has_one_stage() -> None:
    made = quick_plan(decoder(3), ranks=1, samples=4)
    assert made.best.configuration.counts == (5,)
    assert made.best.gap == 0


@pytest.mark.full
def test_unequal_stages_per_rank_can_be_given() -> None:
    made = quick_plan(decoder(10), stages_per_rank=[1, 2, 2, 1])
    assert {option.configuration.stages_per_rank for option in made.options} == {(1, 2, 2, 1)}
    assert {option.configuration.style for option in made.options} == {"loop", "v"}
    assert all(len(option.configuration.counts) == 6 for option in made.options)
    assert "(v=1,2,2,1" in str(made.best)
    assert made.to_keys(made.best)["stages_per_rank"] == (1, 2, 2, 1)
    searched = penstock.plan(made.request.model, samples=8, stages_per_rank=[1, 2, 2, 1], seconds=0.1)
    assert {option.configuration.stages_per_rank for option in searched.options} == {(1, 2, 2, 1)}
    assert searched.best.seconds <= made.best.seconds


def test_stages_per_rank_can_be_given() -> None:
    made = quick_plan(decoder(10), stages_per_rank=3)
    assert {option.configuration.stages_per_rank for option in made.options} == {3}


@pytest.mark.parametrize("objective", ["span", "period"])
@small(lambda objective: objective == "period")
def test_other_objectives_are_ranked_and_bounded(objective: str) -> None:
    made = quick_plan(decoder(10, optimizer_step=1), objective=objective)
    for option in made.options:
        length = getattr(option.timeline, objective) + (objective == "span")
        assert option.seconds == length
        assert option.bound.seconds <= option.seconds * (1 + 1e-9)


def test_an_interrupted_plan_keeps_the_best_so_far() -> None:
    def stop(now: Progress) -> None:
        if now.best < float("inf"):
            raise KeyboardInterrupt

    made = quick_plan(decoder(10), on_progress=stop)
    assert made.interrupted
    assert penstock.validate(made.best.schedule) == []
    assert not quick_plan(decoder(4)).interrupted

    def stop_at_once(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick_plan(decoder(10), on_progress=stop_at_once)


def test_the_written_plan_reads_back_with_the_same_time_and_memory(tmp_path: Path) -> None:
    made = quick_plan(decoder(10, latency=0.1))
    made.write(tmp_path / "deep" / "best")
    folder = tmp_path / "deep" / "best"
    schedule, costs = penstock.read(folder / "schedule.json"), Costs.read(folder / "costs.toml")
    assert schedule == made.best.schedule
    timeline = penstock.simulate(schedule, costs)
    assert timeline.makespan == made.best.seconds
    assert max(timeline.peak_memory) == made.best.memory


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 4), st.integers(0, 20)), min_size=3, max_size=7),
    st.integers(1, 3),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(20, 300)),
)
def test_any_small_model_has_a_plan_or_does_not_fit(
    layers: list[tuple[float, int]], ranks: int, samples: int, limit: int | None
) -> None:
    model = Model(tuple(layer(seconds, activation=held) for seconds, held in layers))
    try:
        made = quick_plan(model, ranks=ranks, samples=samples, memory_limit=limit)
    except PlanError as error:
        assert limit is not None
        assert "nothing fits" in str(error)  # noqa: PT017 -- most models fit
        return
    assert made.bound <= made.best.seconds * (1 + 1e-9)
    assert all(option.memory <= (limit or float("inf")) for option in made.options)
