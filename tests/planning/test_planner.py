"""Promises of `plan`: what it ranks is right, fits and is simulated; what it leaves out is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Costs, PlanError
from penstock.families import families
from penstock.planning import Model, Plan, plan
from penstock.planning.live_memory import holdings
from penstock.search import Progress
from penstock.simulation.jitter import jitter
from tests.support.planning_models import decoder, layer, stand_in


def planned(model: Model, **asked: Any) -> Plan:
    return plan(model, **{"seconds": 0.0, "searcher": stand_in, **asked})


def families_by_hand(made: Plan) -> dict[tuple[str, int, int], float]:
    """Every family in every frame that was weighed with its first cut, simulated, if it fits."""
    question, found = made.question, {}
    weighed = [*(option.frame for option in made.options), *(left.frame for left in made.cut)]
    for placement, counts in {(frame.placement, frame.counts) for frame in weighed}:
        legs = placement.num_stages // placement.num_ranks
        for m in (m for m in range(1, question.samples + 1) if question.samples % m == 0):
            costs = question.model.costs(counts, question.samples // m)
            for name, family in families().items():
                if family.stages_per_rank in (None, legs) and name != "forward-only":
                    schedule = penstock.build(name, ranks=question.ranks, microbatches=m, stages_per_rank=legs)
                    timeline = penstock.simulate(schedule, costs)
                    limit = question.memory_limit or float("inf")
                    if schedule.placement == placement and max(timeline.peak_memory) <= limit:
                        found[name, legs, m] = timeline.makespan + costs.optimizer_step
    return found


@pytest.mark.parametrize(
    ("common", "limit"),
    [
        ({}, None),
        ({"latency": 0.2, "optimizer_step": 3}, 400),
        ({"launch_overhead": 0.3, "bandwidth": 20.0, "overlap_factor": 0.4}, 600),
    ],
)
def test_the_winner_is_no_slower_than_any_family_that_fits(
    common: dict[str, float], limit: float | None
) -> None:
    made = planned(decoder(10, **common), memory_limit=limit)
    by_hand = families_by_hand(made)
    assert len(by_hand) > 20
    assert made.best.seconds <= min(by_hand.values()) * (1 + 1e-9)
    assert made.bound <= made.best.seconds * (1 + 1e-9)


@pytest.mark.parametrize("limit", [None, 420.0, 300.0])
def test_everything_that_is_ranked_is_right_fits_and_takes_as_long_as_it_says(limit: float | None) -> None:
    made = planned(decoder(10, latency=0.1, optimizer_step=2), memory_limit=limit, seconds=1.0)
    assert [option.seconds for option in made.options] == sorted(option.seconds for option in made.options)
    for option in made.options:
        frame = option.frame
        assert penstock.validate(option.schedule) == []
        assert option.schedule.table.only_compute
        assert sum(frame.counts) == len(made.question.model.layers)
        assert frame.microbatches * frame.samples == 16
        costs = made.question.model.costs(frame.counts, frame.samples)
        timeline = penstock.simulate(option.schedule, costs)
        assert timeline.makespan + 2 == option.seconds == option.plain_seconds
        assert option.memory == max(timeline.peak_memory) <= (limit or float("inf"))
        assert option.bound.seconds <= option.seconds * (1 + 1e-9)


def test_the_frontier_is_what_nothing_beats_in_both() -> None:
    made = planned(decoder(10), seconds=1.0)
    front = made.frontier
    assert front[0] is made.best
    for option in made.options:
        better = [o for o in made.options if o.seconds <= option.seconds and o.memory < option.memory]
        better += [o for o in made.options if o.seconds < option.seconds and o.memory <= option.memory]
        if option in front:
            assert not better
        else:
            assert any(o.seconds <= option.seconds and o.memory <= option.memory for o in front)


def test_what_is_cut_could_neither_win_nor_be_on_the_frontier() -> None:
    made = planned(decoder(10, launch_overhead=0.2))
    assert made.cut
    for left in made.cut:
        assert any(o.seconds <= left.bound * (1 + 1e-9) and o.memory <= left.memory for o in made.options)


def test_what_is_too_large_is_told_with_what_it_needs() -> None:
    free, tight = planned(decoder(10)), planned(decoder(10), memory_limit=150)
    assert not free.too_large
    assert tight.too_large
    assert all(left.memory > 150 for left in tight.too_large)
    assert [left.memory for left in tight.too_large] == sorted(left.memory for left in tight.too_large)
    assert {"gpipe"} <= {left.name for left in tight.too_large}


def test_if_nothing_fits_the_smallest_way_is_told() -> None:
    with pytest.raises(PlanError, match=r"a rank may hold 50 B; of \d+ ways the smallest, .* holds"):
        planned(decoder(10), memory_limit=50)


def test_counting_activations_gives_what_the_simulator_holds() -> None:
    for name in families():
        if name == "forward-only":
            continue
        schedule = penstock.build(name, ranks=3, microbatches=7)
        n = schedule.num_stages
        costs = Costs(
            activation=tuple(range(10, 10 + n)),
            activation_freed_by_input=tuple(range(n)),
            parameters=tuple(range(5, 5 + n)),
        )
        counted = [each.peak(costs, n) for each in holdings(schedule)]
        assert counted == list(penstock.simulate(schedule, costs).peak_memory), name


def test_searched_orders_are_ranked_beside_families() -> None:
    model = decoder(10, launch_overhead=0.01)
    made = planned(model, seconds=1.0)
    searched = [option for option in made.options if option.name == "searched"]
    assert searched
    assert all(option.found_by == "a stand-in" for option in searched)
    assert made.missing == ("a solver",)
    assert not [option for option in planned(model).options if option.name == "searched"]


def test_the_best_orders_are_tried_with_other_cuts() -> None:
    seconds = (2.0, 1.0, 3.0, 1.0, 4.0, 4.0, 4.0, 4.0, 2.0)
    model = Model(tuple(map(layer, seconds)), ranks=3, samples=6)
    before = planned(model, stages_per_rank=2)
    after = planned(model, stages_per_rank=2, seconds=9.0)
    assert after.best.seconds < before.best.seconds
    assert after.best.name != "searched"
    assert after.best.frame.counts not in {option.frame.counts for option in before.options}


def test_the_searcher_is_asked_for_the_frames_with_the_lowest_bounds_within_its_time() -> None:
    asked = []

    def searcher(**words: Any) -> Any:
        asked.append(words)
        return stand_in(**words)

    made = planned(decoder(10, launch_overhead=0.01), memory_limit=600, seconds=2.0, searcher=searcher)
    assert 1 <= len(asked) <= 5
    for words in asked:
        assert words["ranks"] == 4
        assert words["memory_limit"] == 600
        assert words["objective"] == "makespan"
        assert words["placement"].num_stages == 4 * words["stages_per_rank"]
        words["costs"].check_lengths(4 * words["stages_per_rank"])
    assert all(words["seconds"] <= 2.0 for words in asked)
    assert made.best.seconds >= made.bound


def test_microbatches_weigh_launch_overhead_against_the_bubble() -> None:
    cheap, dear = (planned(decoder(6, launch_overhead=each)) for each in (0.0, 30.0))
    assert cheap.best.frame.microbatches == 16
    assert dear.best.frame.microbatches < 8


def test_one_rank_has_one_stage() -> None:
    made = planned(decoder(3), ranks=1, samples=4)
    assert made.best.frame.counts == (5,)
    assert made.best.gap == 0


def test_stages_per_rank_can_be_said() -> None:
    made = planned(decoder(10), stages_per_rank=3)
    assert {option.frame.stages_per_rank for option in made.options} == {3}


@pytest.mark.parametrize("objective", ["span", "period"])
def test_other_objectives_are_ranked_and_bounded(objective: str) -> None:
    made = planned(decoder(10, optimizer_step=1), objective=objective)
    for option in made.options:
        length = getattr(option.timeline, objective) + (objective == "span")
        assert option.seconds == length
        assert option.bound.seconds <= option.seconds * (1 + 1e-9)


def test_with_jitter_the_quantile_ranks_and_is_no_less_than_without() -> None:
    made = planned(decoder(6), jitter=0.1, quantile=0.9, samples=4)
    assert all(option.seconds >= option.plain_seconds for option in made.options)
    assert [option.seconds for option in made.options] == sorted(option.seconds for option in made.options)
    spread = jitter(made.best.schedule, made.best.frame.costs, noise=0.1)
    assert made.best.seconds == spread.quantile(0.9)
    again = planned(decoder(6), jitter=0.1, quantile=0.9, samples=4)
    assert again.best.seconds == made.best.seconds


def test_progress_tells_the_best_the_bound_and_the_gap() -> None:
    told: list[Progress] = []
    made = planned(decoder(10), seconds=1.0, told=told.append)
    bests = [each.best for each in told]
    assert bests == sorted(bests, reverse=True)
    assert told[-1].bound == made.bound
    assert told[-1].gap == pytest.approx(bests[-1] / made.bound - 1)


def test_an_interrupted_plan_keeps_the_best_so_far() -> None:
    def stop(now: Progress) -> None:
        if now.best < float("inf"):
            raise KeyboardInterrupt

    made = planned(decoder(10), told=stop)
    assert made.interrupted
    assert penstock.validate(made.best.schedule) == []
    assert not planned(decoder(4)).interrupted

    def stop_at_once(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planned(decoder(10), told=stop_at_once)


def test_stopped_while_shaking_it_ranks_what_was_shaken_or_says_that_nothing_was() -> None:
    for stopped, noise in ((0, None), (2, 0.05)):
        shaken: list[str] = []

        def stop(now: Progress, shaken: list[str] = shaken, stopped: int = stopped) -> None:
            if now.doing.startswith("shaking"):
                shaken.append(now.doing)
                if len(shaken) > stopped:
                    raise KeyboardInterrupt

        made = planned(decoder(6), jitter=0.05, samples=4, told=stop)
        assert made.interrupted
        assert made.question.jitter == noise
        assert stopped in (0, len(made.options))


def test_an_interrupted_search_ends_the_plan_with_what_it_found() -> None:
    asked = []

    def searcher(**words: Any) -> Any:
        asked.append(words)
        found = stand_in(**words)
        found.interrupted = True
        return found

    made = planned(decoder(10), seconds=9.0, searcher=searcher)
    assert made.interrupted
    assert len(asked) == 1
    assert [option for option in made.options if option.name == "searched"]


def test_a_search_that_finds_a_family_again_adds_nothing() -> None:
    def searcher(**words: Any) -> Any:
        found = stand_in(**words)
        found.schedule = penstock.build("zb-h1", ranks=4, microbatches=words["microbatches"])
        return found

    made = planned(decoder(10, launch_overhead=0.01), seconds=9.0, searcher=searcher, stages_per_rank=1)
    assert made.best.name == "zb-h1"
    assert not [o for o in made.options if o.name == "searched" and o.frame == made.best.frame]


def test_the_winner_that_is_written_reads_back_and_takes_as_long(tmp_path: Path) -> None:
    made = planned(decoder(10, latency=0.1))
    made.write(tmp_path / "deep" / "best")
    folder = tmp_path / "deep" / "best"
    schedule, costs = penstock.read(folder / "schedule.json"), Costs.read(folder / "costs.toml")
    assert schedule == made.best.schedule
    timeline = penstock.simulate(schedule, costs)
    assert timeline.makespan == made.best.seconds
    assert max(timeline.peak_memory) == made.best.memory


def test_what_cannot_be_planned_is_refused_with_every_fault() -> None:
    with pytest.raises(PlanError, match=r"does not say how many ranks and samples \(of a batch\)"):
        plan(Model((layer(1.0),)))
    for asked, says in (
        ({"ranks": 0, "samples": 1.5}, "ranks must be a whole number above 0 .given 0.; samples must be"),
        ({"ranks": 13}, "13 ranks need a layer for each, and the model has 12 layers"),
        ({"stages_per_rank": 4}, "4 ranks with 4 stages each need a layer for each"),
        ({"memory_limit": -1, "seconds": -1}, "the memory limit .*given -1.; seconds for searching"),
        ({"seed": -1}, "the seed is a whole number of at least 0 .given -1."),
        ({"objective": "luck"}, "the objective is one of makespan, span, period"),
        ({"jitter": 0.1, "objective": "period"}, "jitter is known for the makespan only"),
        ({"jitter": 7, "quantile": 1}, "jitter is a share .*; the quantile is between 0 and 1"),
    ):
        with pytest.raises(PlanError, match=says):
            planned(decoder(10), **asked)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 4), st.integers(0, 20)), min_size=3, max_size=7),
    st.integers(1, 3),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(20, 300)),
)
def test_any_small_model_is_planned_or_refused(
    layers: list[tuple[float, int]], ranks: int, samples: int, limit: int | None
) -> None:
    model = Model(tuple(layer(seconds, activation=held) for seconds, held in layers))
    try:
        made = planned(model, ranks=ranks, samples=samples, memory_limit=limit)
    except PlanError as error:
        assert limit is not None
        assert "nothing fits" in str(error)  # noqa: PT017 -- most models are planned
        return
    assert made.bound <= made.best.seconds * (1 + 1e-9)
    assert all(option.memory <= (limit or float("inf")) for option in made.options)
