"""Orders made better move by move: simulated annealing over the steps that decide how long an order takes."""

# ruff: noqa: C901, NPY002, PLR0912, PLR0915 -- a loop for a compiler
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import numpy as np

from penstock.ir.table import Ints
from penstock.search.kernel import (
    SPAN,
    F,
    G,
    State,
    Tables,
    blank,
    compiled,
    cut,
    fits,
    measure,
    resume,
    take_over,
)

__all__ = ["improve"]

_CLOSE = 1e-9


@compiled
def _last_of_worst(tables: Tables, state: State, goal: int) -> int:
    """The last step of the rank that decides the objective."""
    bounds = tables.bounds
    worst, most = bounds[1] - 1, -1.0
    for rank in range(len(bounds) - 1):
        last = bounds[rank + 1] - 1
        length = state.ends[last] - (state.begins[bounds[rank]] if goal == SPAN else 0.0)
        if length > most:
            worst, most = int(last), length
    return int(worst)


@compiled
def _chain(tables: Tables, rows: Ints, state: State, at: int, place: Ints, found: Ints) -> int:
    """The steps of a longest chain, back from one, that begin when the one before them on the rank ends."""
    bounds, stages = tables.bounds, len(tables.hosts)
    for i in range(len(rows)):
        place[rows[i], state.numbers[i]] = i
    count = 0
    while True:
        token = rows[at]
        stage, kind = token // 3, token % 3
        begin = state.begins[at]
        if at > bounds[tables.hosts[stage]] and state.ends[at - 1] >= begin - _CLOSE * max(1.0, begin):
            found[count] = at
            count += 1
            at -= 1
        elif kind == F and stage > 0:
            at = place[token - 3, state.numbers[at]]
        elif kind == G and stage < stages - 1:
            at = place[token + 3, state.numbers[at]]
        else:
            return count


@compiled
def improve(
    tables: Tables, start: Ints, goal: int, moves: int, warmth: float, focus: float, seed: int, stop: Ints
) -> tuple[Ints, float, int, int]:
    """The best order found by so many moves of single steps, its objective, and how many were made and run.

    A share `focus` of the steps that are moved is on a longest chain. Worse orders are taken too, at first by
    `warmth` seconds on average, at the end by none. The same seed gives the same answer; `stop[0]` other than 0
    ends it early.
    """
    np.random.seed(seed)
    bounds, hosts = tables.bounds, tables.hosts
    size = len(start)
    state, kept = blank(tables), blank(tables)
    now, new = start.copy(), start.copy()
    found, worth = measure(tables, now, state, goal)
    measure(tables, now, kept, goal)
    best, best_found, best_worth = now.copy(), found, worth
    chain, length, known = np.zeros(size, np.int64), 0, False
    place = np.zeros((len(tables.seconds), tables.microbatches), np.int64)
    tried = runs = 0
    for move in range(moves):
        if stop[0] != 0:
            break
        tried += 1
        if not known:
            length = _chain(tables, now, state, _last_of_worst(tables, state, goal), place, chain)
            known = True
        if length > 0 and np.random.random() < focus:
            i = chain[np.random.randint(length)]
        else:
            i = np.random.randint(size)
        rank = hosts[now[i] // 3]
        first, last = bounds[rank], bounds[rank + 1]
        reach = 1 + int(np.random.exponential(3.0 if np.random.random() < 0.9 else 20.0))
        if np.random.random() < 0.6:
            j = max(first, i - reach)
        else:
            i = max(first, i - 1)
            j = min(last - 1, i + reach)
        token = now[i]
        if i == j or now[j] == token:
            continue
        step = 1 if j > i else -1
        for k in range(i, j, step):
            new[k] = now[k + step]
        new[j] = token
        low, high = min(i, j), max(i, j) + 1
        taken = False
        if fits(tables, new, rank):
            worst = worth - warmth * (1.0 - move / moves) * np.log(1.0 - np.random.random())
            at, done = cut(tables, new, state, low)
            got, got_worth = resume(tables, new, state, at, done, goal, worst)
            runs += 1
            taken = got_worth <= worst
            if taken:
                take_over(tables, state, kept, at, done)
                found, worth, known = got, got_worth, False
                if worth < best_worth:
                    best[:] = new
                    best_found, best_worth = found, worth
            else:
                take_over(tables, kept, state, at, done)
        if taken:
            now[low:high] = new[low:high]
        else:
            new[low:high] = now[low:high]
    return best, best_found, tried, runs
