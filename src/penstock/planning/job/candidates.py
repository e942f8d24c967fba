"""Candidates of a job's plan: every layout with every kind of family, lowest bound first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from penstock.cost.estimate.estimate import Estimator
from penstock.ir.placement import Placement
from penstock.planning.job.family_traits import Traits, families_by_traits
from penstock.planning.job.layouts import JobLayout, job_layouts
from penstock.planning.job.request import JobRequest
from penstock.planning.job.stages import Stages
from penstock.planning.partition import LayerCounts


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout with families that have the same bound."""

    layout: JobLayout
    traits: Traits
    stages: Stages
    counts: LayerCounts
    bound: float

    @property
    def placement(self) -> Placement:
        """Stages on ranks."""
        make = Placement.v if self.traits.is_v else Placement.loop
        return make(self.layout.pipeline, self.traits.stages_per_rank)


class JobCandidates:
    """Yields candidates by their bounds; those that cannot fit are set aside.

    A layout has one bound for all of its candidates, which is cheap. It becomes candidates only when that bound
    is the lowest that is left.
    """

    def __init__(self, request: JobRequest, estimator: Estimator) -> None:
        self.request, self._estimator = request, estimator
        self.counts: Counter[str] = Counter()
        """How many `layouts`, and how many candidates are `too large`."""
        self.too_large: dict[JobLayout, None] = {}
        """Layouts of candidates over the memory limit."""
        self.left = 0
        """How many layouts and candidates have higher bounds than the last one."""

    def __iter__(self) -> Iterator[Candidate]:
        order = count()
        heap: list[tuple[float, int, tuple[JobLayout, Stages] | Candidate]] = [
            (bound, next(order), (layout, stages)) for bound, layout, stages in self._layouts()
        ]
        heapify(heap)
        while heap:
            _, _, each = heappop(heap)
            if isinstance(each, Candidate):
                self.left = len(heap)
                yield each
                continue
            for candidate in self._of_layout(*each):
                heappush(heap, (candidate.bound, next(order), candidate))

    def set_aside(self, layout: JobLayout) -> None:
        """Count a candidate of this layout as too large."""
        self.counts["too large"] += 1
        self.too_large[layout] = None

    def _layouts(self) -> Iterator[tuple[float, JobLayout, Stages]]:
        """Every layout whose weights and optimizer state fit, with a bound for all of its candidates."""
        for layout in job_layouts(self.request):
            self.counts["layouts"] += 1
            stages = Stages(self._estimator(layout.setting(self.request)))
            if stages.mean_state(layout.pipeline) > self.request.memory_limit:
                self.set_aside(layout)
            else:
                hides = layout.expert > 1 and layout.pipeline > 1
                yield stages.layout_bound(layout.pipeline, layout.microbatches, paired=hides), layout, stages

    def _of_layout(self, layout: JobLayout, stages: Stages) -> Iterator[Candidate]:
        for traits in self._traits(layout):
            bound, counts = stages.partition(traits, layout.pipeline, layout.microbatches)
            if stages.least_memory(counts, traits, layout.pipeline) > self.request.memory_limit:
                self.set_aside(layout)
            else:
                yield Candidate(layout, traits, stages, counts, bound)

    def _traits(self, layout: JobLayout) -> Iterator[Traits]:
        blocks = self.request.config.layers
        for traits in families_by_traits(self.request.families):
            if layout.pipeline == 1 and (traits.stages_per_rank > 1 or traits.split or traits.paired):
                continue  # one rank has no bubble
            if traits.paired and layout.expert == 1:
                continue  # a pair hides nothing
            if layout.pipeline * traits.stages_per_rank <= blocks:
                yield traits
