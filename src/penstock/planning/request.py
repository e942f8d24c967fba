"""The arguments of a plan, checked: all errors are reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.arguments import plural, printable, whole_number
from penstock.bounds import OBJECTIVES
from penstock.errors import Message, Parameter, PlanError
from penstock.ir.placement import StagesPerRank, problems_of_counts
from penstock.planning.model import Model
from penstock.search.request import jitter_needs_makespan
from penstock.simulation.timeline import Timeline


@dataclass(frozen=True)
class PlanRequest:
    """What to plan, and the objective that ranks the options."""

    model: Model
    ranks: int
    samples: int
    """Per step of this pipeline."""
    memory_limit: float | None = None
    """Bytes per rank."""
    stages_per_rank: StagesPerRank | None = None
    """One number for all ranks or a list of one for each; None for any number."""
    objective: str = "makespan"
    seconds: float = 10.0
    """Time for the search."""
    seed: int = 0
    jitter: float | None = None
    """Share by which the duration of steps varies; options are then ranked by a quantile of the makespan."""
    quantile: float = 0.95
    recompute: bool = False
    """Whether stages may be recomputed."""
    offload: bool = False
    """Whether activations may wait on the host."""

    def __post_init__(self) -> None:
        errors = self._errors_in_counts()
        if self.memory_limit is not None and not self.memory_limit > 0:
            must = f" must be a number of bytes above 0 (given {self.memory_limit})"
            errors.append(Message(Parameter("memory_limit"), must))
        if self.objective not in OBJECTIVES:
            must = f" must be one of {', '.join(OBJECTIVES)} (given {self.objective!r})"
            errors.append(Message(Parameter("objective"), must))
        if not self.seconds >= 0:
            errors.append(Message(Parameter("seconds"), f" must be 0 or more (given {self.seconds})"))
        if (seed := whole_number(self.seed)) is None or seed < 0:
            must = f" must be an integer of at least 0 (given {printable(repr(self.seed))})"
            errors.append(Message(Parameter("seed"), must))
        if self.jitter is not None and not 0 <= self.jitter <= 1:
            errors.append(Message(Parameter("jitter"), f" must be a share from 0 to 1 (given {self.jitter})"))
        if self.jitter is not None and self.objective != "makespan":
            errors.append(jitter_needs_makespan(self.objective))
        if not 0 < self.quantile < 1:
            errors.append(Message(Parameter("quantile"), f" must be between 0 and 1 (given {self.quantile})"))
        if self.offload and self.model.common.host_bandwidth is None:
            errors.append(
                "offload needs the speed of the host link: host_bandwidth_bytes_per_second of the devices"
            )
        if errors:
            raise PlanError(Message.join("; ", errors))

    def _errors_in_counts(self) -> list[str | Message]:
        stages_per_rank = 1 if self.stages_per_rank is None else self.stages_per_rank
        given: dict[str, object] = {"ranks": self.ranks, "samples": self.samples}
        if not isinstance(stages_per_rank, Sequence):
            given["stages_per_rank"] = stages_per_rank
        errors: list[str | Message] = [
            Message(Parameter(name), f" must be an integer above 0 (given {printable(repr(value))})")
            for name, value in given.items()
            if (whole_number(value) or 0) < 1
        ]
        errors += problems_of_counts(self.ranks, stages_per_rank)
        counts = stages_per_rank if isinstance(stages_per_rank, Sequence) else [stages_per_rank]
        needed = 0 if errors else sum(counts) * self.ranks // len(counts)
        if needed > len(self.model.layers):
            stages = plural(self.ranks, "rank")
            if stages_per_rank != 1:
                stages += f" with {', '.join(map(str, counts))} stages{' each' * (len(counts) == 1)}"
            have = f"the model has {len(self.model.layers)} {'stages' if self.model.are_stages else 'layers'}"
            errors.append(
                f"{stages} need at least one layer per stage, but {have}: use fewer ranks or stages per rank"
            )
        return errors

    def seconds_of(self, timeline: Timeline) -> float:
        """The objective, optimizer step included, without jitter."""
        seconds = timeline.length(self.objective)
        return seconds if self.objective == "period" else seconds + timeline.costs.optimizer_step
