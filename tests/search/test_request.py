"""The API of the search: a package that can be called, and arguments that are checked."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

import penstock
import penstock.search as search_package
from penstock import Costs, Placement, SearchError, StageGraph
from penstock.search import SearchResult, search

SKIP = StageGraph(3, ((0, 1), (0, 2), (1, 2)))


def test_the_package_can_be_imported_and_called() -> None:
    assert isinstance(search_package, ModuleType)
    assert search_package is sys.modules["penstock.search"]
    assert getattr(penstock, "search") is search_package  # noqa: B009 -- a type checker sees the function
    assert search_package.search is search
    found = penstock.search(ranks=2, microbatches=3, moves=10)
    assert isinstance(found, SearchResult)
    assert found.value == search(ranks=2, microbatches=3, moves=10).value


def test_names_and_modules_of_the_package_are_its_attributes() -> None:
    code = (
        "import penstock, penstock.search.exact; "
        "from penstock.search import exact, search; "
        "assert penstock.search.SearchResult is penstock.SearchResult; "
        "assert penstock.search.exact is exact; "
        "assert penstock.search.search is search"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 -- our own interpreter


def test_the_package_shows_the_signature_and_the_documentation_of_the_function() -> None:
    package = sys.modules["penstock.search"]
    assert inspect.signature(package) == inspect.signature(search)  # type: ignore[arg-type]
    assert "on_progress" in inspect.signature(package).parameters  # type: ignore[arg-type]
    assert (inspect.getdoc(search) or "-") in (package.__doc__ or "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 0}, "ranks must be an integer of at least 1 (given 0)"),
        ({"objective": "speed"}, "objective must be one of makespan, span, period (given 'speed')"),
        ({"placement": "w"}, "placement must be a Placement, or one of any, loop, v (given 'w')"),
        ({"placement": Placement.loop(3)}, "the placement has 3 ranks (given ranks=2)"),
        (
            {"memory_limit": 5, "live_limit": 5},
            "give memory_limit, in bytes, or live_limit, in activations, not both",
        ),
        ({"seconds": -1}, "seconds must be from 0 to 1e+18 (given -1)"),
        ({"seconds": 10**400}, "seconds must be from 0 to 1e+18 (given 1000"),
        ({"memory_limit": float("inf")}, "memory_limit must be from 0 to 1e+18 bytes (given inf)"),
        ({"memory_limit": "5"}, "memory_limit must be from 0 to 1e+18 bytes (given '5')"),
        ({"placement": [0, 1]}, "placement must be a Placement, or one of any, loop, v (given [0, 1])"),
        ({"costs": "zb"}, "costs must be Costs (given 'zb')"),
        (
            {"jitter": "a", "quantile": "b"},
            "jitter must be a share from 0 to 1 (given 'a'); quantile must be between",
        ),
        ({"microbatches": 10**12}, "stages times microbatches can be at most 1048576 (given 2 stages, 10000"),
        ({"moves": 1.5}, "moves must be an integer of at least 0 (given 1.5)"),
        (
            {"jitter": 2, "quantile": 3},
            "jitter must be a share from 0 to 1 (given 2); quantile must be between 0 and 1",
        ),
        (
            {"jitter": 0.1, "objective": "span"},
            "jitter is supported for the makespan only (given objective='span')",
        ),
        (
            {"memory_limit": 3, "costs": Costs(parameters=(1, 3))},
            "no schedule fits the memory limit of 3 B per rank: rank 1 needs 4 B, for parameters, gradients",
        ),
        ({"graph": 3}, "graph must be a StageGraph (given 3)"),
        ({"graph": StageGraph(1, ())}, "the graph has 1 stage, too few for 2 ranks"),
        ({"stages_per_rank": [1, 2, 1]}, "stages_per_rank has 3 numbers for 2 ranks"),
        ({"graph": SKIP, "stages_per_rank": 2}, "give graph, which has its stages, or stages_per_rank=2, not"),
        ({"graph": SKIP, "placement": "v"}, "with a graph, placement must be a Placement or any (given 'v')"),
        ({"graph": SKIP, "placement": Placement.loop(2)}, "the placement has 2 stages, the graph 3"),
        (
            {"ranks": 0, "microbatches": 0},
            "ranks must be an integer of at least 1 (given 0); microbatches must",
        ),
    ],
)
def test_all_errors_of_the_arguments_are_reported(given: dict[str, object], message: str) -> None:
    with pytest.raises(SearchError) as caught:
        search(**({"ranks": 2, "microbatches": 4} | given))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_live_limit_above_all_activations_is_no_limit() -> None:
    assert search(ranks=2, microbatches=3, live_limit=10**400, moves=10).value == 10


def test_counts_and_limits_may_be_numpy_scalars() -> None:
    plain = search(ranks=2, microbatches=3, stages_per_rank=2, memory_limit=3.0, seed=4, moves=500)
    found = search(
        ranks=np.int64(2),  # type: ignore[arg-type]
        microbatches=np.int32(3),  # type: ignore[arg-type]
        stages_per_rank=np.int64(2),  # type: ignore[arg-type]
        memory_limit=np.float32(3),  # type: ignore[arg-type]
        seed=np.int64(4),  # type: ignore[arg-type]
        seconds=np.float32(1),  # type: ignore[arg-type]
        moves=np.int64(500),  # type: ignore[arg-type]
    )
    assert found.schedule == plain.schedule
    assert found.value == plain.value


def test_costs_for_another_number_of_stages_are_an_error() -> None:
    with pytest.raises(penstock.CostsError, match="forward: 3 entries, but the schedule has 2 stages"):
        search(ranks=2, microbatches=4, costs=Costs(forward=(1, 2, 3)))


def test_the_origin_of_a_result_has_the_number_of_orders_if_any_were_evaluated() -> None:
    found = search(ranks=2, microbatches=3, moves=10)
    assert replace(found, runs=0).origin == found.found_by
    assert replace(found, runs=1200).origin == f"{found.found_by} (1,200 orders evaluated)"


def test_the_repr_of_a_result_is_one_line() -> None:
    text = repr(search(ranks=2, microbatches=3, moves=10))
    assert re.fullmatch(r"<SearchResult: makespan 10 units, proved optimal, found by .*>", text)
