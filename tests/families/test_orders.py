"""Promises of the families: closed forms, memory, any number of ranks and microbatches, docstring figures."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
from collections.abc import Iterator

import pytest

import penstock
from penstock import Costs, Kind, Schedule, simulate
from penstock.cli.options import parse_stages
from penstock.view.grid import grid
from tests.oracles.naive import MODELS, NaiveValidator
from tests.support.grids import small, thinned
from tests.support.schedule_rows import rows_of

FAMILIES = penstock.families()


def length(schedule: Schedule) -> float:
    return simulate(schedule).makespan


def span(schedule: Schedule, f: float, i: float, w: float, hop: float) -> float:
    return simulate(schedule, Costs(forward=f, backward_input=i, backward_weight=w, latency=hop)).span


def peaks(schedule: Schedule) -> list[int]:
    """Peak live activations of each rank: from F until B or W."""
    found = []
    for row in schedule.ranks:
        live = peak = 0
        for part in (part for step in row for part in step.parts):
            live += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(part.kind, 0)
            peak = max(peak, live)
        found.append(peak)
    return found


def numbers(name: str) -> Iterator[tuple[int, int, int | None]]:
    per_rank = [None] if FAMILIES[name].stages_per_rank else [1, 2, 3]
    yield from itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 7, 12), per_rank)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_valid_for_any_numbers_compute_only_and_lowered(name: str) -> None:
    for ranks, microbatches, per_rank in thinned(numbers(name), 7):
        schedule = penstock.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
        assert schedule.name == name
        assert (schedule.num_ranks, schedule.microbatches) == (ranks, microbatches)
        assert penstock.validate(schedule) == []
        assert penstock.validate(penstock.lower(schedule)) == []


@pytest.mark.parametrize("name", FAMILIES)
@small(lambda name: name in {"gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev", "po-h"})
def test_every_family_is_valid_for_the_naive_validator(name: str) -> None:
    for ranks, microbatches in thinned(((3, 5), (1, 1), (2, 3), (3, 2)), 2):
        schedule = penstock.lower(penstock.build(name, ranks=ranks, microbatches=microbatches))
        rows = rows_of(schedule)
        naive = NaiveValidator(rows, schedule.placement.stage_to_rank, microbatches)
        assert naive.is_valid()
        assert all(naive.runs(model) for model in MODELS)


def accepted_by_torch(name: str, ranks: int, microbatches: int) -> bool:
    """Whether torch's constructor accepts the arguments; test_against_torch.py compares with torch itself."""
    if name == "1f1b":
        return microbatches >= ranks
    if name == "dualpipev":
        return microbatches >= 2 * ranks
    return microbatches % max(1, microbatches // ranks) == 0


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "dualpipev"])
def test_where_torch_rejects_the_numbers_we_are_not_slower_than_its_next_larger_schedule(name: str) -> None:
    rejected = 0
    for ranks, microbatches in itertools.product((2, 3, 4, 7), range(1, 18)):
        if accepted_by_torch(name, ranks, microbatches):
            continue
        larger = next(m for m in itertools.count(microbatches) if accepted_by_torch(name, ranks, m))
        for per_rank in [None] if FAMILIES[name].stages_per_rank else [1, 2, 3]:
            rejected += 1
            ours, theirs = (
                penstock.build(name, ranks=ranks, microbatches=m, stages_per_rank=per_rank)
                for m in (microbatches, larger)
            )
            assert penstock.validate(penstock.lower(ours)) == []
            assert length(ours) <= length(theirs)
    assert rejected > 10


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "expected"),
    [("1f1b", 4, 8, 33), ("gpipe", 4, 8, 33), ("1f1b", 4, 2, 15), ("zb-h1", 4, 8, 27), ("zb-h2", 4, 8, 27)],
)
def test_lengths_at_unit_cost(name: str, ranks: int, microbatches: int, expected: int) -> None:
    assert length(penstock.build(name, ranks=ranks, microbatches=microbatches)) == expected


@pytest.mark.parametrize(
    ("name", "expected_length", "expected_peak"),
    [
        ("interleaved-1f1b", 57, 11),
        ("looped-bfs", 57, 16),
        ("interleaved-zero-bubble", 51, 8),
        ("zbv", 51, 8),
        ("dualpipev", 54, 9),
    ],
)
def test_length_and_memory_of_4_ranks_2_stages_each_8_microbatches(
    name: str, expected_length: int, expected_peak: int
) -> None:
    schedule = penstock.build(name, ranks=4, microbatches=8)
    assert (length(schedule), max(peaks(schedule))) == (expected_length, expected_peak)


GRID = [(p, m) for p in (1, 2, 3, 5, 8) for m in (p, 2 * p, 3 * p, 4 * p)]


@pytest.mark.parametrize(("p", "m"), GRID)
def test_closed_forms_of_one_stage_per_rank(p: int, m: int) -> None:
    f, b, w, c = 18522, 18086, 9337, 601
    made = {
        name: penstock.build(name, ranks=p, microbatches=m)
        for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2")
    }
    for name in ("gpipe", "1f1b", "eager-1f1b"):
        assert span(made[name], f, b, w, 0) == (m + p - 1) * (f + b + w)
    if p > 1:
        assert span(made["1f1b"], f, b, w, c) == (m + p - 1) * (f + b + w) + c * (
            2 * m * (p - 1) // p + 2 * (p - 2)
        )
    if m >= 2 * p:
        work = m * (f + b + w)
        assert span(made["zb-h1"], f, b, w, c) == work + (p - 1) * (f + b - w) + 4 * (p - 1) * c
        assert span(made["zb-h2"], f, b, w, c) == work + (p - 1) * (f + b - 2 * w) + 2 * (p - 1) * c


@pytest.mark.parametrize(("p", "m"), GRID)
def test_memory_is_what_the_docstrings_say(p: int, m: int) -> None:
    def of(name: str, per_rank: int | None = None) -> list[int]:
        return peaks(penstock.build(name, ranks=p, microbatches=m, stages_per_rank=per_rank))

    assert of("gpipe") == [m] * p
    assert of("looped-bfs", 3) == [3 * m] * p
    assert of("1f1b") == [min(m, p - r) for r in range(p)]
    assert of("eager-1f1b") == [min(m, 2 * (p - r) - 1) for r in range(p)]
    assert max(of("zb-h1")) == min(m, p)
    assert max(of("zb-h2")) == min(m, 2 * p - 1)
    assert max(of("v-half")) <= 2 * ((p + 2) // 2)
    assert max(of("v-min")) <= 2 * ((p + 4) // 3)
    if m >= 2 * p:
        assert max(of("zbv")) == 2 * p
        assert max(of("dualpipev")) == 2 * p + 1
        assert of("interleaved-1f1b", 2) == [p + 2 * (p - 1 - r) + 1 for r in range(p)]
        assert max(of("interleaved-zero-bubble", 2)) == 2 * p


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 8])
def test_v_half_and_v_min_idle_as_their_docstring_says(p: int) -> None:
    m = 3 * p
    half, least = (
        span(penstock.build(name, ranks=p, microbatches=m), 1, 1, 1, 0) - 6 * m for name in ("v-half", "v-min")
    )
    assert half == max(3 * p - 7 if p % 2 == 0 else 3 * p - 4, 0)
    assert least == (0 if p == 2 else 4 * p - {0: 7, 1: 5, 2: 9}[p % 3])


def test_v_half_and_v_min_at_real_costs_are_no_worse_than_published() -> None:
    f, i, w, hop = 4959, 5217, 3519, 213
    work = 24 * 2 * (f + i + w)
    for name, published in (("v-half", 0.146), ("v-min", 0.282)):
        made = penstock.build(name, ranks=8, microbatches=24)
        assert round(1 - work / span(made, f, i, w, hop), 3) <= published


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zbv_has_no_bubble_at_equal_costs(p: int) -> None:
    for m in (2 * p - 1, 2 * p, 3 * p):
        assert span(penstock.build("zbv", ranks=p, microbatches=m), 1, 1, 1, 0) == 6 * m


@pytest.mark.parametrize(("p", "v"), [(p, v) for p in (2, 3, 4, 8) for v in (1, 2, 3, 4)])
def test_interleaving_divides_the_bubble_and_pays_each_hop(p: int, v: int) -> None:
    for m, c in itertools.product((p, 2 * p, 4 * p), (0, 1)):
        made = penstock.build("interleaved-1f1b", ranks=p, microbatches=m, stages_per_rank=v)
        f, b, w = 100, 110, 90
        expected = m * v * (f + b + w) + (p - 1) * (f + b + w) + (2 * p * v - 2) * c
        assert span(made, f, b, w, c) == expected


FIGURE = re.compile(
    r"^    penstock show (\S+) -p (\d+) -m (\d+)(?: -v ([\d,]+))?(?: --group (\d+))?$", re.MULTILINE
)


def test_the_figures_in_the_docstrings_are_current() -> None:
    figures = 0
    for module in pkgutil.iter_modules(importlib.import_module("penstock.families").__path__):
        text = importlib.import_module(f"penstock.families.{module.name}").__doc__ or ""
        for name, ranks, microbatches, per_rank, group in FIGURE.findall(text):
            made = penstock.build(
                name,
                ranks=int(ranks),
                microbatches=int(microbatches),
                stages_per_rank=parse_stages(per_rank) if per_rank else None,
                group=int(group) if group else None,
            )
            figure = "\n".join(f"    {line}".rstrip() for line in grid(made, 104).plain.split("\n"))
            assert figure in text, name
            figures += 1
    assert figures >= 8


# family, stages per rank -> live activations at most, idle of the longest rank: the table of the README
README_TABLE = [
    ("gpipe", 1, "m", "3 * (p - 1)"),
    ("1f1b", 1, "p", "3 * (p - 1)"),
    ("eager-1f1b", 1, "2 * p - 1", "3 * (p - 1)"),
    ("zb-h1", 1, "p", "p - 1"),
    ("zb-h2", 1, "2 * p - 1", "0"),
    *(("looped-bfs", v, "m * v", "3 * (p - 1)") for v in (1, 2, 3)),
    *(("interleaved-1f1b", v, "(v + 1) * p - 1", "3 * (p - 1)") for v in (1, 2, 3, 4)),
    *(("interleaved-zero-bubble", v, "p * v", "p - 1") for v in (1, 2, 3, 4)),
    *(("interleaved-overlap", v, "(v + 1) * p", "3 * (p - 1)") for v in (1, 2, 3, 4)),
    ("zbv", 2, "2 * p", "0"),
    ("dualpipev", 2, "2 * p + 1", "2 * (p - 1)"),
]


@pytest.mark.parametrize(("name", "v", "live", "idle"), README_TABLE)
def test_the_table_of_the_readme_holds(name: str, v: int, live: str, idle: str) -> None:
    for p, rounds in itertools.product((1, 2, 3, 4, 8), (2, 3, 4)):
        m = p * rounds
        made = penstock.build(name, ranks=p, microbatches=m, stages_per_rank=v)
        known = {"p": p, "m": m, "v": v}
        assert max(peaks(made)) == eval(live, known)  # noqa: S307 -- the formulas above
        assert span(made, 1, 1, 1, 0) - 3 * m * v == eval(idle, known)  # noqa: S307 -- the formulas above


def test_eager_1f1b_hides_hops_that_1f1b_pays_for() -> None:
    for p in (2, 4, 8):
        plain, eager = (
            span(penstock.build(name, ranks=p, microbatches=4 * p), 100, 110, 90, 20)
            for name in ("1f1b", "eager-1f1b")
        )
        assert eager == (5 * p - 1) * 300 + 2 * (p - 1) * 20 < plain
