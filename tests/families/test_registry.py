"""Promises of the registry: spelling of names does not matter, all invalid arguments are reported."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest

import penstock
from penstock import BuildError, PenstockError, Placement, Schedule, StageGraph
from penstock.families import registry

TORCH_NAMES = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved-1f1b",
    "GPipe": "gpipe",
    "LoopedBFS": "looped-bfs",
    "InterleavedZeroBubble": "interleaved-zero-bubble",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_BY_KEY", dict(registry._BY_KEY))
    registry._load_plugins.cache_clear()
    yield
    registry._load_plugins.cache_clear()


def test_every_family_is_listed_with_a_one_line_summary() -> None:
    known = penstock.families()
    assert list(known) == [
        "gpipe",
        "looped-bfs",
        "1f1b",
        "eager-1f1b",
        "interleaved-1f1b",
        "interleaved-zero-bubble",
        "forward-only",
        "interleaved-overlap",
        "gis",
        "gis-h",
        "po-h",
        "zb-h1",
        "zb-h2",
        "zbv",
        "v-half",
        "v-min",
        "dualpipev",
    ]
    assert all(20 < len(family.summary) < 100 for family in known.values())


@pytest.mark.parametrize(("theirs", "ours"), TORCH_NAMES.items())
def test_torchs_names_work(theirs: str, ours: str) -> None:
    made = penstock.build(theirs.upper(), ranks=2, microbatches=4)
    assert made == penstock.build(ours, ranks=2, microbatches=4)
    assert made.name == ours


@pytest.mark.parametrize("name", ["ZB-H1", "zb_h1", "zbh1", "Zb H1"])
def test_case_dashes_underscores_and_blanks_do_not_matter(name: str) -> None:
    assert penstock.build(name, ranks=2, microbatches=2).name == "zb-h1"


def test_an_unknown_name_suggests_the_closest_one() -> None:
    with pytest.raises(BuildError, match=r"unknown family 'interleave-1f1b'; did you mean interleaved-1f1b\?"):
        penstock.build("interleave-1f1b", ranks=2, microbatches=2)


def test_all_invalid_arguments_are_reported() -> None:
    with pytest.raises(BuildError) as caught:
        penstock.build("1f1b", ranks=0, microbatches=-3, stages_per_rank=2)
    message = str(caught.value)
    assert "ranks must be a whole number of at least 1 (given 0)" in message
    assert "microbatches must be a whole number of at least 1 (given -3)" in message
    assert "1f1b has 1 stage per rank (given 2); any number works with looped-bfs" in message


@pytest.mark.parametrize("wrong", ["4", 2.0, None, True])
def test_numbers_must_be_integers(wrong: object) -> None:
    with pytest.raises(BuildError, match="ranks must be a whole number"):
        penstock.build("gpipe", ranks=wrong, microbatches=2)  # type: ignore[arg-type]


def one_by_one(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Each microbatch through all ranks and back before the next."""
    rows = [[f"{r}{kind}{k}" for k in range(microbatches) for kind in "FB"] for r in range(ranks)]
    return Schedule(rows, Placement.loop(ranks, stages_per_rank), microbatches, "one-by-one")


@pytest.mark.usefixtures("clean_registry")
def test_a_function_is_registered_with_one_decorator() -> None:
    penstock.register("one-by-one", "each microbatch alone", stages_per_rank=1)(one_by_one)
    made = penstock.build("OneByOne", ranks=3, microbatches=2)
    assert penstock.validate(made) == []
    assert penstock.families()["one-by-one"].summary == "each microbatch alone"


@pytest.mark.usefixtures("clean_registry")
def test_a_used_name_is_rejected_and_nothing_is_registered() -> None:
    with pytest.raises(BuildError, match="already used by zbv"):
        penstock.register("mine", "a summary", aliases=("ZB_V",))(one_by_one)
    assert "mine" not in penstock.families()


@pytest.mark.usefixtures("clean_registry")
def test_families_of_a_package_are_found_through_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class EntryPoint:
        def load(self) -> None:
            penstock.register("from-a-package", "a summary", stages_per_rank=1)(one_by_one)

    def entry_points(*, group: str) -> list[EntryPoint]:
        return [EntryPoint()] if group == "penstock.families" else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert penstock.build("from_a_package", ranks=2, microbatches=1).num_ranks == 2


@pytest.mark.usefixtures("clean_registry")
def test_a_function_that_returns_no_schedule_is_reported() -> None:
    penstock.register("texts", "returns texts", stages_per_rank=1)(lambda *_: ["0F0 0B0"])  # type: ignore[arg-type]
    with pytest.raises(BuildError, match="texts: its function must return a Schedule"):
        penstock.build("texts", ranks=1, microbatches=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "1f1b", "ranks": 2, "graph": StageGraph(1, ())}, "1 stage, too few for 2 ranks"),
        (
            {"family": "1f1b", "ranks": 2, "graph": StageGraph(1, ()), "placement": Placement((0,))},
            "1 stage on 1 rank, the graph 1 stage ",
        ),
        ({"family": "interleaved-1f1b", "ranks": 1, "group": 9}, "with 1 rank and 1 microbatch"),
        ({"family": "interleaved-1f1b", "ranks": 1, "stages_per_rank": [2, 2]}, "2 numbers for 1 rank "),
        ({"family": "interleaved-1f1b", "ranks": 2, "stages_per_rank": [2]}, "1 number for 2 ranks "),
        ({"family": "1f1b", "ranks": 1 << 40}, "1 microbatch"),
    ],
)
def test_nouns_in_messages_agree_with_their_counts(arguments: dict[str, Any], message: str) -> None:
    given = {"microbatches": 1} | arguments
    with pytest.raises(PenstockError, match=message):
        penstock.build(given.pop("family"), **given)
