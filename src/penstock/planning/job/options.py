"""An option of a job's plan: a layout with a schedule, its step time and its memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.families import build
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.planning.job.layouts import JobLayout
from penstock.planning.partition import LayerCounts


@dataclass(frozen=True)
class JobOption:
    """A layout with the schedule of a family."""

    layout: JobLayout
    family: str
    """Of its schedule, or `searched`."""
    placement: Placement
    counts: LayerCounts
    """Layers of each stage, embedding and output layer included."""
    bound: float
    """Lower bound on the makespan."""
    memory: float
    """Bytes on the device with the most, working memory included."""
    makespan: float = 0.0
    seconds: float = 0.0
    """Of a step: makespan, reduction of gradients and optimizer step."""
    mfu: float = 0.0
    tokens_per_second: float = 0.0
    """Of each device."""
    bubble: float = 0.0
    """The mean share of the makespan in which a rank idles."""
    is_exact: bool = False
    """Whether the whole step was simulated with its messages and collectives, or a shorter one extended."""
    technique: str = ""
    """What its schedule offloads, in words."""
    seconds_without_jitter: float = 0.0
    found: Schedule | None = field(default=None, repr=False, compare=False)
    """An order that no family has."""

    @property
    def schedule(self) -> Schedule:
        """The compute schedule."""
        return self.found or build(
            self.family,
            ranks=self.layout.pipeline,
            microbatches=self.layout.microbatches,
            stages_per_rank=self.stages_per_rank,
        )

    @property
    def lowered(self) -> Schedule:
        """The schedule as replicas run it: with messages and collectives, if there are replicas."""
        replicas = self.layout.data * self.layout.context
        return lower(self.schedule) if replicas > 1 else self.schedule

    @property
    def stages_per_rank(self) -> int:
        """Of each pipeline rank."""
        return self.placement.num_stages // self.placement.num_ranks

    @property
    def order(self) -> str:
        """The family with its technique, if it has one."""
        return f"{self.family}, {self.technique}" if self.technique else self.family

    @property
    def sort_key(self) -> tuple[float, float, str]:
        """Fastest first; among equals the one with the least memory."""
        return self.seconds, self.memory, self.family

    def __str__(self) -> str:
        stages = f" v={self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        technique = f", {self.technique}" if self.technique else ""
        order = f"{self.layout} {self.family}{stages}"
        return f"{order}, mbs {self.layout.microbatch_size}, {self._recompute}{technique}"

    @property
    def _recompute(self) -> str:
        level = self.layout.recompute
        return "no recomputation" if level == "none" else f"{level} recomputation"
