"""ZB-V for given costs: the published spans, valid for any counts, within its memory limit."""

from __future__ import annotations

import itertools

import pytest

import penstock
from penstock import BuildError, Costs, CostsError, simulate
from penstock.search import zbv_greedy
from tests.support.grids import small

# p, m, F, I, W, hop, bytes of an activation, freed by I, span in microseconds, rate; as published
PUBLISHED = [
    (16, 48, 14407, 14380, 9676, 1610, 303104, 172032, 3969197, 0.0697),
    (24, 72, 6763, 6969, 5251, 755, 378880, 215040, 2919856, 0.0638),
    (32, 96, 9458, 9748, 7288, 879, 454656, 258048, 5407444, 0.0593),
]


def costs_of(f: float, i: float, w: float, hop: float, held: float = 2, freed: float = 1) -> Costs:
    return Costs(
        forward=f,
        backward_input=i,
        backward_weight=w,
        latency=hop,
        activation=held,
        activation_freed_by_input=freed,
    )


@pytest.mark.parametrize(("p", "m", "f", "i", "w", "hop", "held", "freed", "span", "rate"), PUBLISHED)
@small(lambda p: p < 24)
def test_the_published_spans_are_reproduced_exactly(
    p: int, m: int, f: int, i: int, w: int, hop: int, held: int, freed: int, span: int, rate: float
) -> None:
    costs = costs_of(f, i, w, hop, held, freed)
    timeline = simulate(zbv_greedy(p, m, costs, memory_limit=2 * p * held), costs)
    assert timeline.span == span
    assert round(timeline.bubble("span"), 4) == rate
    assert max(timeline.peak_memory) <= 2 * p * held


@pytest.mark.parametrize("costs", [(1, 1, 1, 0), (4959, 5217, 3519, 213), (3, 7, 2, 9), (5, 1, 1, 0.5)])
def test_it_is_valid_and_within_its_memory_for_any_counts(costs: tuple[float, float, float, float]) -> None:
    known = costs_of(*costs)
    for p, m in itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 8, 17)):
        schedule = zbv_greedy(p, m, known)
        assert penstock.validate(schedule) == []
        assert penstock.validate(penstock.lower(schedule)) == []
        assert max(simulate(schedule, known).peak_memory) <= 2 * p * 2


def test_at_equal_costs_it_has_no_bubble() -> None:
    for p in (2, 4, 8):
        assert simulate(zbv_greedy(p, 3 * p, Costs())).span == 18 * p


def test_at_real_costs_it_beats_the_fixed_order() -> None:
    costs = costs_of(4959, 5217, 3519, 213)
    fitted, fixed = (
        simulate(schedule, costs).span
        for schedule in (zbv_greedy(8, 24, costs), penstock.build("zbv", ranks=8, microbatches=24))
    )
    assert (fitted, fixed) == (688104, 689652)


def test_too_little_memory_is_an_error_with_the_memory_needed() -> None:
    with pytest.raises(BuildError, match=r"needs memory for 8 activations, 8 bytes \(given 7\)"):
        zbv_greedy(4, 8, Costs(), memory_limit=7)


def test_unsupported_counts_and_costs_are_errors() -> None:
    with pytest.raises(BuildError, match="at least 1"):
        zbv_greedy(0, 1, Costs())
    with pytest.raises(CostsError, match="forward: zbv-greedy needs stages of equal cost"):
        zbv_greedy(2, 1, Costs(forward=(1, 2, 3, 4)))
