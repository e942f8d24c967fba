"""Evaluation of a job's candidates: lowest bound first, until no bound is below the best."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate, count, pairwise
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.estimate.estimate import Estimate, Estimator
from penstock.cost.memory import LiveActivations, live_activations
from penstock.cost.prices import edge_prices
from penstock.errors import BuildError
from penstock.families import build
from penstock.ir.encoding import Floats, Ints
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planning.estimated_model import even_blocks, stage_costs
from penstock.planning.job.layouts import JobLayout, JobOption, job_layouts
from penstock.planning.job.request import FamilyShape, JobRequest, families_by_shape
from penstock.planning.options import frontier
from penstock.planning.partition import LayerCounts, move_layer
from penstock.simulation.simulator import Simulator, simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel

# Stages of a layout as sums over arrays: partition, lower bound on the step, lower bound on the memory.


_HALVINGS, _MOVES = 16, 8
_BALANCED = 1.01
"""The busiest rank over the mean one from which on layers are moved."""
_ROUNDING = 1e-9


class Stages:
    """The layers of an estimate, to be divided into stages in many ways."""

    def __init__(self, found: Estimate) -> None:
        self.estimate = found
        kinds = found.config.kinds
        rows = {kind: _row(found, kind) for kind in found.by_kind}
        table = np.array([rows[kind] for kind in kinds]).T
        self._compute, self._exchanged = table[0:2], table[2:4]
        """Seconds of the forward and the whole backward, per layer."""
        self._state, self._activation, self._working, self._freed = table[4:8]
        self._counts: dict[int, LayerCounts] = {}

    @cached_property
    def _until(self) -> list[float]:
        """Seconds of the layers before each."""
        loads = self._compute.sum(axis=0) + self._exchanged.sum(axis=0)
        return [0.0, *np.cumsum(loads).tolist()]

    def counts(self, stages: int) -> LayerCounts:
        """Blocks evenly, or layers in order with the longest stage as short as found, if that is shorter."""
        if stages not in self._counts:
            even, packed = even_blocks(self.estimate, stages), self._packed(stages)
            is_even = packed is None or self._longest(even) <= self._longest(packed) * (1 + _ROUNDING)
            self._counts[stages] = even if packed is None or is_even else packed
        return self._counts[stages]

    def partition(self, shape: FamilyShape, ranks: int, microbatches: int) -> tuple[float, LayerCounts]:
        """The partition with the least bound that was found, and that bound.

        With several stages per rank the longest stage may be on the busiest rank. Its layers are moved to the
        rank with the least to do, as long as that lowers the bounds.
        """
        counts = self.counts(ranks * shape.stages_per_rank)
        best = self._rank_bounds(counts, shape, ranks, microbatches)
        own = _own_stages(ranks, shape.stages_per_rank, is_v=shape.is_v)
        for _ in range(_MOVES if shape.stages_per_rank > 1 else 0):
            if best.max() < best.mean() * _BALANCED:
                break
            sources, targets = own[best.argmax()][[0, -1]], own[best.argmin()][[0, -1]]
            moves = [move_layer(counts, s, t) for s in sources for t in targets if counts[s] > 1 and s != t]
            tried = [(self._rank_bounds(each, shape, ranks, microbatches), each) for each in moves]
            found = min(tried, key=lambda each: _key(each[0]), default=None)
            if found is None or _key(found[0]) >= _key(best):
                break
            best, counts = found
        return float(best.max()), counts

    def _longest(self, counts: LayerCounts) -> float:
        ends = [self._until[end] for end in (0, *accumulate(counts))]
        return max(b - a for a, b in pairwise(ends))

    def _packed(self, stages: int) -> LayerCounts | None:
        """Stages filled one after the other up to a limit, which is halved towards the least that suffices."""
        until, best = self._until, None
        largest = max(b - a for a, b in pairwise(until))
        low = max(largest, until[-1] / stages) * (1 - _ROUNDING)
        high = low + largest
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            counts = _fill(until, stages, middle)
            if counts is None:
                low = middle
            else:
                best, high = counts, middle
        return best

    def layout_bound(self, ranks: int, microbatches: int, *, paired: bool) -> float:
        """Lower bound on the makespan in any stages: the mean rank's work, with all-to-all hidden or not."""
        streams = self._compute.sum(), self._exchanged.sum()
        return microbatches * float(max(streams) if paired else sum(streams)) / ranks

    def bound(self, counts: LayerCounts, shape: FamilyShape, ranks: int, microbatches: int) -> float:
        """Lower bound on the makespan."""
        return float(self._rank_bounds(counts, shape, ranks, microbatches).max())

    def _rank_bounds(self, counts: LayerCounts, shape: FamilyShape, ranks: int, microbatches: int) -> Floats:
        """By each rank: it waits for its first input, works, and its last gradient goes on.

        An overlapped pair hides the shorter of its two streams. With a split backward, weight gradients may be
        all that is left to do at the end, and a pair may hide a part of its backward: nothing is added there.
        """
        starts = np.cumsum([0, *counts[:-1]])
        compute = np.add.reduceat(self._compute, starts, axis=1)
        exchanged = np.add.reduceat(self._exchanged, starts, axis=1)
        forward, backward = compute + exchanged
        before = np.cumsum(forward) - forward
        ends_early = shape.split or shape.paired
        after = np.zeros_like(backward) if ends_early else np.cumsum(backward) - backward
        work = np.array((compute.sum(axis=0), exchanged.sum(axis=0)))
        own = _own_stages(ranks, shape.stages_per_rank, is_v=shape.is_v)
        streams = work[:, own].sum(axis=2)
        busy = streams.max(axis=0) if shape.paired else streams.sum(axis=0)
        bounds: Floats = before[own].min(axis=1) + microbatches * busy + after[own].min(axis=1)
        return bounds

    def mean_state(self, ranks: int) -> float:
        """Bytes of weights, gradients and optimizer state of the mean rank: no partition needs less."""
        return float(self._state.sum()) / ranks

    def least_memory(self, counts: LayerCounts, shape: FamilyShape, ranks: int) -> float:
        """Lower bound on the memory of a rank: its state, and one activation of one of its stages."""
        state, activation, working = self._stage_bytes(counts)
        own = _own_stages(ranks, shape.stages_per_rank, is_v=shape.is_v)
        held: Floats = state[own].sum(axis=1) + (activation + working)[own].max(axis=1)
        return float(held.max())

    def memory_of_1f1b(self, counts: LayerCounts, microbatches: int) -> float:
        """Of the rank with the most, with one stage per rank."""
        state, activation, working = self._stage_bytes(counts)
        live = np.minimum(microbatches, np.arange(len(counts), 0, -1))
        return float((state + live * activation + working).max())

    def state_of(self, counts: LayerCounts) -> float:
        """The most bytes of weights, gradients and optimizer state of a stage."""
        return float(self._stage_bytes(counts)[0].max())

    def working(self, counts: LayerCounts, placement: Placement) -> Floats:
        """Per rank: bytes that a backward needs besides."""
        working = self._stage_bytes(counts)[2]
        most: Floats = working[np.array(placement.stages_of_rank)].max(axis=1)
        return most

    def memory(self, counts: LayerCounts, live: Sequence[LiveActivations]) -> float:
        """The most bytes of a rank with its working memory, given what orders hold, without receive buffers."""
        state, activation, working = self._stage_bytes(counts)
        freed = np.add.reduceat(self._freed, np.cumsum([0, *counts[:-1]]))
        peaks = []
        for each in live:
            own = list(each.stages)
            held = each.most_held([*activation[own], *freed[own]])
            peaks.append(float(state[own].sum() + working[own].max()) + held)
        return max(peaks)

    def _stage_bytes(self, counts: LayerCounts) -> tuple[Floats, Floats, Floats]:
        starts = np.cumsum([0, *counts[:-1]])
        state, activation = (np.add.reduceat(each, starts) for each in (self._state, self._activation))
        return state, activation, np.maximum.reduceat(self._working, starts)


def _key(bounds: Floats) -> tuple[float, float]:
    """The largest first, then all of them; rounded, so that moves end."""
    return round(float(bounds.max()), 9), round(float((bounds**2).sum()), 9)


@cache
def _own_stages(ranks: int, stages_per_rank: int, *, is_v: bool) -> Ints:
    """The stages of each rank."""
    make = Placement.v if is_v else Placement.loop
    return np.array(make(ranks, stages_per_rank).stages_of_rank)


def _row(found: Estimate, kind: str) -> list[float]:
    layer = found.by_kind[kind]
    compute, exchanged = layer.seconds.compute, layer.seconds.all_to_all
    weights = layer.weights
    return [
        compute.forward,
        compute.input_gradient + compute.weight_gradient,
        exchanged.forward,
        exchanged.input_gradient + exchanged.weight_gradient,
        weights.parameters + weights.gradients + weights.optimizer_state,
        layer.operations.activation,
        layer.operations.working,
        layer.operations.freed_by_input,
    ]


def _fill(until: list[float], stages: int, limit: float) -> LayerCounts | None:
    """Layers from the first stage on, none above the limit, one at least for each; None if that leaves some."""
    layers, counts, first = len(until) - 1, [], 0
    for stage in range(stages):
        most = layers - (stages - stage - 1)
        end = min(bisect_right(until, until[first] + limit, first + 1, most + 1) - 1, most)
        if end == first:
            return None
        counts.append(end - first)
        first = end
    return tuple(counts) if first == layers else None


# Candidates of a job's plan: every layout with every kind of family, lowest bound first.


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout with families that have the same bound."""

    layout: JobLayout
    shape: FamilyShape
    stages: Stages
    counts: LayerCounts
    bound: float

    @property
    def placement(self) -> Placement:
        """Stages on ranks."""
        make = Placement.v if self.shape.is_v else Placement.loop
        return make(self.layout.pipeline, self.shape.stages_per_rank)


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
            stages = Stages(self._estimator(layout.parallel_config(self.request)))
            if stages.mean_state(layout.pipeline) > self.request.memory_limit:
                self.set_aside(layout)
            else:
                hides = layout.expert > 1 and layout.pipeline > 1
                yield stages.layout_bound(layout.pipeline, layout.microbatches, paired=hides), layout, stages

    def _of_layout(self, layout: JobLayout, stages: Stages) -> Iterator[Candidate]:
        for shape in self._shapes(layout):
            bound, counts = stages.partition(shape, layout.pipeline, layout.microbatches)
            if stages.least_memory(counts, shape, layout.pipeline) > self.request.memory_limit:
                self.set_aside(layout)
            else:
                yield Candidate(layout, shape, stages, counts, bound)

    def _shapes(self, layout: JobLayout) -> Iterator[FamilyShape]:
        blocks = self.request.config.layers
        for shape in families_by_shape(self.request.families):
            if layout.pipeline == 1 and (shape.stages_per_rank > 1 or shape.split or shape.paired):
                continue  # one rank has no bubble
            if shape.paired and layout.expert == 1:
                continue  # a pair hides nothing
            if layout.pipeline * shape.stages_per_rank <= blocks:
                yield shape


# Schedules of candidates, each built once, with what their ranks hold.


@dataclass(frozen=True, eq=False)
class BuiltSchedule:
    """A schedule with what its ranks hold."""

    schedule: Schedule
    live: list[LiveActivations]

    def simulated(self, costs: Costs) -> Timeline:
        """With messages that take their time but do not queue: families are valid, and this is fast."""
        total = edge_prices(costs, self.schedule.graph, "activation").total
        unqueued = replace(costs, bandwidth=None, latency=tuple(total.tolist()) or 0.0)
        simulator = Simulator(self.schedule, unqueued, SendModel.BUFFERED)
        return Timeline(self.schedule, unqueued, *simulator.times(simulator.finished_run()))


class BuiltSchedules:
    """Builds each schedule once."""

    def __init__(self) -> None:
        self._built: dict[tuple[str, int, int, int], BuiltSchedule | None] = {}

    def get(self, family: str, ranks: int, microbatches: int, stages_per_rank: int) -> BuiltSchedule | None:
        """The schedule of a family; None if it has none for these numbers."""
        key = (family, ranks, microbatches, stages_per_rank)
        if key not in self._built:
            try:
                schedule = build(
                    family, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
                )
                self._built[key] = BuiltSchedule(schedule, live_activations(schedule.table))
            except BuildError:
                self._built[key] = None
        return self._built[key]


# Evaluation of a job's candidates: lowest bound first, until no bound is below the best ten layouts.
#
# A candidate is simulated with messages that do not queue and with few rounds of microbatches; a longer step is
# extended by the time of a round, because the middle of a schedule repeats itself. The best options are then
# simulated exactly: all microbatches, queues of messages, gradients reduced where the lowered schedule does it.


_RANKED = 10
_STEPS = 300_000
"""Actions that are simulated with a budget of 1."""
_MAX_EXACT_STEPS, _MAX_EXACT, _EXACT_FRONTIER = 60_000, 25, 5
_ROUNDS = 3

OnJobProgress: TypeAlias = Callable[[str, float, float], None]
"""Called with the phase, the fraction done and the best seconds so far."""


class _Step(NamedTuple):
    """A simulated step without its optimizer step."""

    makespan: float
    memory: float
    busy: float
    """Seconds of the mean rank."""


class Over(NamedTuple):
    """A family that exceeds the memory limit in the stages of a candidate."""

    candidate: Candidate
    family: str
    memory: float


class JobEvaluation:
    """The options of a request that were found so far."""

    def __init__(self, request: JobRequest, on_progress: OnJobProgress | None = None) -> None:
        self.request = request
        self.on_progress = on_progress or (lambda *_: None)
        self.estimator = Estimator(request.config, request.device)
        self.candidates = JobCandidates(request, self.estimator)
        self._schedules = BuiltSchedules()
        self.options: list[JobOption] = []
        self.over: list[Over] = []
        """What might fit with techniques, lowest bound first."""
        self.counts: Counter[str] = self.candidates.counts
        """How many `layouts`; how many candidates `too large`, `evaluated`, `pruned`, `not evaluated`."""
        self.bound = inf
        """Lower bound on the makespan of any candidate that may fit."""
        self.next_bound = inf
        """That of the first candidate which was not evaluated."""
        self._steps = 0

    def run(self) -> None:
        """Evaluate the candidates, then the best options exactly."""
        self.on_progress("bounds", 0.0, inf)
        best: dict[tuple[int, ...], float] = {}
        most = _STEPS * self.request.budget
        for each in self.candidates:
            ranked, self.bound = sorted(best.values()), min(self.bound, each.bound)
            if len(ranked) >= _RANKED and each.bound >= ranked[_RANKED - 1]:
                self.counts["pruned"] += 1 + self.candidates.left
                break
            if self._steps > most:
                self.counts["not evaluated"] += 1 + self.candidates.left
                self.next_bound = each.bound
                break
            if best.get(each.layout.sizes, inf) <= each.bound:
                self.counts["pruned"] += 1
                continue
            self.on_progress("simulating", min(1.0, self._steps / most), min(ranked, default=inf))
            for option in self._evaluate(each):
                self.options.append(option)
                best[option.layout.sizes] = min(option.seconds, best.get(option.layout.sizes, inf))
        self._make_exact()

    def ranked(self) -> list[JobOption]:
        """The best option of each layout, fastest first."""
        best: dict[tuple[int, ...], JobOption] = {}
        for option in sorted(self.options, key=lambda each: each.sort_key):
            best.setdefault(option.layout.sizes, option)
        return list(best.values())

    # --- candidates ----------------------------------------------------------------------------------

    def _evaluate(self, each: Candidate) -> Iterator[JobOption]:
        placement, found = each.placement, each.stages.estimate
        known = families_by_shape(self.request.families)[each.shape]
        fitting = [family for family in known if self._fits(family, each)]
        costs = stage_costs(found, placement, each.counts) if fitting else Costs()
        for family in fitting:
            step = self._extended(family, each, costs)
            self.counts["evaluated"] += 1
            rest = costs.optimizer_step + _last_reduction(costs, placement)
            yield self._option(found, each, family, step, step.makespan + rest)

    def _fits(self, family: str, each: Candidate) -> bool:
        """Whether the family can be built, and its activations are within the memory limit."""
        built = self._schedules.get(family, *self._lengths(each)[-1], each.shape.stages_per_rank)
        if built is None:
            return False
        memory = each.stages.memory(each.counts, built.live)
        if memory > self.request.memory_limit:  # more microbatches do not need less
            self.candidates.set_aside(each.layout)
            self.over.append(Over(each, family, memory))
            return False
        return True

    def _lengths(self, each: Candidate) -> list[tuple[int, int]]:
        """Ranks and microbatches of the steps that are simulated: all, or of a step and one a round shorter."""
        ranks, m = each.layout.pipeline, each.layout.microbatches
        short = min(m, (_ROUNDS - 1) * ranks + m % ranks + ranks)
        return [(ranks, short)] if short == m else [(ranks, short - ranks), (ranks, short)]

    def _extended(self, family: str, each: Candidate, costs: Costs) -> _Step:
        """A step, extended from fewer microbatches."""
        runs, lengths = [], self._lengths(each)
        for ranks, number in lengths:
            built = self._schedules.get(family, ranks, number, each.shape.stages_per_rank)
            assert built is not None, "a family that has a longer step has a shorter one"
            self._steps += built.schedule.num_steps
            timeline, memory = built.simulated(costs), each.stages.memory(each.counts, built.live)
            runs.append(_Step(timeline.makespan, memory, sum(timeline.busy) / ranks))
        if len(runs) == 1:
            return runs[0]
        ranks, short = lengths[-1]
        rounds = (each.layout.microbatches - short) / ranks
        step = _Step(*(y + rounds * (y - x) for x, y in zip(*runs)))
        return step._replace(makespan=max(step.makespan, each.bound))

    def _option(self, found: Estimate, each: Candidate, family: str, step: _Step, seconds: float) -> JobOption:
        option = JobOption(
            *(each.layout, family, each.placement, each.counts, each.bound, step.memory),
            bubble=1 - step.busy / step.makespan,
        )
        return _timed(option, self.request, found, step.makespan, seconds)

    # --- the best options ----------------------------------------------------------------------------

    def _make_exact(self) -> None:
        """Simulate the frontier with all that is known, and the best options until they stay the best."""
        done = 0
        waiting = [*frontier(self.options)[:_EXACT_FRONTIER], *self.ranked()[:_RANKED]]
        while waiting and done < _MAX_EXACT:
            for option in dict.fromkeys(waiting):
                self.on_progress(f"exactly {option.layout}", done / _MAX_EXACT, option.seconds)
                self.options[self.options.index(option)] = self.exact(option)
                done += 1
            self.options = [each for each in self.options if each.memory <= self.request.memory_limit]
            waiting = [each for each in self.ranked()[:_RANKED] if not each.is_exact and is_short(each)]
        self.options.sort(key=lambda each: each.sort_key)

    def exact(self, option: JobOption, request: JobRequest | None = None) -> JobOption:
        """The option simulated with all microbatches, queues of messages and collectives, if it is not long."""
        if not is_short(option):
            return option
        request = request or self.request
        estimator = self.estimator if request is self.request else Estimator(request.config, request.device)
        found = estimator(option.layout.parallel_config(request))
        costs = stage_costs(found, option.placement, option.counts)
        timeline = simulate(option.lowered, costs)
        working = Stages(found).working(option.counts, option.placement)
        memory = float((np.array(timeline.peak_memory) + working).max())
        option = replace(option, memory=memory, bubble=timeline.bubble("makespan"), is_exact=True)
        return _timed(option, request, found, timeline.makespan, timeline.makespan + costs.optimizer_step)

    def most_working(self, found: Estimate, option: JobOption) -> float:
        """The most working memory of a rank, in bytes."""
        return float(Stages(found).working(option.counts, option.placement).max())

    def timed(self, option: JobOption, seconds: float) -> JobOption:
        """The option with another step time under jitter."""
        found = self.estimator(option.layout.parallel_config(self.request))
        changed = _timed(option, self.request, found, option.makespan, seconds)
        return replace(changed, seconds_without_jitter=option.seconds)


def _timed(
    option: JobOption, request: JobRequest, found: Estimate, makespan: float, seconds: float
) -> JobOption:
    return replace(
        option,
        makespan=makespan,
        seconds=seconds,
        seconds_without_jitter=seconds,
        mfu=found.mfu(seconds, option.layout.microbatches, option.layout.pipeline),
        tokens_per_second=request.batch * request.sequence / seconds / request.devices,
    )


def is_short(option: JobOption) -> bool:
    """Whether its whole step is simulated."""
    return 2 * option.layout.microbatches * option.placement.num_stages <= _MAX_EXACT_STEPS


def _last_reduction(costs: Costs, placement: Placement) -> float:
    """Seconds of the reductions that nothing hides: that of the stage which each rank finishes last."""
    seconds = costs.per_stage("reduce_grad", placement.num_stages)
    return max(seconds[own[0]] for own in placement.stages_of_rank)
