"""Evaluation of a job's plan: layouts with shapes of families, lowest bound first, until no bound can win.

A layout has one bound for all of its configurations, which is cheap. It becomes configurations only when that
bound is the lowest that is left. A configuration is simulated with messages that do not queue and with few
rounds of microbatches; a longer step is extended by the time of a round, because the middle of a schedule
repeats itself. The best options are then simulated exactly: all microbatches, queues of messages, gradients
reduced where the lowered schedule does it.

Memory policies, searched orders and jitter are for the few best layouts, because they need whole schedules.
What they cost follows from the budget in moves and simulated actions, not in seconds, so that a plan does not
depend on the machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate, count, islice, pairwise
from math import ceil, inf, isfinite, lcm
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

import numpy as np

from penstock.arguments import did_you_mean, listed, plural, printable, some
from penstock.cost.costs import Costs
from penstock.cost.estimate.devices import Device
from penstock.cost.estimate.estimate import Estimate, Estimator
from penstock.cost.estimate.model_config import ModelConfig
from penstock.cost.estimate.parallel_config import ParallelConfig, size_problems
from penstock.cost.memory import LiveActivations, live_activations
from penstock.cost.prices import edge_prices
from penstock.cost.units import bytes_text, seconds_text
from penstock.errors import BuildError, EstimateError, Message, Parameter, PlanError
from penstock.families import build, families
from penstock.families.registry import offloading_schedules
from penstock.ir.encoding import Floats, Ints
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.planning.estimated_model import even_blocks, layer_kinds, stage_costs
from penstock.planning.evaluation import (
    POLICY_KINDS,
    Configuration,
    Evaluation,
    Option,
    Request,
    by_rank,
    frontier,
)
from penstock.planning.layout import PipelineLayout, layout_of_kinds
from penstock.planning.partition import LayerCounts, move_layer
from penstock.search.passes import FitMemory
from penstock.simulation.jitter import Spread, simulate_with_jitter
from penstock.simulation.simulator import Simulator, simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel

T = TypeVar("T")

HEADROOM = 0.1
"""Share of a device's memory that plans leave free by default, because the estimated memory does not count
fragmentation, buffers of collectives and the CUDA context.
"""

_STAGES_PER_RANK = (2, 3, 4, 6, 8, 12)
_MICROBATCH_SIZES = (1, 2, 4, 8)
_GRANULARITIES = ("none", "pointwise", "latent", "full")
_LEAST_TOKENS = 8192
"""Of a sample on each context parallel rank, unless its size is given: it is used for long sequences only."""


class FamilyShape(NamedTuple):
    """What bounds depend on in a schedule family."""

    stages_per_rank: int
    is_v: bool
    split: bool
    """Whether backwards are split into input and weight gradients."""
    paired: bool
    """Whether forwards and backwards overlap."""


@cache
def families_by_shape(only: tuple[str, ...] = ()) -> dict[FamilyShape, tuple[str, ...]]:
    """Return the training families, or only these, by their shapes; families that offload are left out."""
    found: dict[FamilyShape, list[str]] = {}
    for name, family in families().items():
        if only and name not in only:
            continue
        fixed = family.stages_per_rank
        for stages in _STAGES_PER_RANK if fixed is None else (fixed,):
            try:
                small = build(name, ranks=2, microbatches=4, stages_per_rank=stages)
            except BuildError:
                continue
            table = small.table
            if table.has(Kind.B, Kind.I) and not table.has(Kind.OFFLOAD, Kind.RECOMPUTE):
                is_v = stages > 1 and small.placement == Placement.v(2, stages)
                shape = FamilyShape(stages, is_v, table.has(Kind.I), table.has_pairs)
                found.setdefault(shape, []).append(name)
    return {shape: tuple(names) for shape, names in found.items()}


@dataclass(frozen=True)
class JobRequest(Request):
    """A model config, devices and a batch; parallel sizes that are given are not searched."""

    config: ModelConfig
    device: Device
    devices: int
    batch: int
    """Samples per step of the whole job."""
    sequence: int
    """Tokens of a sample."""
    precision: str = "bf16"
    zero: int = 1
    gradient_bytes: int = 4
    memory_limit: float = field(default=0.0, kw_only=True)
    """Bytes per device; 0 for all that the device has but HEADROOM."""
    tensor: int | None = None
    context: int | None = None
    expert: int | None = None
    pipeline: int | None = None
    microbatch_size: int | None = None
    recompute_granularity: str | None = None
    """What each layer recomputes; unless given, several are tried."""
    families: tuple[str, ...] = ()
    """The schedules to choose from; empty for all, and for orders that are searched."""
    budget: float = 1.0
    """How many times as many actions are simulated as by default."""
    search: bool = True
    """Whether orders are searched for the best options."""

    def __post_init__(self) -> None:
        if not self.memory_limit:
            object.__setattr__(self, "memory_limit", (1 - HEADROOM) * self.device.memory_bytes)
        sizes = {name: getattr(self, name) for name in ("devices", "batch", "sequence")}
        for name in ("tensor", "context", "expert", "pipeline", "microbatch_size"):
            if (value := getattr(self, name)) is not None:
                sizes[name] = value
        problems = size_problems(sizes)
        if not problems:
            problems = [*self._sizes_that_do_not_divide(), *self._sizes_without_the_model()]
        problems += self._unknown_families()
        if not self.budget > 0:
            problems.append(Message(Parameter("budget"), f" must be a number above 0 (given {self.budget})"))
        problems += self.broken_rules()
        if problems:
            raise PlanError(Message.join("; ", problems))

    def _sizes_that_do_not_divide(self) -> list[Message]:
        product, given, problems = 1, [], []
        for name in ("tensor", "context", "pipeline"):
            if (value := getattr(self, name)) is not None:
                product *= value
                given.append(Message(Parameter(name, value)))
        if self.devices % product:
            near = max(product, self.devices - self.devices % product)
            devices = Parameter("devices", self.devices), ": try ", Parameter("devices", near)
            problems.append(Message(Message.join(" x ", given), " does not divide ", *devices))
        blocks = self.config.layers
        if self.pipeline is not None and self.pipeline > blocks:
            few = f": {self.config.name} has {plural(blocks, 'block')}, one for each rank at least"
            problems.append(Message(Parameter("pipeline", self.pipeline), few))
        return problems

    def _unknown_families(self) -> list[Message]:
        known = {name for names in families_by_shape().values() for name in names}
        must = f" are of {listed(sorted(known))}"
        return [
            Message(Parameter("families"), f"{must} (given {printable(name)}){did_you_mean(name, known)}")
            for name in self.families
            if name not in known
        ]

    def _sizes_without_the_model(self) -> list[Message]:
        """Return sizes that are given and do not divide heads, experts, width or sequence."""
        expert = self.expert or 1
        fixed = self.parallel_config(1, (self.tensor or 1, self.context or 1, expert, expert))
        try:
            fixed.check(self.config)
            self.device.peak(self.precision)
        except EstimateError as error:
            return [error.message]
        return []

    def parallel_config(
        self, microbatch_size: int, sizes: tuple[int, int, int, int], recompute_granularity: str | None = None
    ) -> ParallelConfig:
        """Return the config of stages with these tensor, context, expert and data parallel sizes."""
        return ParallelConfig(
            self.sequence,
            microbatch_size,
            *sizes,
            precision=self.precision,
            gradient_bytes=self.gradient_bytes,
            zero=self.zero,
            recompute_granularity=recompute_granularity or self.recompute_granularity or "none",
        )

    @property
    def limit_share(self) -> str:
        """The part of a device that the memory limit is."""
        whole = self.device.memory_bytes
        return f"{self.memory_limit / whole:.0%} of {bytes_text(whole)}"

    @property
    def title(self) -> str:
        """The title of a picture."""
        return f"{self.config.name}: {self.devices} {self.device.name}, {plural(self.batch, 'sample')}"

    @property
    def time_name(self) -> str:
        """What the seconds of an option are."""
        return "makespan + gradient reductions + optimizer step"

    def layout(self, counts: Sequence[int]) -> PipelineLayout:
        """Return the layout of stages with these numbers of layers."""
        return layout_of_kinds(layer_kinds(self.config), counts)

    def to_keys(self) -> dict[str, Any]:
        """Return what is planned as values for JSON."""
        return {
            "model": self.config.name,
            "device": self.device.name,
            "devices": self.devices,
            "samples": self.batch,
            "sequence": self.sequence,
        }


@dataclass(frozen=True)
class JobLayout:
    """The parallel config of its stages, which has what layers recompute; pipeline ranks and microbatches."""

    parallel: ParallelConfig
    pipeline: int
    microbatches: int
    """Per pipeline."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor, context, expert, pipeline and data parallel size."""
        own = self.parallel
        both = own.tensor_parallel, own.context_parallel
        return *both, own.expert_parallel, self.pipeline, own.data_parallel

    def __str__(self) -> str:
        names = zip(("TP", "CP", "EP", "PP", "DP"), self.sizes)
        return " ".join(f"{name}{size}" for name, size in names if size > 1 or name in ("TP", "PP", "DP"))


def job_layouts(request: JobRequest) -> Iterator[JobLayout]:
    """Yield every layout that divides devices, batch, heads, experts and sequence."""
    granularities = _chosen(request.recompute_granularity, _GRANULARITIES)
    if request.recompute_granularity is None and request.config.attention.kv_rank is None:
        granularities = tuple(each for each in _GRANULARITIES if each != "latent")
    for tensor, context, pipeline, data in _parallel_sizes(request):
        for size in _chosen(request.microbatch_size, _MICROBATCH_SIZES):
            if not _divides_batch(request.batch, data, size):
                continue
            microbatches = request.batch // data // size
            for expert in _expert_sizes(request, tensor * context * data):
                for level in granularities:
                    parallel = request.parallel_config(size, (tensor, context, expert, data), level)
                    yield JobLayout(parallel, pipeline, microbatches)


def _divides_batch(batch: int, data: int, microbatch_size: int) -> bool:
    """Whether each data parallel replica gets a number of whole microbatches."""
    return not batch % (data * microbatch_size)


def _parallel_sizes(request: JobRequest) -> Iterator[tuple[int, int, int, int]]:
    """Yield tensor, context, pipeline and data parallel sizes that devices and model allow, for any batch."""
    config, devices, sequence = request.config, request.devices, request.sequence
    for tensor in _chosen(request.tensor, _powers(request.device.node_devices)):
        if config.attention.heads % tensor or config.width % tensor or sequence % tensor:
            continue
        for context in _chosen(request.context, _powers(max(1, sequence // _LEAST_TOKENS))):
            parts = tensor * context * (2 if context > 1 else 1)
            rest, left = divmod(devices, tensor * context)
            if left or sequence % parts:
                continue
            for pipeline in _chosen(request.pipeline, tuple(range(1, min(rest, config.layers) + 1))):
                data = rest // pipeline
                if not rest % pipeline and _expert_sizes(request, tensor * context * data):
                    yield tensor, context, pipeline, data


def _expert_sizes(request: JobRequest, ranks: int) -> list[int]:
    """Return expert parallel sizes: powers of two that divide the experts and the ranks of a stage."""
    experts = request.config.experts
    if experts is None:
        return [1]
    every = _chosen(request.expert, _powers(min(experts.count, ranks)))
    return [each for each in every if not experts.count % each and not ranks % each]


def _chosen(given: T | None, every: tuple[T, ...]) -> tuple[T, ...]:
    return every if given is None else (given,)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(most.bit_length()))


@dataclass(frozen=True)
class DataSizes:
    """The data parallel sizes of all divisions of the devices, by whether they divide the batch."""

    request: JobRequest
    allowed: tuple[int, ...]
    excluded: tuple[int, ...]

    @property
    def nearest_batches(self) -> dict[int, tuple[int, ...]]:
        """The next smaller and the next larger batch that keep every allowed size, with the sizes they add."""
        batch, least = self.request.batch, self.request.microbatch_size or 1
        common = lcm(*self.allowed) * least
        steps = {lcm(common, size * least) for size in self.excluded}
        smaller = max((step * ((batch - 1) // step) for step in steps), default=0)
        larger = min((step * (batch // step + 1) for step in steps), default=0)
        return {
            near: tuple(size for size in self.excluded if _divides_batch(near, size, least))
            for near in (smaller, larger)
            if near > 0
        }

    def __str__(self) -> str:
        """Return the rule that excludes sizes, and what to try; empty if none is excluded."""
        if not self.excluded:
            return ""
        fixed, verb = self.request.microbatch_size, "are" if len(self.excluded) > 1 else "is"
        size = "microbatch size" if fixed is None else f"microbatch size {fixed}"
        nearest = (
            f"a batch of {near} also allows DP {some(added)}" for near, added in self.nearest_batches.items()
        )
        return (
            f"DP {some(self.excluded)} {verb} left out: the batch of {self.request.batch} must be divisible by "
            f"DP x {size}; {', '.join(nearest)}"
        )


def data_sizes(request: JobRequest) -> DataSizes:
    """Return the data parallel sizes of a request."""
    every = sorted({data for _, _, _, data in _parallel_sizes(request)})
    least = request.microbatch_size or 1
    allowed = tuple(size for size in every if _divides_batch(request.batch, size, least))
    return DataSizes(request, allowed, tuple(size for size in every if size not in allowed))


_HALVINGS, _MOVES = 16, 8
_BALANCED = 1.01
"""The busiest rank over the mean one from which on layers are moved."""
_ROUNDING = 1e-9
_RANKED = 10
_SIMULATED = 300_000
"""Actions that are simulated with a budget of 1."""
_MAX_EXACT_ACTIONS, _MAX_EXACT, _EXACT_FRONTIER = 60_000, 25, 5
_ROUNDS = 3
_SEARCHED, _WITH_JITTER = 2, 10
_POLICIES, _MORE_IF_NONE_FITS, _MAX_MEMORY_FACTOR = 8, 5, 4.0
"""Orders that get memory policies with a budget of 1; what they may need without, over the memory limit."""
_SEARCH_MOVES, _MAX_SEARCHED_ACTIONS = 3e6, 6_000
"""Moves of a search with a budget of 1, over the number of its actions; the most actions that are searched."""
_JITTER_ACTIONS, _MIN_RUNS, _MAX_RUNS = 2e5, 20, 200
"""Actions simulated for the jitter of one option with a budget of 1, and how many runs that may be."""
_MAX_ZERO_STAGE = 3
"""The ZeRO stage that shards everything."""


class EstimatedStages:
    """The layers of an estimate, to be divided into stages in many ways."""

    def __init__(self, found: Estimate) -> None:
        self.estimate = found
        kinds = found.config.kinds
        rows = {kind: _row(found, kind) for kind in found.by_kind}
        table = np.array([rows[kind] for kind in kinds]).T
        self._compute, self._exchanged = table[0:2], table[2:4]
        """Seconds of the forward and the whole backward, per layer."""
        self._state, self._activation, self._working, self._freed = table[4:8]
        self.state = float(self._state.sum())
        """Bytes of weights, gradients and optimizer state of all layers."""
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
        best = self.rank_bounds(counts, shape, ranks, microbatches)
        own = _own_stages(shape, ranks)
        for _ in range(_MOVES if shape.stages_per_rank > 1 else 0):
            if best.max() < best.mean() * _BALANCED:
                break
            sources, targets = own[best.argmax()][[0, -1]], own[best.argmin()][[0, -1]]
            moves = [move_layer(counts, s, t) for s in sources for t in targets if counts[s] > 1 and s != t]
            tried = [(self.rank_bounds(each, shape, ranks, microbatches), each) for each in moves]
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

    def rank_bounds(self, counts: LayerCounts, shape: FamilyShape, ranks: int, microbatches: int) -> Floats:
        """Lower bounds by each rank: it waits for its first input, works, and its last gradient goes on.

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
        own = _own_stages(shape, ranks)
        streams = work[:, own].sum(axis=2)
        busy = streams.max(axis=0) if shape.paired else streams.sum(axis=0)
        bounds: Floats = before[own].min(axis=1) + microbatches * busy + after[own].min(axis=1)
        return bounds

    def least_memory(self, counts: LayerCounts, shape: FamilyShape, ranks: int) -> float:
        """Lower bound on the memory of a rank: its state, and one activation of one of its stages."""
        state, activation, working = self._stage_bytes(counts)
        own = _own_stages(shape, ranks)
        held: Floats = state[own].sum(axis=1) + (activation + working)[own].max(axis=1)
        return float(held.max())

    def bytes_of_1f1b(self, ranks: int, microbatches: int) -> tuple[float, float]:
        """The most bytes of a rank with one stage each; the most of weights, gradients and optimizer state."""
        state, activation, working = self._stage_bytes(self.counts(ranks))
        live = np.minimum(microbatches, np.arange(ranks, 0, -1))
        return float((state + live * activation + working).max()), float(state.max())

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
def _placement(shape: FamilyShape, ranks: int) -> Placement:
    return (Placement.v if shape.is_v else Placement.loop)(ranks, shape.stages_per_rank)


@cache
def _own_stages(shape: FamilyShape, ranks: int) -> Ints:
    """The stages of each rank."""
    return np.array(_placement(shape, ranks).stages_of_rank)


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


@dataclass(frozen=True, eq=False)
class JobConfiguration(Configuration):
    """A layout with a shape of families: everything of a job's plan except the order of work."""

    layout: JobLayout
    shape: FamilyShape
    stages: EstimatedStages
    bound: float
    """Lower bound on the makespan."""

    @cached_property
    def costs(self) -> Costs:
        """Costs of the stages."""
        return stage_costs(self.stages.estimate, self.placement, self.counts)

    def __str__(self) -> str:
        return str(self.layout)

    @property
    def working(self) -> Floats:
        """Per rank: bytes that a backward needs besides."""
        return self.stages.working(self.counts, self.placement)

    @property
    def work(self) -> int:
        """Number of stages times microbatches."""
        return self.placement.num_stages * self.microbatches

    @property
    def is_short(self) -> bool:
        """Whether a whole step can be simulated."""
        return 2 * self.work <= _MAX_EXACT_ACTIONS

    def as_run(self, schedule: Schedule) -> Schedule:
        """Return the schedule as replicas run it: with messages and collectives, if there are replicas."""
        return lower(schedule) if self.layout.parallel.replicas > 1 else schedule


@dataclass(frozen=True, eq=False)
class JobOption(Option):
    """A layout with an order of work; `seconds` are makespan, reduction of gradients and optimizer step."""

    configuration: JobConfiguration
    is_exact: bool = False
    """Whether the whole step was simulated with its messages and collectives, or a shorter one extended."""

    @property
    def layout(self) -> JobLayout:
        """The parallel config, pipeline ranks and microbatches."""
        return self.configuration.layout

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        layout, found = self.layout, self.configuration.stages.estimate
        return found.mfu(self.seconds, layout.microbatches, layout.pipeline)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of each device."""
        parallel = self.layout.parallel
        tokens = self.layout.microbatches * parallel.microbatch_size * parallel.sequence
        devices = parallel.tensor_parallel * parallel.context_parallel * self.layout.pipeline
        return tokens / self.seconds / devices

    def __str__(self) -> str:
        v, parallel = self.configuration.shape.stages_per_rank, self.layout.parallel
        order = f"{self.layout} {self.name}{f' v={v}' if v > 1 else ''}, mbs {parallel.microbatch_size}"
        level = parallel.recompute_granularity
        policy = f", {self.memory_policy}" if self.memory_policy else ""
        return f"{order}, {'no' if level == 'none' else level} recomputation{policy}"

    def to_keys(self) -> dict[str, Any]:
        """Return the option as values for JSON."""
        layout = self.layout
        return {
            **dict(zip(("tp", "cp", "ep", "pp", "dp"), layout.sizes)),
            "microbatch_size": layout.parallel.microbatch_size,
            "recompute_granularity": layout.parallel.recompute_granularity,
            **super().to_keys(),
            "tokens_per_second_per_device": self.tokens_per_second,
            "mfu": self.mfu,
            "bound": self.configuration.bound,
            "exact": self.is_exact,
        }


def exact(option: JobOption) -> JobOption:
    """Return the option simulated with all microbatches, queues of messages and collectives, if it is short."""
    configuration = option.configuration
    if not configuration.is_short:
        return option
    timeline = simulate(configuration.as_run(option.schedule), configuration.costs)
    seconds = timeline.makespan + timeline.costs.optimizer_step
    return replace(
        option,
        memory=float((np.array(timeline.peak_memory) + configuration.working).max()),
        seconds=seconds,
        seconds_without_jitter=seconds,
        makespan=timeline.makespan,
        bubble=timeline.bubble("makespan"),
        is_exact=True,
    )


class BuiltSchedule(NamedTuple):
    """A schedule with what its ranks hold."""

    schedule: Schedule
    live: list[LiveActivations]


def built_schedule(family: str, ranks: int, microbatches: int, stages_per_rank: int) -> BuiltSchedule | None:
    """Return the schedule of a family; None if it has none for these numbers."""
    try:
        schedule = build(family, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    except BuildError:
        return None
    return BuiltSchedule(schedule, live_activations(schedule.table))


def simulated_without_queues(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate messages that take their time but do not queue: families are valid, and this is fast."""
    total = edge_prices(costs, schedule.graph, "activation").total
    unqueued = replace(costs, bandwidth=None, latency=tuple(total.tolist()) or 0.0)
    simulator = Simulator(schedule, unqueued, SendModel.BUFFERED)
    return simulator.timeline(simulator.finished_run())


class JobEvaluation(Evaluation[JobRequest, JobOption]):
    """The options of a job's plan."""

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 -- those of Evaluation
        super().__init__(*arguments)
        self._estimator = Estimator(self.request.config, self.request.device)
        self.built = cache(built_schedule)
        self.counts: Counter[str] = Counter()
        """How many `layouts`; how many configurations `too large`, `evaluated`, `pruned`, `not evaluated`."""
        self._too_large: dict[JobLayout, None] = {}
        """Layouts of configurations over the memory limit."""
        self._over: list[JobOption] = []
        """Families over the memory limit, which might fit with a memory policy."""
        self._least_bound = inf
        self.next_bound = inf
        """Lower bound of the first configuration that was not evaluated."""
        self._left = 0
        """How many layouts and configurations have higher bounds than the last one."""
        self._simulated = 0

    @property
    def bound(self) -> float:
        """Lower bound on the makespan of any configuration that may fit."""
        return self._least_bound if isfinite(self._least_bound) else 0.0

    def to_keys(self) -> dict[str, Any]:
        """Return what was left out as values for JSON."""
        excluded = list(data_sizes(self.request).excluded)
        return {"counts": dict(self.counts), "excluded_data_parallel_sizes": excluded}

    def offered(self) -> Iterable[JobOption]:
        """Return the best option of each layout, and the frontier."""
        return dict.fromkeys((*self.ranked(), *frontier(self.options)))

    def ranked(self) -> list[JobOption]:
        """Return the best option of each layout, fastest first."""
        best: dict[tuple[int, ...], JobOption] = {}
        for option in by_rank(self.options):
            best.setdefault(option.layout.sizes, option)
        return list(best.values())

    # --- configurations ------------------------------------------------------------------------------

    def configurations(self) -> Iterator[JobConfiguration]:
        """Yield configurations by their bounds; those that cannot fit are set aside."""
        order = count()
        heap: list[tuple[float, int, tuple[JobLayout, EstimatedStages] | JobConfiguration]] = [
            (bound, next(order), (layout, stages)) for bound, layout, stages in self._layouts()
        ]
        heapify(heap)
        while heap:
            _, _, each = heappop(heap)
            if isinstance(each, JobConfiguration):
                self._left = len(heap)
                yield each
                continue
            for configuration in self._of_layout(*each):
                heappush(heap, (configuration.bound, next(order), configuration))

    def _count_too_large(self, layout: JobLayout) -> None:
        self.counts["too large"] += 1
        self._too_large[layout] = None

    def _layouts(self) -> Iterator[tuple[float, JobLayout, EstimatedStages]]:
        """Yield layouts whose weights and optimizer state fit, with a bound for all of their configurations."""
        for layout in job_layouts(self.request):
            self.counts["layouts"] += 1
            stages = EstimatedStages(self._estimator(layout.parallel))
            if stages.state / layout.pipeline > self.request.memory_limit:  # of the mean rank
                self._count_too_large(layout)
            else:
                hides = layout.parallel.expert_parallel > 1 and layout.pipeline > 1
                yield stages.layout_bound(layout.pipeline, layout.microbatches, paired=hides), layout, stages

    def _of_layout(self, layout: JobLayout, stages: EstimatedStages) -> Iterator[JobConfiguration]:
        for shape in families_by_shape(self.request.families):
            if layout.pipeline == 1 and (shape.stages_per_rank > 1 or shape.split or shape.paired):
                continue  # one rank has no bubble
            if shape.paired and layout.parallel.expert_parallel == 1:
                continue  # a pair hides nothing
            if layout.pipeline * shape.stages_per_rank > self.request.config.layers:
                continue
            bound, counts = stages.partition(shape, layout.pipeline, layout.microbatches)
            if stages.least_memory(counts, shape, layout.pipeline) > self.request.memory_limit:
                self._count_too_large(layout)
            else:
                placement = _placement(shape, layout.pipeline)
                yield JobConfiguration(placement, counts, layout.microbatches, layout, shape, stages, bound)

    # --- families ------------------------------------------------------------------------------------

    def evaluate_families(self) -> None:
        """Evaluate configurations, then the best options exactly."""
        self.report("bounds")
        best: dict[tuple[int, ...], float] = {}
        most = _SIMULATED * self.request.budget
        for each in self.configurations():
            ranked, self._least_bound = sorted(best.values()), min(self._least_bound, each.bound)
            if len(ranked) >= _RANKED and each.bound >= ranked[_RANKED - 1]:
                self.counts["pruned"] += 1 + self._left
                break
            if self._simulated > most:
                self.counts["not evaluated"] += 1 + self._left
                self.next_bound = each.bound
                break
            if best.get(each.layout.sizes, inf) <= each.bound:
                self.counts["pruned"] += 1
                continue
            self.report("simulating", min(1.0, self._simulated / most))
            for option in self.options_of(each):
                self.options.append(option)
                best[option.layout.sizes] = min(option.seconds, best.get(option.layout.sizes, inf))
        self._make_exact()

    def options_of(self, each: JobConfiguration) -> Iterator[JobOption]:
        """Yield the families that fit a configuration, simulated without queues of messages."""
        for family in families_by_shape(self.request.families)[each.shape]:
            built = self.built(family, *_lengths(each)[-1], each.shape.stages_per_rank)
            if built is None:
                continue
            memory = each.stages.memory(each.counts, built.live)
            if memory > self.request.memory_limit:  # more microbatches do not need less
                self._count_too_large(each.layout)
                self._over.append(JobOption(family, each, None, memory, inf, inf, inf, 0.0))
                continue
            self.counts["evaluated"] += 1
            makespan, memory, busy = self._extended(family, each)
            seconds = makespan + each.costs.optimizer_step + _last_reduction(each.costs, each.placement)
            yield JobOption(family, each, None, memory, seconds, seconds, makespan, 1 - busy / makespan)

    def _extended(self, family: str, each: JobConfiguration) -> tuple[float, float, float]:
        """Return makespan, memory and busy seconds of the mean rank, extended from fewer microbatches."""
        runs, lengths = [], _lengths(each)
        for ranks, number in lengths:
            built = self.built(family, ranks, number, each.shape.stages_per_rank)
            assert built is not None, "a family that has a longer step has a shorter one"
            self._simulated += built.schedule.num_steps
            timeline = simulated_without_queues(built.schedule, each.costs)
            memory = each.stages.memory(each.counts, built.live)
            runs.append((timeline.makespan, memory, sum(timeline.busy) / ranks))
        if len(runs) == 1:
            return runs[0]
        ranks, short = lengths[-1]
        rounds = (each.microbatches - short) / ranks
        makespan, memory, busy = (y + rounds * (y - x) for x, y in zip(*runs))
        return max(makespan, each.bound), memory, busy

    def _make_exact(self) -> None:
        """Simulate the frontier with all that is known, and the best options until they stay the best."""
        done = 0
        waiting = [*frontier(self.options)[:_EXACT_FRONTIER], *self.ranked()[:_RANKED]]
        while waiting and done < _MAX_EXACT:
            for option in dict.fromkeys(waiting):
                self.report(f"exactly {option.layout}", done / _MAX_EXACT)
                self.options[self.options.index(option)] = exact(option)
                done += 1
            self.options = [each for each in self.options if each.memory <= self.request.memory_limit]
            best = self.ranked()[:_RANKED]
            waiting = [each for each in best if not each.is_exact and each.configuration.is_short]

    # --- memory policies -----------------------------------------------------------------------------

    def evaluate_memory_policies(self) -> None:
        """Recompute stages or offload activations in orders with low bounds that exceed the memory limit."""
        self._try_policies(recompute=self.request.recompute, offload=self.request.offload)

    def _try_policies(self, *, recompute: bool, offload: bool) -> None:
        if not (recompute or offload):
            return
        least: dict[object, JobOption] = {}  # of each layout and placement the order with the least excess
        for each in sorted(self._over, key=lambda each: each.memory):
            if each.memory <= _MAX_MEMORY_FACTOR * self.request.memory_limit and each.configuration.is_short:
                least.setdefault((each.layout, each.configuration.placement), each)
        for tried, plain in enumerate(sorted(least.values(), key=lambda each: each.configuration.bound)):
            best = min((each.seconds for each in self.options), default=inf)
            most = _POLICIES * max(1.0, self.request.budget) * (1 if self.options else _MORE_IF_NONE_FITS)
            if plain.configuration.bound >= best or tried >= most:
                return
            self.report(f"memory policies in {plain.layout}", min(1.0, tried / most))
            for schedule in self._with_policies(plain, recompute=recompute, offload=offload):
                self._add(plain, schedule, schedule.name)

    def _with_policies(self, plain: JobOption, *, recompute: bool, offload: bool) -> Iterator[Schedule]:
        """Yield the order with what it needs to fit, and the families that offload by themselves."""
        configuration = plain.configuration
        fit = FitMemory(self._limit(configuration), configuration.costs, recompute=recompute, offload=offload)
        fitted = fit.fitted_simply(plain.schedule)
        if fitted is not None:
            yield fitted.schedule
        if offload and not self.request.families:
            yield from offloading_schedules(configuration.placement, configuration.microbatches)

    def _limit(self, configuration: JobConfiguration) -> float:
        """Return the memory limit without working memory."""
        return self.request.memory_limit - float(configuration.working.max())

    def _add(self, option: JobOption, schedule: Schedule, name: str) -> None:
        """Add the option with this order if it fits and is not dominated by another of its layout."""
        made = exact(replace(option, name=name, order=schedule))
        same = [each for each in self.options if each.layout.sizes == made.layout.sizes]
        dominated = any(each.seconds <= made.seconds and each.memory <= made.memory for each in same)
        if made.memory <= self.request.memory_limit and not dominated:
            self.options.append(made)

    # --- searched orders -----------------------------------------------------------------------------

    def search_orders(self) -> None:
        """Search orders for the best layouts, as far as these are not too large."""
        if not self.request.search or self.request.families:
            return

        def can_search(option: JobOption) -> bool:
            is_small = 3 * option.configuration.work <= _MAX_SEARCHED_ACTIONS
            return is_small and option.is_exact and option.layout.pipeline > 1

        for option in [each for each in self.ranked() if can_search(each)][:_SEARCHED]:
            best = min(each.seconds for each in self.options)
            if option.configuration.bound < best and option.seconds < 1.05 * best:
                self._search(option)

    def _search(self, option: JobOption) -> None:
        configuration = option.configuration
        result = self.searched(
            configuration,
            memory_limit=self._limit(configuration),
            moves=int(_SEARCH_MOVES * self.request.budget / (3 * configuration.work)),
            seed=self.request.seed,
        )
        if result is None:  # no order fits without a memory policy
            return
        self._add(option, result.schedule, "searched")
        if result.interrupted:
            raise KeyboardInterrupt

    # --- jitter --------------------------------------------------------------------------------------

    def options_for_jitter(self) -> tuple[list[JobOption], list[JobOption]]:
        """Return the best options and the frontier."""
        best = [each for each in self.ranked() if each.is_exact][:_WITH_JITTER]
        front = [each for each in frontier(self.options) if each.is_exact]
        return list(dict.fromkeys((*best, *front))), []

    def quantile(self, option: JobOption) -> float:
        """Return the quantile of an option's seconds under jitter: of the slowest replica."""
        request, configuration = self.request, option.configuration
        assert request.jitter is not None
        schedule = configuration.as_run(option.schedule)
        runs = int(min(_MAX_RUNS, max(_MIN_RUNS, _JITTER_ACTIONS * request.budget / schedule.num_steps)))
        spread = simulate_with_jitter(
            schedule, configuration.costs, jitter=request.jitter, runs=runs, seed=request.seed
        )
        seconds = slowest(spread, option.layout.parallel.replicas, request.quantile)
        return seconds + configuration.costs.optimizer_step

    # --- nothing fits --------------------------------------------------------------------------------

    def why_no_option(self) -> Message:
        """Return why there is no option, and the smallest change that would fit."""
        request = self.request
        if not self.counts["layouts"]:
            return _no_layout(request)
        needs = [(*_bytes_of_1f1b(self._estimator, layout), layout) for layout in self._too_large]
        least, state, layout = min(needs, key=lambda each: each[0])
        fitting = [*self._fitting_policies(), *_fitting_changes(request, least)]
        advice = Message("give devices with more memory")
        if fitting:
            advice = Message("what would fit: ", Message.join(", or ", fitting[:3]))
        limit = f"{bytes_text(request.memory_limit)} each ({request.limit_share})"
        devices = f"{request.devices} {request.device.name} with {limit}"
        return Message(
            f"{request.config.name} fits no layout of {devices}: the smallest, {layout} with 1F1B and "
            f"{layout.parallel.recompute_granularity} recomputation, needs {bytes_text(least)}, of which up to "
            f"{bytes_text(state)} for weights, gradients and optimizer state; ",
            advice,
        )

    def _fitting_policies(self) -> Iterator[Message]:
        """Yield memory policies with which something fits, unless one was tried already."""
        if self.request.recompute or self.request.offload:
            return
        for name in POLICY_KINDS:
            self._try_policies(recompute=name == "recompute", offload=name == "offload")
            if self.options:
                best = min(each.seconds for each in self.options)
                yield Message(Parameter(name, value=True), f" ({seconds_text(best)} per step)")
                self.options = []


def _lengths(each: JobConfiguration) -> list[tuple[int, int]]:
    """Return ranks and microbatches of what is simulated: all, or a shorter step and one a round shorter."""
    ranks, m = each.layout.pipeline, each.microbatches
    short = min(m, (_ROUNDS - 1) * ranks + m % ranks + ranks)
    return [(ranks, short)] if short == m else [(ranks, short - ranks), (ranks, short)]


def _last_reduction(costs: Costs, placement: Placement) -> float:
    """Return seconds of the reductions that nothing hides: of the stage that each rank finishes last."""
    seconds = costs.per_stage("reduce_grad", placement.num_stages)
    return max(seconds[own[0]] for own in placement.stages_of_rank)


def slowest(spread: Spread, replicas: int, quantile: float) -> float:
    """Return the quantile of the slowest of so many pipelines that vary independently: a step waits for it.

    One pipeline stays below it in a share q of steps, all of them in q to the power of their number. What is
    beyond the simulated runs is the tail of a normal distribution with their mean and deviation.
    """
    one = quantile ** (1 / replicas)
    runs = len(spread.makespans)
    if one <= 1 - 1 / runs:
        return spread.quantile(one)
    deviation = float(spread.makespans.std(ddof=1))
    tail = NormalDist(spread.mean, deviation).inv_cdf(min(one, 1 - 1e-12)) if deviation else spread.mean
    return max(tail, float(spread.makespans[-1]))


def _bytes_of_1f1b(estimator: Estimator, layout: JobLayout) -> tuple[float, float]:
    """Return the bytes of 1F1B on the rank with the most, and the most of weights and optimizer state."""
    return EstimatedStages(estimator(layout.parallel)).bytes_of_1f1b(layout.pipeline, layout.microbatches)


def _fitting_changes(request: JobRequest, least: float) -> Iterator[Message]:
    """Yield parameters with which 1F1B fits, the smallest number of devices last."""
    changes: dict[str, object] = {}
    if (request.microbatch_size or 1) > 1:
        changes["microbatch_size"] = 1
    if request.recompute_granularity not in {None, "full"}:
        changes["recompute_granularity"] = "full"
    if request.zero < _MAX_ZERO_STAGE:
        changes["zero"] = _MAX_ZERO_STAGE
    for name, value in changes.items():
        if _fits(request, {name: value}):
            instead = f" instead of {request.zero}" if name == "zero" else ""
            yield Message(Parameter(name, value), instead)
    if request.memory_limit < least <= request.device.memory_bytes:
        yield Message(Parameter("memory_limit", f"{ceil(least / 1e8) / 10:g}GB"))
    more = (n * request.devices for n in (2, 4, 8, 16, 32))
    fitting = (n for n in more if _fits(request, {"devices": n}))
    yield from (Message(Parameter("devices", n)) for n in islice(fitting, 1))


def _fits(request: JobRequest, change: dict[str, Any]) -> bool:
    """Whether 1F1B fits some layout after a change."""
    changed: JobRequest = replace(request, **change)
    estimator = Estimator(changed.config, changed.device)
    return any(_bytes_of_1f1b(estimator, layout)[0] <= changed.memory_limit for layout in job_layouts(changed))


def _no_layout(request: JobRequest) -> Message:
    """Return that no division of the devices divides everything else."""
    batch = Parameter("batch", request.batch)
    if larger := max(data_sizes(request).nearest_batches, default=0):
        return Message(
            *(batch, f" cannot be divided over {plural(request.devices, 'device')}"),
            ": no data parallel size divides both with the given sizes; the next that works is ",
            Parameter("batch", larger),
        )
    return Message(
        *(
            Parameter("devices", request.devices),
            f" cannot be divided for {request.config.name}, ",
            batch,
            ": ",
        ),
        f"tensor parallel sizes divide {plural(request.config.attention.heads, 'head')}, pipeline sizes are "
        f"up to {plural(request.config.layers, 'block')}, data parallel sizes divide the batch; try a power "
        "of two",
    )
