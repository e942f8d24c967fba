"""Compiled loops and plain ones give the same bits, and compilation begins only when it pays."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Schedule, loops, simulate, validate
from penstock.families import registry
from penstock.loops import Loop
from penstock.lowering import AddCommunication
from penstock.simulation.gaps import gaps
from penstock.simulation.simulator import Simulator
from penstock.validation import SendModel
from tests.support.grids import repetitions, small
from tests.support.random_costs import random_costs
from tests.support.random_schedules import random_valid

SCHEDULES = int(os.environ.get("LOOP_SCHEDULES", "5000"))
NEVER = 10**18


def outcome(schedule: Schedule, seed: int) -> Iterator[bytes]:
    """Everything that the loops compute of a schedule: proofs, lowering, times, messages, memory, causes."""
    rng = random.Random(seed)
    costs = random_costs(rng, schedule.num_stages)
    model = rng.choice(list(SendModel))
    if not model.is_buffered and not schedule.table.has_communication:
        schedule = penstock.lower(schedule, [AddCommunication()])
    yield repr(validate(schedule)).encode()
    timeline = simulate(schedule, costs, send_model=model, with_period=True)
    yield from (timeline.start.tobytes(), timeline.end.tobytes(), np.float64(timeline.period).tobytes())
    yield from (column.tobytes() for column in timeline.message_columns.values())
    for memory in timeline.memory:
        yield from (memory.times.tobytes(), memory.total.tobytes())
    yield repr(list(gaps(timeline).records())).encode()
    runs = rng.random() * np.ones((Simulator(schedule, costs).executed.num_steps, 2))
    yield Simulator(schedule, costs).makespans(runs).tobytes()


@pytest.mark.parametrize("first", range(0, SCHEDULES, 100))
@small(lambda first: first == 0)
def test_compiled_and_plain_loops_give_the_same_bits(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="the compiled loops are an extra")
    for seed in range(first, first + repetitions(100, 50)):
        found = []
        for compile_after in (NEVER, 0):
            monkeypatch.setattr(loops, "COMPILE_AFTER", compile_after)
            found.append(list(outcome(random_valid(random.Random(seed)), seed)))
        assert found[0] == found[1], f"seed {seed}"


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_compiled_and_plain_compaction_give_the_same_orders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="the compiled loops are an extra")
    for ranks, microbatches in ((1, 1), (2, 5), (5, 3), (7, 16), (12, 24)):
        built = []
        for compile_after in (NEVER, 0):
            monkeypatch.setattr(loops, "COMPILE_AFTER", compile_after)
            built.append(registry.build(name, ranks=ranks, microbatches=microbatches))
        assert built[0] == built[1]


def test_a_cycle_is_found_by_compiled_and_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="the compiled loops are an extra")
    schedule = Schedule.parse("0F0 0RECV_B0 0SEND_F0 0B0 | 1RECV_F0 1F0 1B0 1SEND_B0")
    ends = []
    for compile_after in (NEVER, 0):
        monkeypatch.setattr(loops, "COMPILE_AFTER", compile_after)
        ends.append(Simulator(schedule, penstock.Costs(), blocking_receives=True).run().end.tolist())
    assert ends[0] == ends[1] == [1, -1, -1, -1, -1, -1, -1, -1]


def test_a_loop_is_compiled_once_all_loops_have_passed_enough_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="the compiled loops are an extra")
    received: list[type] = []

    def fill(values: Any, out: Any) -> None:
        received.append(type(values))
        for i in range(len(out)):
            out[i] = values[i] + 1

    monkeypatch.setattr("penstock.compilation.compiled", lambda function: function)
    monkeypatch.setattr(Loop, "_entries", 0)
    monkeypatch.setattr(loops, "COMPILE_AFTER", 3_000)
    loop, out = Loop(fill), np.zeros(1_000, dtype=np.int64)
    for _ in range(4):
        loop.run(1_000, [np.arange(1_000)], [out])
    assert received == [list, list, np.ndarray, np.ndarray]
    assert out.tolist() == list(range(1, 1_001))
