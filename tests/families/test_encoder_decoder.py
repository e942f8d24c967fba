"""Promises of `encoder_decoder`: the graph of multimodal models, through families, lowering, simulation."""

from __future__ import annotations

import pytest

import penstock
from penstock import BuildError, Costs, Kind, StageGraph, encoder_decoder, simulate


def test_one_encoder_before_a_decoder_is_a_chain() -> None:
    assert encoder_decoder(2, 3) == StageGraph.chain(5)


def test_two_encoders_feed_the_first_decoder_stage_and_an_mtp_head_is_beside_the_head() -> None:
    graph = encoder_decoder((2, 1), 3, mtp=True)
    assert graph == StageGraph(7, ((0, 1), (1, 3), (2, 3), (3, 4), (4, 5), (4, 6)))
    assert (graph.sources, graph.sinks) == ((0, 2), (5, 6))


def test_an_encoder_feeds_every_decoder_stage_that_attends_to_it() -> None:
    graph = encoder_decoder((1, 1), 3, feeds=range(3))
    assert graph.outputs(0) == graph.outputs(1) == (2, 3, 4)
    assert graph.inputs(4) == (0, 1, 3)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_the_layout_runs_through_families_lowering_and_simulation(name: str, ranks: int) -> None:
    graph = encoder_decoder((2, 1), 3, feeds=(0, 2), mtp=True)
    schedule = penstock.build(name, ranks=ranks, microbatches=6, graph=graph)
    lowered = penstock.lower(schedule)
    assert penstock.validate(lowered) == []
    costs = Costs(latency=0.1)
    assert simulate(lowered, costs).makespan == pytest.approx(simulate(schedule, costs).makespan)
    done = [part for row in schedule.ranks for step in row for part in step.parts if part.kind is Kind.F]
    assert len(done) == 7 * 6


@pytest.mark.parametrize(
    ("arguments", "options", "reason"),
    [
        (((), 2), {}, "at least one encoder"),
        (((1, 0), 2), {}, r"stages of an encoder must be a whole number of at least 1 \(given 0\)"),
        ((1, 0), {}, r"decoder must be a whole number of at least 1 \(given 0\)"),
        ((1, 2), {"feeds": (2,)}, r"decoder stages from 0 to 1, each once \(given \(2,\)\)"),
        ((1, 2), {"feeds": ()}, "decoder stages from 0 to 1"),
        ((1, 2), {"feeds": (1, 1)}, "each once"),
        ((1, 1), {"mtp": True}, "mtp needs a decoder of at least 2 stages"),
    ],
)
def test_invalid_layouts_are_refused(
    arguments: tuple[object, object], options: dict[str, object], reason: str
) -> None:
    with pytest.raises(BuildError, match=reason):
        encoder_decoder(*arguments, **options)  # type: ignore[arg-type]
