"""Promises of families over stage graphs: chains as before, valid on any graph, memory bounded by depth."""

from __future__ import annotations

import random

import pytest

import penstock
from penstock import BuildError, Costs, Kind, Placement, StageGraph, simulate
from penstock.families.depth_order import depths, topological_placement
from tests.support.random_graphs import random_graph, random_placed_graph

ON_GRAPHS = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2")
TWO_ENCODERS = StageGraph(6, ((0, 1), (1, 3), (2, 3), (3, 4), (4, 5)))
"""0 -> 1 and 2 feed 3 -> 4 -> 5."""


def test_the_families_that_accept_graphs() -> None:
    assert tuple(name for name, f in penstock.families().items() if f.graph_builder) == ON_GRAPHS


@pytest.mark.parametrize("name", ON_GRAPHS)
def test_a_chain_that_is_given_is_the_chain_that_is_built(name: str) -> None:
    for ranks, m in ((1, 1), (2, 5), (4, 3), (4, 9)):
        given = penstock.build(name, ranks=ranks, microbatches=m, graph=StageGraph.chain(ranks))
        assert given == penstock.build(name, ranks=ranks, microbatches=m)


def test_the_orders_of_a_chain() -> None:
    texts = {
        "gpipe": "0F0 0F1 0F2 0B0 0B1 0B2 | 1F0 1F1 1F2 1B0 1B1 1B2",
        "1f1b": "0F0 0F1 0B0 0F2 0B1 0B2 | 1F0 1B0 1F1 1B1 1F2 1B2",
        "eager-1f1b": "0F0 0F1 0F2 0B0 0B1 0B2 | 1F0 1B0 1F1 1B1 1F2 1B2",
        "zb-h1": "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2 | 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
        "zb-h2": "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2 | 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
    }
    for name, text in texts.items():
        built = penstock.build(name, ranks=2, microbatches=3)
        assert str(built) == "\n".join(text.split(" | ")), name


@pytest.mark.parametrize("name", ON_GRAPHS)
def test_any_graph_and_placement_gives_a_valid_schedule_without_deadlock(name: str) -> None:
    rng = random.Random(16)
    for _ in range(40):
        graph, placement = random_placed_graph(rng)
        m = rng.randint(1, 6)
        schedule = penstock.build(
            name, ranks=placement.num_ranks, microbatches=m, graph=graph, placement=placement
        )
        assert (schedule.graph, schedule.placement, schedule.name) == (graph, placement, name)
        assert penstock.validate(schedule) == []
        assert penstock.validate(penstock.lower(schedule)) == []  # under every send model


@pytest.mark.parametrize(("name", "held"), [("1f1b", 1), ("eager-1f1b", 2), ("zb-h1", 1), ("zb-h2", 2)])
def test_memory_is_bounded_by_the_depth_and_does_not_grow_with_the_microbatches(name: str, held: int) -> None:
    rng = random.Random(17)
    for _ in range(20):
        graph, placement = random_placed_graph(rng)
        most = [held * depth - (held - 1) for depth in depths(graph, placement)]
        if name.startswith("zb"):
            most = [max(most)] * len(most)
        schedule = penstock.build(
            name, ranks=placement.num_ranks, microbatches=20, graph=graph, placement=placement
        )
        live = [0] * graph.num_stages
        for part in (part for row in schedule.ranks for step in row for part in step.parts):
            live[part.stage] += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(part.kind, 0)
            assert live[part.stage] <= most[part.stage]


def test_warm_up_is_the_depth_to_the_end_of_the_model() -> None:
    schedule = penstock.build("1f1b", ranks=6, microbatches=8, graph=TWO_ENCODERS)
    forwards = [next(i for i, step in enumerate(row) if "B" in str(step)) for row in schedule.ranks]
    assert forwards == [5, 4, 4, 3, 2, 1]
    assert simulate(schedule).makespan == (8 + 4) * 3  # as a chain of five: the second encoder costs no time


def test_parallel_encoders_do_not_wait_for_each_other() -> None:
    graph = penstock.build("1f1b", ranks=6, microbatches=8, graph=TWO_ENCODERS)
    chained = penstock.build("1f1b", ranks=6, microbatches=8)
    assert simulate(graph).makespan < simulate(chained).makespan


def test_stages_of_one_rank_count_once_in_the_depth() -> None:
    graph = StageGraph(4, ((0, 1), (1, 2), (2, 3), (0, 2)))
    schedule = penstock.build("1f1b", ranks=2, microbatches=3, graph=graph)
    assert schedule.placement == Placement((0, 0, 1, 1))
    assert str(schedule).splitlines() == [
        "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2",
        "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 2F2 3F2 3B2 2B2",
    ]


def test_zb_h1_has_a_smaller_bubble_than_1f1b_on_graphs() -> None:
    times = [
        simulate(penstock.build(name, ranks=6, microbatches=12, graph=TWO_ENCODERS), Costs()).makespan
        for name in ("zb-h1", "1f1b")
    ]
    assert times[0] < times[1]


def test_a_topological_placement_sends_no_value_to_a_lower_rank() -> None:
    rng = random.Random(18)
    for _ in range(30):
        graph = random_graph(rng, rng.randint(1, 9))
        ranks = rng.randint(1, graph.num_stages)
        hosts = topological_placement(graph, ranks).stage_to_rank
        assert all(hosts[s] <= hosts[t] for s, t in graph.edges)
        sizes = [hosts.count(rank) for rank in range(ranks)]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("zbv", {}, r"zbv needs stages in a chain; any stage graph works with gpipe, 1f1b, .*zb-h2"),
        ("1f1b", {"graph": ((0, 1),)}, r"graph must be a StageGraph \(given \(\(0, 1\),\)\)"),
        ("1f1b", {"placement": (0, 1)}, r"placement must be a Placement \(given \(0, 1\)\)"),
        ("1f1b", {"ranks": 7}, "the stage graph has 6 stages, too few for 7 ranks"),
        ("1f1b", {"ranks": 0}, "ranks must be a whole number of at least 1"),
        ("1f1b", {"stages_per_rank": 1}, "give graph, which has its stages, or stages_per_rank=1, not both"),
        ("1f1b", {"placement": Placement.loop(3)}, "the placement has 3 stages on 3 ranks, the graph 6 stages"),
        ("1f1b", {"graph": None, "placement": Placement.loop(6)}, "a placement needs a graph="),
        ("1f1b", {"microbatches": 1 << 24}, r"at most 16777216 \(given 6 stages, 16777216 microbatches\)"),
    ],
)
def test_what_does_not_fit_a_graph_is_refused(name: str, options: dict[str, object], reason: str) -> None:
    arguments = {"ranks": 6, "microbatches": 4, "graph": TWO_ENCODERS, **options}
    with pytest.raises(BuildError, match=reason):
        penstock.build(name, **arguments)  # type: ignore[arg-type]
