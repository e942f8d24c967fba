"""Promises of what is asked of `penstock.search`: faults are told at once, extras are not needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import penstock
from penstock import Costs, Placement, SearchError
from penstock.search import search


@pytest.mark.parametrize("lacking", ["ortools", "numba"])
def test_without_an_extra_the_rest_works_and_says_what_is_missing(lacking: str) -> None:
    code = f"""
import sys, json
from importlib.abc import MetaPathFinder
class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {lacking!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
from penstock import search
found = search(ranks=3, microbatches=5, stages_per_rank=2, live_limit=4, moves=3000)
print(json.dumps([found.value, found.bound.seconds, found.missing]))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)  # noqa: S603
    value, bound, missing = json.loads(done.stdout)
    assert bound <= value
    assert lacking in missing[0]


def test_it_runs_where_compiled_code_can_be_kept_nowhere() -> None:
    pytest.importorskip("numba", reason="compiled loops are an extra")
    code = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
from penstock.search.kernel import W, compiled
print(compiled(lambda number: number + W)(3))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)  # noqa: S603
    assert done.stdout == "5\n"


def test_it_says_so_where_numba_is_told_not_to_compile() -> None:
    code = "from penstock import search; print(search(ranks=2, microbatches=3, moves=100).missing)"
    command, env = [sys.executable, "-c", code], os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=600)  # noqa: S603
    assert "numba" in done.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 0}, "ranks must be a whole number of at least 1 (given 0)"),
        ({"objective": "speed"}, "objective is one of makespan, span, period (given 'speed')"),
        ({"placement": "w"}, "placement is a Placement, or one of any, loop, v (given 'w')"),
        ({"placement": Placement.loop(3)}, "the placement has 3 ranks (given ranks=2)"),
        (
            {"memory_limit": 5, "live_limit": 5},
            "give memory_limit, in bytes, or live_limit, in activations, not both",
        ),
        ({"seconds": -1}, "seconds must be from 0 to 1e+18 (given -1)"),
        ({"seconds": 10**400}, "seconds must be from 0 to 1e+18 (given 1000"),
        ({"memory_limit": float("inf")}, "memory_limit must be from 0 to 1e+18 bytes (given inf)"),
        ({"memory_limit": "5"}, "memory_limit must be from 0 to 1e+18 bytes (given '5')"),
        ({"placement": [0, 1]}, "placement is a Placement, or one of any, loop, v (given [0, 1])"),
        ({"costs": "zb"}, "costs must be Costs (given 'zb')"),
        ({"noise": "a", "quantile": "b"}, "noise must be from 0 to 1 (given 'a'); quantile must be between"),
        ({"microbatches": 10**12}, "stages times microbatches can be at most 16777216 (given 2 stages, 1000"),
        ({"moves": 1.5}, "moves must be a whole number of at least 0 (given 1.5)"),
        ({"noise": 2, "quantile": 3}, "noise must be from 0 to 1 (given 2); quantile must be between 0 and 1"),
        ({"noise": 0.1, "objective": "span"}, "noise goes with makespan only (given 'span')"),
        (
            {"memory_limit": 3, "costs": Costs(parameters=(1, 3))},
            "nothing fits into 3 a rank: rank 1 needs 4, for what it always holds and one microbatch of each",
        ),
        (
            {"ranks": 0, "microbatches": 0},
            "ranks must be a whole number of at least 1 (given 0); microbatches must",
        ),
    ],
)
def test_what_cannot_be_searched_for_is_refused_with_all_faults(given: dict[str, object], message: str) -> None:
    with pytest.raises(SearchError) as caught:
        search(**({"ranks": 2, "microbatches": 4} | given))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_more_activations_than_there_are_is_no_limit() -> None:
    assert search(ranks=2, microbatches=3, live_limit=10**400, moves=10).value == 10


def test_numbers_may_be_those_of_numpy() -> None:
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


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(penstock.CostsError, match="forward: 3 entries, but the schedule has 2 stages"):
        search(ranks=2, microbatches=4, costs=Costs(forward=(1, 2, 3)))
