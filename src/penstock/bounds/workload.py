"""What has to be done whatever the order, and the longest chains of it before and after each step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from penstock.cost.costs import Costs
from penstock.ir.placement import Placement

__all__ = ["Work"]


@dataclass(frozen=True)
class Work:
    """What has to be done, whatever the order."""

    placement: Placement
    microbatches: int
    costs: Costs
    trains: bool = True
    split: bool = True
    """Whether a backward may be done as I and W."""
    paired: bool = False
    """Whether a forward and a backward may run as an overlapped pair."""

    @cached_property
    def forward(self) -> list[float]:
        """F per stage."""
        return self._least_in_pair(self.costs.per_stage("forward", self.placement.num_stages))

    @cached_property
    def passing(self) -> list[float]:
        """G per stage: I or B, whichever may be shorter."""
        stages = self.placement.num_stages
        whole = self.costs.full_backward(stages)
        if self.split:
            whole = [min(i, b) for i, b in zip(self.costs.per_stage("backward_input", stages), whole)]
        return self._least_in_pair(whole)

    @cached_property
    def deferred(self) -> list[float]:
        """W per stage: what must be done of a backward besides passing the gradient on."""
        stages = self.placement.num_stages
        if not self.split:
            return [0.0] * stages
        whole = self._least_in_pair(self.costs.full_backward(stages))
        first = self._least_in_pair(self.costs.per_stage("backward_input", stages))
        weight = self.costs.per_stage("backward_weight", stages)
        least = [min(i + w, b) for i, w, b in zip(first, weight, whole)]
        return [max(total - g, 0.0) for total, g in zip(least, self.passing)]

    def _least_in_pair(self, seconds: list[float]) -> list[float]:
        """A part of a pair takes as long as the pair, which a fixed cost can make shorter than the part."""
        if not self.paired or self.costs.overlap is None:
            return seconds
        return [min(each, self.costs.overlap) for each in seconds]

    def hop(self, value: str) -> list[float]:
        """Seconds per edge that an `activation` or a `gradient` is on its way: c."""
        hosts = self.placement.stage_to_rank
        seconds = self.costs.per_edge("latency", len(hosts))
        if self.costs.bandwidth is not None:
            sizes = self.costs.per_edge(f"{value}_message", len(hosts))
            speeds = self.costs.per_edge("bandwidth", len(hosts))
            seconds = [c + size / speed for c, size, speed in zip(seconds, sizes, speeds)]
        return [c if a != b else 0.0 for c, (a, b) in zip(seconds, pairwise(hosts))]

    def shrink(self, rank: int) -> float:
        """How much shorter than its parts, as a factor, the work of a rank can be by running in pairs."""
        if not self.paired:
            return 1.0
        stages = self.placement.num_stages
        forward, backward = self.costs.per_stage("forward", stages), self.costs.full_backward(stages)
        least = 1.0
        for f in (forward[s] for s in self.placement.stages_of_rank[rank]):
            for s in self.placement.stages_of_rank[rank]:
                for b in {backward[s], self.costs.per_stage("backward_input", stages)[s]}:
                    together = max(f, b) + self.costs.overlap_factor * min(f, b)
                    together = together if self.costs.overlap is None else self.costs.overlap
                    least = min(least, together / (f + b)) if f + b else least
        return least

    @cached_property
    def heads(self) -> dict[str, list[float]]:
        """Per kind and stage."""
        stages, launch = self.placement.num_stages, self.costs.launch_overhead
        down, up = self.hop("activation"), self.hop("gradient")
        forward = [0.0]
        for s in range(stages - 1):
            forward.append(forward[s] + self.forward[s] + launch + down[s])
        back = [0.0] * stages
        back[-1] = forward[-1] + self.forward[-1] + launch
        for s in reversed(range(stages - 1)):
            back[s] = back[s + 1] + self.passing[s + 1] + launch + up[s]
        return {"F": forward, "G": back, "W": [b + g for b, g in zip(back, self.passing)]}

    @cached_property
    def tails(self) -> dict[str, list[float]]:
        """Per kind and stage."""
        return self.tails_on(None)

    def tails_on(self, rank: int | None) -> dict[str, list[float]]:
        """Per kind and stage: up to the last end on one rank, or on any."""
        stages, launch = self.placement.num_stages, self.costs.launch_overhead
        down, up = self.hop("activation"), self.hop("gradient")
        nowhere = float("-inf")
        here = [rank is None or host == rank for host in self.placement.stage_to_rank]
        after = [
            max(nowhere if not mine else 0.0, w if mine and self.trains else nowhere)
            for mine, w in zip(here, self.deferred)
        ]
        back = [after[0]]
        for s in range(1, stages):
            on = up[s - 1] + self.passing[s - 1] + launch + back[s - 1]
            back.append(max(after[s], on if self.trains else nowhere))
        forward = [0.0] * stages
        forward[-1] = max(
            0.0 if here[-1] else nowhere, self.passing[-1] + launch + back[-1] if self.trains else nowhere
        )
        for s in reversed(range(stages - 1)):
            on = down[s] + self.forward[s + 1] + launch + forward[s + 1]
            forward[s] = max(0.0 if here[s] else nowhere, on)
        return {"F": forward, "G": back, "W": [0.0] * stages}

    def jobs(self, rank: int, *, alone: bool = False) -> list[tuple[float, float, float]]:
        """Head, seconds and tail of all microbatches of each kind and stage of a rank.

        Alone, its heads are counted from its own first start and its tails to its own last end.
        """
        tails = self.tails_on(rank) if alone else self.tails
        first = self.heads["F"][self.placement.stages_of_rank[rank][0]] if alone else 0.0
        kinds = {"F": self.forward}
        if self.trains:
            kinds |= {"G": self.passing, "W": self.deferred}
        extra = self.costs.launch_overhead / 2 if self.paired else self.costs.launch_overhead
        return [
            (
                self.heads[kind][s] - first,
                self.microbatches * (seconds[s] * self.shrink(rank) + (extra if kind != "W" else 0.0)),
                tails[kind][s],
            )
            for kind, seconds in kinds.items()
            for s in self.placement.stages_of_rank[rank]
        ]

    def seconds_of(self, rank: int) -> float:
        """All the work of a rank."""
        return sum(job[1] for job in self.jobs(rank))

    def round_trip(self, stage: int) -> float:
        """From the start of F to the start of what passes the gradient on."""
        return self.heads["G"][stage] - self.heads["F"][stage]

    def room(self, rank: int, limit: float) -> float:
        """What a limit of bytes leaves for activations."""
        stages = self.placement.num_stages
        names = ("parameters", "gradients", "optimizer_state")
        own = self.placement.stages_of_rank[rank]
        return max(limit - sum(self.costs.per_stage(name, stages)[s] for name in names for s in own), 0.0)
