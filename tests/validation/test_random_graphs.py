"""On random stage graphs: changed lists that the validator accepts run, and those that only deadlock do not."""

from __future__ import annotations

import random

import penstock
from penstock import Schedule, validate
from tests.lowering.test_random_graphs import random_schedule
from tests.oracles.graph_execution import Values, direct_values, executed_values
from tests.support.grids import examples


def changed(rng: random.Random, schedule: Schedule) -> Schedule:
    """The same actions with up to four of them at most three places away."""
    rows = [list(row) for row in schedule.ranks]
    for _ in range(rng.randint(1, 4)):
        row = rng.choice(rows)
        place = rng.randrange(len(row))
        row.insert(max(0, place + rng.choice((-3, -2, -1, 1, 2, 3))), row.pop(place))
    return Schedule(rows, placement=schedule.placement, graph=schedule.graph)


def computes(schedule: Schedule, wanted: Values) -> bool:
    """Whether every rank gets to the end of its list with the right values; a send waits for its receive."""
    try:
        return executed_values(schedule) == wanted
    except (RuntimeError, KeyError):  # all ranks wait, or an input is missing
        return False


def test_what_is_accepted_runs_and_what_only_deadlocks_does_not() -> None:
    rng = random.Random(5)
    accepted = deadlocked = 0
    for _ in range(examples(1000)):
        schedule = random_schedule(rng.randrange(10**6))
        given = changed(rng, penstock.lower(schedule))
        codes = {violation.code for violation in validate(given)}
        runs = computes(given, direct_values(schedule.graph, schedule.microbatches))
        if not codes:
            assert runs, given
            accepted += 1
        elif codes == {"deadlock"}:
            assert not runs, given
            deadlocked += 1
    assert min(accepted, deadlocked) >= examples(10)
