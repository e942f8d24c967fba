"""What is asked of a planner."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.arguments import printable, whole_number
from penstock.bounds import OBJECTIVES
from penstock.errors import PlanError
from penstock.planning.model import Model
from penstock.simulation.timeline import Timeline

__all__ = ["Question"]


@dataclass(frozen=True)
class Question:
    """What is to be planned, and by what it is ranked."""

    model: Model
    ranks: int
    samples: int
    """Of one step of this pipeline."""
    memory_limit: float | None = None
    """Bytes of a rank."""
    stages_per_rank: int | None = None
    """Any number unless said."""
    objective: str = "makespan"
    seconds: float = 10.0
    """For searching."""
    seed: int = 0
    jitter: float | None = None
    """How much every step varies: then plans are ranked by a quantile of their makespans."""
    quantile: float = 0.95

    def __post_init__(self) -> None:
        faults = self._faults_of_counts()
        if self.memory_limit is not None and not self.memory_limit > 0:
            faults.append(f"the memory limit is a number of bytes above 0 (given {self.memory_limit})")
        if self.objective not in OBJECTIVES:
            faults.append(f"the objective is one of {', '.join(OBJECTIVES)} (given {self.objective!r})")
        if not self.seconds >= 0:
            faults.append(f"seconds for searching are 0 or more (given {self.seconds})")
        if (seed := whole_number(self.seed)) is None or seed < 0:
            faults.append(f"the seed is a whole number of at least 0 (given {printable(repr(self.seed))})")
        if self.jitter is not None and not 0 <= self.jitter <= 1:
            faults.append(f"jitter is a share from 0 to 1 (given {self.jitter})")
        if self.jitter is not None and self.objective != "makespan":
            faults.append(f"jitter is known for the makespan only (given the objective {self.objective!r})")
        if not 0 < self.quantile < 1:
            faults.append(f"the quantile is between 0 and 1 (given {self.quantile})")
        if faults:
            raise PlanError("; ".join(faults))

    def _faults_of_counts(self) -> list[str]:
        legs = 1 if self.stages_per_rank is None else self.stages_per_rank
        given = {"ranks": self.ranks, "samples": self.samples, "stages per rank": legs}
        faults = [
            f"{name} must be a whole number above 0 (given {printable(repr(value))})"
            for name, value in given.items()
            if (whole_number(value) or 0) < 1
        ]
        if not faults and self.ranks * legs > len(self.model.layers):
            stages = f"{self.ranks} ranks" + ("" if legs == 1 else f" with {legs} stages each")
            have = f"the model has {len(self.model.layers)} {'stages' if self.model.are_stages else 'layers'}"
            faults.append(f"{stages} need a layer for each, and {have}: use fewer, or cut finer")
        return faults

    def seconds_of(self, timeline: Timeline) -> float:
        """The objective, optimizer step included, without jitter."""
        seconds: float = getattr(timeline, self.objective)
        return seconds if self.objective == "period" else seconds + timeline.costs.optimizer_step
