"""Promises of the dataflow engine: steps start as early as their inputs allow, and ranks in a cycle stop."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock import Schedule, build, families, loops, lower
from penstock.ir.dataflow import DataflowRun, Inputs, run_dataflow


def run(text: str, lag: int = 0) -> DataflowRun:
    schedule = Schedule.parse(text)
    producer, consumer = schedule.table.crossings
    inputs = Inputs.of(schedule.num_steps, producer, consumer, np.full(len(producer), lag))
    return run_dataflow(schedule.table, inputs, [1] * schedule.num_steps, [0] * schedule.num_ranks)


def test_a_step_waits_for_the_step_before_it_and_for_its_input() -> None:
    assert run("0F0 0F1 | 1F0 1F1").ends.tolist() == [1, 2, 2, 3]
    assert run("0F0 0F1 | 1F0 1F1", lag=5).ends.tolist() == [1, 2, 7, 8]


def test_a_pair_waits_for_both_of_its_inputs() -> None:
    done = run("0F0 0F1 0B0 0B1 | 1F0 (1F1;1B0)OVERLAP_F_B 1B1")
    assert done.ends.tolist() == [1, 2, 4, 5, 2, 3, 4]


def test_ranks_in_a_cycle_stop_where_they_wait() -> None:
    done = run("0F0 0B0 0F1 0B1 | 1F1 1B1 1F0 1B0")
    assert done.stuck == {0: 1, 1: 4}
    assert done.ends.tolist() == [1, -1, -1, -1, -1, -1, -1, -1]


def test_the_compiled_loop_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    cases = []
    for name in families():
        schedule = build(name, ranks=rng.randint(2, 5), microbatches=rng.randint(1, 9))
        cases += [schedule, lower(schedule)]
    cases.append(Schedule.parse("0F0 0B0 0F1 0B1 | 1F1 1B1 1F0 1B0"))  # stuck
    for schedule in cases:
        producer, consumer = schedule.table.crossings
        inputs = Inputs.of(
            schedule.num_steps, producer, consumer, np.array([rng.random() for _ in producer], dtype=np.float64)
        )
        durations = [rng.random() for _ in range(schedule.num_steps)]
        starts = [rng.random() for _ in range(schedule.num_ranks)]
        monkeypatch.setattr(loops, "COMPILE_AFTER", 10**18)
        plain = run_dataflow(schedule.table, inputs, durations, starts)
        monkeypatch.setattr(loops, "COMPILE_AFTER", 0)
        fast = run_dataflow(schedule.table, inputs, durations, starts)
        assert fast.ends.tobytes() == plain.ends.tobytes()
        assert fast.stuck == plain.stuck
