"""How long a step takes when nothing takes quite as long as it should: a seeded Monte-Carlo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.cost.costs import Costs
from penstock.errors import CostsError
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats
from penstock.simulation.simulator import Engine, finished
from penstock.validation import MODELS, refusal, validate

__all__ = ["Spread", "jitter"]


@dataclass(frozen=True, eq=False)
class Spread:
    """The makespans of many runs, in ascending order."""

    makespans: Floats

    def quantile(self, q: float) -> float:
        """The makespan that a share `q` of the runs stays within."""
        return float(np.quantile(self.makespans, q))

    @property
    def mean(self) -> float:
        """Of all runs."""
        return float(self.makespans.mean())


def jitter(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    noise: float = 0.05,
    stragglers: Mapping[int, float] | None = None,
    runs: int = 200,
    seed: int = 0,
    sends: str = MODELS[0],
    blocking_receives: bool = False,
) -> Spread:
    """Simulate `runs` times, each step longer or shorter by chance.

    A step takes its cost times a random factor of mean 1 and standard deviation `noise` (log-normal), and times
    the factor of its rank in `stragglers`: `{3: 1.2}` makes rank 3 a fifth slower. Messages do not vary. The
    same seed gives the same answer.
    """
    stragglers = dict(stragglers or {})
    if not 0 <= noise <= 1:
        raise CostsError(f"noise: it must be from 0 to 1 (given {noise})")
    if runs < 1:
        raise CostsError(f"runs: there must be at least 1 (given {runs})")
    if wrong := [r for r, factor in stragglers.items() if not (0 <= r < schedule.num_ranks and factor > 0)]:
        raise CostsError(f"stragglers: ranks are 0 to {schedule.num_ranks - 1}, factors above 0 (see {wrong})")
    if faults := validate(schedule, sends):
        raise refusal(schedule, faults)
    engine = Engine(schedule, costs or Costs(), sends=sends, blocking_receives=blocking_receives)
    finished(engine, engine.run())
    slowness = np.array([stragglers.get(rank, 1.0) for rank in range(schedule.num_ranks)])
    usual = np.array(engine.durations) * slowness[engine.schedule.table.rank]
    rng = np.random.default_rng(seed)
    sigma = float(np.sqrt(np.log1p(noise**2)))
    makespans = []
    for _ in range(runs):
        factor = rng.lognormal(-(sigma**2) / 2, sigma, len(usual))
        makespans.append(engine.run(durations=(usual * factor).tolist()).end.max(initial=0))
    return Spread(np.sort(np.array(makespans)))
