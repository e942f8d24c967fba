"""All of a plan but the order of work: which layers make a stage, where it is, how many microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import fmean

from penstock.bounds import Bound, Workload, bounds
from penstock.cost.costs import Costs
from penstock.ir.placement import Placement
from penstock.planning.live_memory import Holding, fixed_bytes
from penstock.planning.model import Model
from penstock.planning.partition import Counts, balanced, even, moved
from penstock.planning.request import Question

__all__ = ["Frame", "cut_that_fits", "cuts", "framed", "frames", "is_too_long"]

MOST_STAGES_PER_RANK = 8
MOST_WORK = 1 << 15
"""Stages times microbatches of the largest schedule that is weighed."""


@dataclass(frozen=True)
class Frame:
    """What an order of work is chosen for, and the costs of its stages."""

    placement: Placement
    counts: Counts
    """How many layers each stage has."""
    microbatches: int
    samples: int
    """Of one microbatch."""
    costs: Costs

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank has."""
        return self.placement.num_stages // self.placement.num_ranks

    def __str__(self) -> str:
        legs = f"v={self.stages_per_rank}{' V' if self.placement.style == 'v' else ''}"
        return f"{legs}, m={self.microbatches}"

    @cached_property
    def fixed(self) -> tuple[float, ...]:
        """Per rank: bytes that are there all the time."""
        stages = self.placement.num_stages
        return tuple(fixed_bytes(self.costs, own, stages) for own in self.placement.stages_of_rank)

    def bound(self, question: Question, *, split: bool = True, paired: bool | None = None) -> Bound:
        """What no order of this work can stay below, optimizer step included.

        Pairs of a forward and a backward are thought of where they save time, unless `paired` says otherwise.
        """
        if paired is None:
            paired = self.costs.overlap_factor < 1 or self.costs.launch_overhead > 0
        work = Workload(self.placement, self.microbatches, self.costs, split=split, paired=paired)
        found = bounds(work, question.memory_limit, question.objective)[0]
        if question.objective == "period":  # which has the optimizer step in it
            return found
        return replace(found, seconds=found.seconds + self.costs.optimizer_step)


def frames(question: Question) -> Iterator[Frame]:
    """Every frame worth a look: stages per rank as far as layers reach, loop and V, all equal microbatches."""
    model, ranks = question.model, question.ranks
    most = min(MOST_STAGES_PER_RANK, len(model.layers) // ranks) if ranks > 1 else 1
    asked = question.stages_per_rank
    for legs in range(1, most + 1) if asked is None else [asked]:
        for placement in dict.fromkeys((Placement.loop(ranks, legs), Placement.v(ranks, legs))):
            always = cuts(model, placement)
            for m in _divisors(question.samples):
                waiting = [balanced(model.loads(), ranks, m)] if legs == 1 else []
                for counts in dict.fromkeys(each for each in (*waiting, *always) if each is not None):
                    yield framed(question, placement, counts, m)


def framed(question: Question, placement: Placement, counts: Counts, microbatches: int) -> Frame:
    """The frame with its costs."""
    samples = question.samples // microbatches
    return Frame(placement, counts, microbatches, samples, question.model.costs(counts, samples))


def is_too_long(frame: Frame) -> bool:
    """Whether it takes too long to weigh."""
    return frame.placement.num_stages * frame.microbatches > MOST_WORK


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


# --- partitions ------------------------------------------------------------------------------------


def cuts(model: Model, placement: Placement) -> list[Counts]:
    """The cuts to try for any number of microbatches: for the busiest rank, and for the longest stage."""
    loads, stages = model.loads(), placement.num_stages
    shortest = balanced(loads, stages)
    assert shortest is not None, "there is a layer for each stage"
    if stages == placement.num_ranks:
        return [shortest]

    def worth(counts: Counts) -> tuple[float, ...]:
        return _busiest(loads, counts, placement)

    starts = dict.fromkeys((shortest, even(len(loads), stages)))
    by_rank = min((moved(start, worth) for start in starts), key=worth)
    return list(dict.fromkeys((by_rank, shortest)))


def cut_that_fits(question: Question, frame: Frame, held: Sequence[Holding]) -> Counts | None:
    """The best cut found whose ranks have room for what an order holds; exact for one stage per rank."""
    model, limit = question.model, question.memory_limit
    assert limit is not None
    placement = frame.placement
    loads, stages = model.loads(), placement.num_stages
    one_each = model.costs([1] * len(loads), frame.samples)
    whole, freed = (one_each.per_stage(f"activation{n}", len(loads)) for n in ("", "_freed_by_input"))
    fixed = [fixed_bytes(one_each, (layer,), len(loads)) for layer in range(len(loads))]
    sizes = [[0.0, *accumulate(values)] for values in (fixed, whole, freed)]

    def peak(rank: int, ends: Sequence[tuple[int, int]]) -> float:
        own = [[until[j] - until[i] for i, j in ends] for until in sizes]
        row = [*own[1], *(w - f for w, f in zip(own[1], own[2]))]
        return sum(own[0]) + float((held[rank].rows @ row).max(initial=0))

    if stages == placement.num_ranks:
        hosts = placement.stage_to_rank
        m = frame.microbatches
        return balanced(loads, stages, m, lambda stage, i, j: peak(hosts[stage], [(i, j)]) <= limit)

    def worth(counts: Counts) -> tuple[float, ...]:
        ends = list(pairwise([0, *accumulate(counts)]))
        peaks = [peak(rank, [ends[s] for s in own]) for rank, own in enumerate(placement.stages_of_rank)]
        excess = sum(max(each - limit, 0.0) for each in peaks)
        return excess, *_busiest(loads, counts, placement)

    # single moves do not lead everywhere: they start from this cut, and from one with small stages
    live = fmean(float(each.rows.max(initial=0)) for each in held)
    small = balanced([f + live * w for f, w in zip(fixed, whole)], stages)
    starts = [frame.counts, *([small] if small else [])]
    found = min((moved(start, worth) for start in starts), key=worth)
    return found if worth(found)[0] == 0 else None


def _busiest(loads: Sequence[float], counts: Counts, placement: Placement) -> tuple[float, ...]:
    """The busiest rank, how uneven ranks are, the longest stage, how uneven stages are."""
    until = [0.0, *accumulate(loads)]
    stages = [until[j] - until[i] for i, j in pairwise([0, *accumulate(counts)])]
    ranks = [sum(stages[s] for s in own) for own in placement.stages_of_rank]
    return max(ranks), sum(x * x for x in ranks), max(stages), sum(x * x for x in stages)
