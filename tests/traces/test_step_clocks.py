"""Promise: clocks that drift are put right from the messages of many steps; noise is not taken for drift."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock import Costs, build, lower, read_trace, simulate
from penstock.traces.read.clocks import drift_of
from tests.support.kineto_files import write_kineto_files

COSTS = Costs(forward=0.1, backward=0.2, latency=0.01)
SIMULATED = simulate(lower(build("interleaved-1f1b", ranks=4, microbatches=8)), COSTS)
STEPS = 20
HOSTS = ["a", "a", "b", "c"]
AHEAD = [0.0, 0.0, 3.0, -7.0]


def test_clocks_that_drift_are_put_right(tmp_path: Path) -> None:
    drift = [0.0, 0.0, 4e-4, -1e-4]
    assert drift[2] * STEPS * SIMULATED.makespan > 0.01  # messages would arrive before they were sent
    run = read_trace(
        write_kineto_files(tmp_path, SIMULATED, steps=STEPS, ahead=AHEAD, hosts=HOSTS, drift=drift)
    )
    assert run.clocks.drift == pytest.approx(drift, abs=2e-6)
    assert run.clocks.drift[:2] == (0, 0)  # the host of rank 0
    assert run.clocks.residual == 0
    assert run.clocks.offsets == pytest.approx(AHEAD, abs=0.011)
    assert len(run.timelines) == STEPS
    for timeline in run.timelines:
        compute = SIMULATED.is_compute
        np.testing.assert_allclose(timeline.start[compute], SIMULATED.start[compute], atol=0.011)
        assert timeline.makespan == pytest.approx(SIMULATED.makespan, rel=0.01)


def test_clocks_that_do_not_drift_are_left_alone(tmp_path: Path) -> None:
    run = read_trace(write_kineto_files(tmp_path, SIMULATED, steps=STEPS, ahead=AHEAD, hosts=HOSTS))
    assert run.clocks.drift == (0, 0, 0, 0)


@pytest.mark.parametrize("steps", [3, 6, 10, 100])
def test_noise_is_not_taken_for_drift(steps: int) -> None:
    rng = np.random.default_rng(steps)
    at = np.arange(steps, dtype=np.float64)
    taken = sum(
        drift_of(np.stack([np.zeros(steps), rng.normal(0, 1e-3, steps)], axis=1), at).any() for _ in range(300)
    )
    assert taken <= 3


def test_steps_with_messages_in_one_direction_only_are_left_out_of_the_line() -> None:
    at = np.arange(12, dtype=np.float64)
    offsets = np.stack([np.zeros(12), 1 + 2e-5 * at], axis=1)
    offsets[::3, 1] = np.nan
    assert drift_of(offsets, at) == pytest.approx([0, 2e-5])
    offsets[1::3, 1] = np.nan
    assert not drift_of(offsets, at).any()  # four steps are too few
