"""Promise of the numbering: the same as counting entry by entry, for every order, fused or paired."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from itertools import pairwise

import numpy as np
import pytest

from penstock import Costs, Placement
from penstock.ir.encoding import Ints
from penstock.search.kernel import FORWARD, INPUT_GRAD, PAIRED, SEPARATE, TOKEN, WEIGHT_GRAD
from penstock.search.problem import Problem, number_entries

PROBLEMS = {
    "split": Problem(Placement.v(3), 5, Costs()),
    "whole": Problem(Placement.loop(3), 5, Costs(), split=False),
    "B shorter on one stage": Problem(Placement.loop(3), 5, Costs(backward=(2.0, 1.5, 2.0))),
    "pairs": Problem(Placement.v(2), 6, Costs(forward_all_to_all=1, backward_input_all_to_all=1)),
}


@pytest.mark.parametrize("fused", [(), (0, 2)], ids=["order", "fused"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_numbers_are_those_of_counting_entry_by_entry(name: str, fused: tuple[int, ...]) -> None:
    problem, rng = PROBLEMS[name], random.Random(7)
    assert problem.can_pair == (name == "pairs")
    for _ in range(50):
        order = _random_order(problem, rng)
        found = number_entries(problem.arrays, order, fused)
        assert list(zip(*(column.tolist() for column in found))) == _counted(problem, order, fused)


def _random_order(problem: Problem, rng: random.Random) -> Ints:
    """Of all tokens, each at any place that follows what it needs of its own stage, with random flags."""
    entries: list[int] = []
    for own in problem.placement.stages_of_rank:
        left = {3 * stage + kind: problem.microbatches for stage in own for kind in range(problem.arrays.kinds)}
        while any(left.values()):
            token = rng.choice([each for each, count in left.items() if count])
            if token % 3 == FORWARD or left[token] > left[token - 1]:
                left[token] -= 1
                flag = SEPARATE if token % 3 == WEIGHT_GRAD else PAIRED if token % 3 == INPUT_GRAD else 0
                entries.append(token | (flag if rng.random() < 0.5 else 0))
    return np.array(entries, dtype=np.int64)


def _counted(problem: Problem, order: Ints, fused: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    """Token, microbatch and whether it is one step with the entry ahead of it, entry by entry."""
    found: list[tuple[int, int, bool]] = []
    for first, last in pairwise(problem.arrays.rank_bounds.tolist()):
        done: dict[int, int] = defaultdict(int)
        pending: dict[int, deque[int]] = defaultdict(deque)
        previous, is_paired = -1, False
        for entry in order[first:last].tolist():
            token = entry & TOKEN
            stage, kind = divmod(token, 3)
            if kind == WEIGHT_GRAD:
                can_join = entry == token and (is_paired or problem.fused_seconds[stage] >= 0)
                is_joined = (can_join or stage in fused) and previous == token - 1
                found.append(
                    (token, pending[stage].pop() if is_joined else pending[stage].popleft(), is_joined)
                )
            else:
                is_paired = (
                    problem.can_pair and bool(entry & PAIRED) and previous >= 0 and previous % 3 == FORWARD
                )
                is_paired &= kind == INPUT_GRAD
                if kind == INPUT_GRAD:
                    pending[stage].append(done[token])
                found.append((token, done[token], is_paired))
                done[token] += 1
            previous = token
    return found
