"""On small pipelines the search rarely misses the best of all orders, and proves nothing that is not so."""

from __future__ import annotations

import random

import pytest

import penstock
from penstock import Costs
from penstock.search import exact
from tests.support.grids import examples, small
from tests.support.search_instances import count_misses, tiny_problem


# I followed by its own W is better than B, which is shorter but passes the gradient on later; and W of an early
# microbatch is better late, after B of later ones
@pytest.mark.parametrize(
    ("m", "limit", "costs", "best"),
    [
        (1, None, Costs(forward=1, backward_input=1, backward_weight=4, backward=4), 7),
        (
            *(3, 4),
            Costs(
                forward=3,
                backward_input=3,
                backward_weight=6,
                backward=7,
                activation=2,
                activation_freed_by_input=1,
            ),
            36,
        ),
    ],
)
def test_i_and_w_are_one_b_only_where_that_is_better(
    m: int, limit: float | None, costs: Costs, best: float
) -> None:
    found = penstock.search(ranks=2, microbatches=m, costs=costs, memory_limit=limit, moves=1_000_000)
    assert found.value == best
    assert found.proved


@pytest.mark.parametrize("has_solver", [True, False])
@small(lambda has_solver: has_solver)
def test_the_best_of_all_orders_is_found_in_99_of_100_and_no_bound_exceeds_it(
    has_solver: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_solver:
        monkeypatch.setattr(exact, "available", lambda: False)
    rng, count = random.Random(has_solver), examples(200)
    assert count_misses(tiny_problem(rng) for _ in range(count)) <= count / 100
