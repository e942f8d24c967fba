"""Layouts of a job: every division of its devices into tensor, context, expert, pipeline and data parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.cost.estimate.setting import Setting
from penstock.planning.job.request import JobRequest

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

    def setting(self, request: JobRequest) -> Setting:
        """The training setting of its stages."""
        return Setting(
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
