"""Robustness to step-time jitter: a seeded Monte Carlo simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.cost.costs import Costs
from penstock.errors import CostsError, Parameter
from penstock.ir.encoding import Floats
from penstock.ir.schedule import Schedule
from penstock.simulation.simulator import Simulator
from penstock.validation import SendModel

_ENTRIES = 4_000_000  # steps times runs that are simulated at once: an array of them takes 32 MB


@dataclass(frozen=True, eq=False)
class Spread:
    """The makespans of many runs, in ascending order."""

    makespans: Floats

    def quantile(self, q: float) -> float:
        """The makespan that a share `q` of the runs does not exceed."""
        return float(np.quantile(self.makespans, q))

    @property
    def mean(self) -> float:
        """Of all runs."""
        return float(self.makespans.mean())


def simulate_with_jitter(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    jitter: float = 0.05,
    stragglers: Mapping[int, float] | None = None,
    runs: int = 200,
    seed: int = 0,
    send_model: SendModel | str = SendModel.BUFFERED,
    blocking_receives: bool = False,
) -> Spread:
    """Simulate `runs` times with random step times.

    A step takes its cost times a random factor of mean 1 and standard deviation `jitter` (log-normal), and
    times the factor of its rank in `stragglers`: `{3: 1.2}` makes rank 3 slower by 20 %. Messages do not vary.
    A seed fixes the answer.
    """
    _check(schedule, jitter, stragglers or {}, runs)
    simulator = Simulator.of_valid(schedule, costs, send_model, blocking_receives=blocking_receives)
    simulator.finished_run()
    slowness = np.array([(stragglers or {}).get(rank, 1.0) for rank in range(schedule.num_ranks)])
    expected = simulator.durations * slowness[simulator.executed.table.rank]
    rng = np.random.default_rng(seed)
    sigma = float(np.sqrt(np.log1p(jitter**2)))
    at_once = max(_ENTRIES // max(len(expected), 1), 1)
    makespans = []
    for first in range(0, runs, at_once):
        factor = rng.lognormal(-(sigma**2) / 2, sigma, (min(at_once, runs - first), len(expected)))
        factor *= expected
        makespans.append(simulator.makespans(np.ascontiguousarray(factor.T)))
    return Spread(np.sort(np.concatenate(makespans)))


def _check(schedule: Schedule, jitter: float, stragglers: Mapping[int, float], runs: int) -> None:
    if not 0 <= jitter <= 1:
        raise CostsError(Parameter("jitter"), f" must be a share from 0 to 1 (given {jitter})")
    if runs < 1:
        raise CostsError(f"runs must be at least 1 (given {runs})")
    if invalid := [r for r, factor in stragglers.items() if not (0 <= r < schedule.num_ranks and factor > 0)]:
        raise CostsError(
            f"stragglers: ranks are 0 to {schedule.num_ranks - 1}, factors above 0 (invalid: {invalid})"
        )
