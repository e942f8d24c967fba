"""Annealing never returns a worse order, and keeps the memory limit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.bounds import OBJECTIVES
from penstock.search.kernel import TOKEN, anneal
from penstock.search.seeds import serial
from tests.support.search_instances import random_problem


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_result_is_no_worse_than_the_start_and_fits(objective: str) -> None:
    rng = random.Random(objective)
    for _ in range(15):
        problem = random_problem(rng, objective)
        start = serial(problem)
        best, value, made, runs = anneal(
            problem.arrays, start, problem.objective_index, 2000, 3.0, 0.8, 1, np.zeros(1, dtype=np.int64)
        )
        assert value <= problem.value(start)
        assert value == problem.value(best)
        assert problem.fits(best)
        assert sorted(best & TOKEN) == sorted(start)
        assert 0 <= runs <= made == 2000
