"""The space of a job's plan: the request, and every division of its devices into parallel sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import lcm
from typing import Any, NamedTuple, TypeVar

from penstock.arguments import did_you_mean, listed, plural, printable, some
from penstock.cost.estimate.devices import Device
from penstock.cost.estimate.model_config import ModelConfig
from penstock.cost.estimate.parallel_config import ParallelConfig, size_problems
from penstock.cost.units import Units, bytes_text
from penstock.errors import BuildError, EstimateError, Message, Parameter, PlanError
from penstock.families import build, families
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.planning.estimated_model import layer_kinds
from penstock.planning.evaluation import Request
from penstock.planning.layout import PipelineLayout, layout_of_kinds

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
        for count in _STAGES_PER_RANK if fixed is None else (fixed,):
            try:
                small = build(name, ranks=2, microbatches=4, stages_per_rank=count)
            except BuildError:
                continue
            table = small.table
            if table.has(Kind.B, Kind.I) and not table.has(Kind.OFFLOAD, Kind.RECOMPUTE):
                is_v = count > 1 and small.placement == Placement.v(2, count)
                found.setdefault(FamilyShape(count, is_v, table.has(Kind.I), table.has_pairs), []).append(name)
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
        problems += self.common_problems()
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
        fixed = ParallelConfig(
            *(self.sequence, 1, self.tensor or 1, self.context or 1, expert, expert),
            precision=self.precision,
            zero=self.zero,
            recompute_granularity=self.recompute_granularity or "none",
        )
        try:
            fixed.check(self.config)
            self.device.peak(self.precision)
        except EstimateError as error:
            return [error.message]
        return []

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

    @property
    def units(self) -> Units:
        """Seconds and bytes."""
        return Units()

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
    """Parallel sizes, microbatches and the recomputation of layers."""

    tensor: int
    context: int
    expert: int
    pipeline: int
    data: int
    microbatch_size: int
    microbatches: int
    """Per pipeline."""
    recompute_granularity: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """The parallel sizes."""
        return self.tensor, self.context, self.expert, self.pipeline, self.data

    @property
    def replicas(self) -> int:
        """Pipelines that hold the same weights."""
        return self.data * self.context

    def parallel_config(self, request: JobRequest) -> ParallelConfig:
        """Return the parallel config of its stages."""
        return ParallelConfig(
            *(request.sequence, self.microbatch_size, self.tensor, self.context, self.expert, self.data),
            precision=request.precision,
            gradient_bytes=request.gradient_bytes,
            zero=request.zero,
            recompute_granularity=self.recompute_granularity,
        )

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
                for granularity in granularities:
                    sizes = tensor, context, expert, pipeline, data
                    yield JobLayout(*sizes, size, microbatches, granularity)


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
