"""A configuration: everything of a plan except the order of work (partition, placement, microbatches)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.bounds import Bound, Workload, bounds
from penstock.cost.costs import Costs
from penstock.cost.memory import fixed_bytes_of
from penstock.cost.prices import pairs_can_pay
from penstock.ir.placement import Placement, StagesPerRank
from penstock.planning.partition import LayerCounts
from penstock.planning.request import PlanRequest

_MAX_WORK = 1 << 15
"""Stages times microbatches of the largest schedule that is evaluated."""


@dataclass(frozen=True)
class Configuration:
    """What an order of work is chosen for, with the costs of its stages."""

    placement: Placement
    counts: LayerCounts
    """Number of layers of each stage."""
    microbatches: int
    samples: int
    """Per microbatch."""
    costs: Costs

    @cached_property
    def stages_per_rank(self) -> int | tuple[int, ...]:
        """Number of stages of each rank; a list if they differ."""
        counts = tuple(map(len, self.placement.stages_of_rank))
        return counts if len(set(counts)) > 1 else counts[0]

    @cached_property
    def style(self) -> str:
        """`loop`, `v` or `custom`, also with unequal numbers of stages per rank."""
        ranks, counts = self.placement.num_ranks, self.stages_per_rank
        if self.placement == Placement.loop(ranks, counts):
            return "loop"
        return "v" if self.placement == Placement.v(ranks, counts) else "custom"

    @property
    def is_too_large_to_evaluate(self) -> bool:
        """Whether it has too many stages and microbatches to build and simulate every family."""
        return self.placement.num_stages * self.microbatches > _MAX_WORK

    def __str__(self) -> str:
        return (
            f"v={stages_text(self.stages_per_rank)}{' V' if self.style == 'v' else ''}, m={self.microbatches}"
        )

    @cached_property
    def fixed(self) -> tuple[float, ...]:
        """Per rank: bytes of parameters, gradients and optimizer state."""
        stages = self.placement.num_stages
        return tuple(fixed_bytes_of(self.costs, own, stages) for own in self.placement.stages_of_rank)

    def bound(
        self,
        request: PlanRequest,
        *,
        split: bool = True,
        paired: bool | None = None,
        recomputed: tuple[int, ...] | None = None,
    ) -> Bound:
        """Lower bound on the objective of any order, optimizer step included.

        Overlapped pairs of a forward and a backward are allowed where they save time, unless `paired` says
        otherwise. With techniques it holds for every choice of them, or for the given numbers of recomputed
        microbatches per stage.
        """
        if paired is None:
            paired = pairs_can_pay(self.costs) or self.costs.launch_overhead > 0
        work = Workload(
            self.placement,
            self.microbatches,
            self.costs,
            split=split,
            paired=paired,
            recomputed=recomputed or (),
            may_recompute=request.recompute and recomputed is None,
            may_offload=request.offload and recomputed is None,
        )
        found = bounds(work, request.memory_limit, request.objective)[0]
        if request.objective == "period":  # which includes the optimizer step
            return found
        return replace(found, seconds=found.seconds + self.costs.optimizer_step)


def stages_text(stages_per_rank: StagesPerRank) -> str:
    """As the command line takes it: 2, or 1,2,2,1."""
    return (
        ",".join(map(str, stages_per_rank)) if isinstance(stages_per_rank, Sequence) else str(stages_per_rank)
    )


def configure(
    request: PlanRequest, placement: Placement, counts: LayerCounts, microbatches: int
) -> Configuration:
    """The configuration with the costs of its stages."""
    samples = request.samples // microbatches
    return Configuration(placement, counts, microbatches, samples, request.model.costs(counts, samples))
