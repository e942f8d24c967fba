"""Layouts of a job: every division of its devices, with a schedule an option of its plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.cost.estimate.parallel_config import ParallelConfig
from penstock.families import build
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.planning.job.request import JobRequest
from penstock.planning.partition import LayerCounts

# Layouts of a job: every division of its devices into tensor, context, expert, pipeline and data parallel.


_MICROBATCH_SIZES = (1, 2, 4, 8)
_RECOMPUTATION = ("none", "pointwise", "latent", "full")
_LEAST_TOKENS = 8192
"""Of a sample on each context parallel rank, unless its size is given: it is used for long sequences only."""


@dataclass(frozen=True)
class JobLayout:
    """Parallel sizes, microbatches and recomputation."""

    tensor: int
    context: int
    expert: int
    pipeline: int
    data: int
    microbatch_size: int
    microbatches: int
    """Per pipeline."""
    recompute: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """The parallel sizes."""
        return self.tensor, self.context, self.expert, self.pipeline, self.data

    def parallel_config(self, request: JobRequest) -> ParallelConfig:
        """The parallel config of its stages."""
        return ParallelConfig(
            *(request.sequence, self.microbatch_size, self.tensor, self.context, self.expert, self.data),
            precision=request.precision,
            gradient_bytes=request.gradient_bytes,
            zero=request.zero,
            recompute=self.recompute,
        )

    def __str__(self) -> str:
        names = zip(("TP", "CP", "EP", "PP", "DP"), self.sizes)
        return " ".join(f"{name}{size}" for name, size in names if size > 1 or name in ("TP", "PP", "DP"))


def job_layouts(request: JobRequest) -> Iterator[JobLayout]:
    """Every layout that divides devices, batch, heads, experts and sequence."""
    for tensor, context, pipeline, data in parallel_sizes(request):
        for size in _chosen(request.microbatch_size, _MICROBATCH_SIZES):
            if not divides_batch(request.batch, data, size):
                continue
            samples = request.batch // data
            for expert in _expert_sizes(request, tensor * context * data):
                for recompute in _levels(request):
                    yield JobLayout(tensor, context, expert, pipeline, data, size, samples // size, recompute)


def divides_batch(batch: int, data: int, microbatch_size: int) -> bool:
    """Whether each data parallel replica gets a number of whole microbatches."""
    return not batch % (data * microbatch_size)


def parallel_sizes(request: JobRequest) -> Iterator[tuple[int, int, int, int]]:
    """Tensor, context, pipeline and data parallel sizes that the devices and the model allow, for any batch."""
    for tensor, context, pipeline in _model_sizes(request):
        data = request.devices // (tensor * context * pipeline)
        if _expert_sizes(request, tensor * context * data):
            yield tensor, context, pipeline, data


def _model_sizes(request: JobRequest) -> Iterator[tuple[int, int, int]]:
    config, devices = request.config, request.devices
    tensors = [
        t
        for t in _chosen(request.tensor, _powers(request.device.node_devices))
        if not config.attention.heads % t and not config.width % t and not request.sequence % t
    ]
    for tensor in tensors:
        for context in _chosen(request.context, _powers(max(1, request.sequence // _LEAST_TOKENS))):
            parts = tensor * context * (2 if context > 1 else 1)
            if devices % (tensor * context) or request.sequence % parts:
                continue
            rest = devices // (tensor * context)
            for pipeline in _chosen(request.pipeline, range(1, min(rest, config.layers) + 1)):
                if not rest % pipeline:
                    yield tensor, context, pipeline


def _expert_sizes(request: JobRequest, ranks: int) -> list[int]:
    """Expert parallel sizes: powers of two that divide the experts and the ranks of a stage."""
    experts = request.config.experts
    if experts is None:
        return [1]
    every = _chosen(request.expert, _powers(min(experts.count, ranks)))
    return [each for each in every if not experts.count % each and not ranks % each]


def _levels(request: JobRequest) -> tuple[str, ...]:
    """Levels of recomputation that differ for this model."""
    if request.recompute is not None:
        return (request.recompute,)
    is_latent = request.config.attention.kv_rank is not None
    return tuple(each for each in _RECOMPUTATION if is_latent or each != "latent")


def _chosen(given: int | None, every: range | tuple[int, ...]) -> range | tuple[int, ...]:
    return every if given is None else (given,)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(most.bit_length()) if 1 << n <= most)


# An option of a job's plan: a layout with a schedule, its step time and its memory.


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
