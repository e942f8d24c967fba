"""Training the same parts in one process and in a pipeline, and how far apart that comes out.

These run on the ranks that `verification` starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from penstock.errors import BatchError, PipelineError
from penstock.ir.schedule import Schedule
from penstock.runtime.execution.batcher import Batcher
from penstock.runtime.models.even_split import split_evenly
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.verification.user_model import Parts, Source, parts_from

__all__ = ["Deviation", "Found", "train_alone", "train_in_pipeline"]

_FLOOR = 1e-3  # of the largest number of all tensors: what is below is compared with that
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Deviation:
    """The error of one tensor: of a gradient in one step, or of a parameter after all."""

    name: str
    stage: int
    step: int
    error: float


@dataclass(frozen=True)
class Found:
    """What one rank found: the largest errors."""

    loss: float
    norm: float
    gradient: Deviation | None
    parameter: Deviation | None
    tolerance: float
    draws: bool
    """Whether the model draws random numbers."""


# --- one process -----------------------------------------------------------------------------------


def train_alone(source: Source, steps: int, microbatches: int, file: Path) -> None:
    """On rank 0 and without a pipeline: losses, norms, gradients and parameters go to a file."""
    parts = parts_from(source)
    if dist.get_rank():
        return
    fingerprint, whole = parts.fingerprint, parts.whole
    batcher = Batcher(microbatches)
    args, _ = batcher.split_arguments(parts.args, {})
    targets = batcher.split_target(parts.target)
    optimizer = _optimizer(whole.parameters())
    tensors: dict[str, Tensor] = {}
    losses, norms, before = [], [], torch.get_rng_state()
    for step in range(steps):
        total = 0.0
        for own, target in zip(args, targets):
            loss = parts(own, target) / microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        losses.append(total)
        gradients = [weight.grad for weight in whole.parameters() if weight.grad is not None]
        norms.append(float(get_total_norm(gradients)))
        tensors |= {
            f"gradient {step} {name}": weight.grad.clone(memory_format=torch.contiguous_format)
            for name, weight in _named(whole)
            if weight.grad is not None
        }
        _stepped(optimizer)
    tensors |= {
        f"parameter {name}": weight.detach().clone(memory_format=torch.contiguous_format)
        for name, weight in _named(whole)
    }
    about = {
        "fingerprint": fingerprint,
        "losses": losses,
        "norms": norms,
        "draws": not torch.equal(before, torch.get_rng_state()),
        "largest": [_largest(tensors, f"gradient {step} ") for step in range(steps)],
        "largest parameter": _largest(tensors, "parameter "),
        "tolerance": max((_TOLERANCES.get(weight.dtype, 1e-4) for weight in whole.parameters()), default=1e-4),
    }
    from safetensors.torch import save_file  # noqa: PLC0415 -- an extra

    save_file(tensors, file, {"about": json.dumps(about)})


def _named(whole: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by all their names: a tied weight has several."""
    for name, weight in whole.named_parameters(remove_duplicate=False):
        yield name.removeprefix("model."), weight


def _largest(tensors: Mapping[str, Tensor], prefix: str) -> float:
    return max((_most(tensor) for name, tensor in tensors.items() if name.startswith(prefix)), default=0.0)


def _most(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Plain descent: one that divides by the size of gradients would make much of those that are rounding."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.9) if trained else None


def _stepped(optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


# --- a pipeline ------------------------------------------------------------------------------------


def train_in_pipeline(source: Source, schedule: Schedule, steps: int, file: Path) -> Found | None:
    """On this rank: the same with a schedule, compared with the file; None on ranks that it does not use."""
    group = _first_ranks(schedule.num_ranks)
    if group is None:
        return None
    parts = parts_from(source)
    alone = _Alone(file)
    alone.refuse_others(parts, group)
    if parts.rows is not None and parts.rows % schedule.microbatches:
        raise BatchError(
            f"{parts.rows} rows do not make {schedule.microbatches} microbatches of the same size, and the "
            "mean of their losses would not be that of the batch: change the batch or --microbatches"
        )
    stages = split_evenly(parts.model, schedule.num_stages)
    last = schedule.num_stages - 1
    gradients: list[Deviation] = []
    losses, norms = [], []
    with closing(Pipeline(stages, schedule, loss=parts.loss, group=group)) as pipeline:
        trained = {stage: nn.ModuleDict({"model": module}) for stage, module in pipeline.modules.items()}
        if last in trained and isinstance(parts.loss, nn.Module):
            trained[last]["loss"] = parts.loss
        optimizer = _optimizer(pipeline.parameters())
        for step in range(steps):
            result = pipeline.step(*parts.args, target=parts.target)
            losses.append(_apart(result.loss, alone.about["losses"][step]))
            norms.append(_apart(float(pipeline.clip_grad_norm_(inf)), alone.about["norms"][step]))
            for stage, module in trained.items():
                for name, weight in _named(module):
                    error = alone.error(f"gradient {step} {name}", weight.grad, alone.about["largest"][step])
                    gradients.append(Deviation(name, stage, step, error))
            _stepped(optimizer)
    parameters = [
        Deviation(
            name, stage, steps - 1, alone.error(f"parameter {name}", weight, alone.about["largest parameter"])
        )
        for stage, module in trained.items()
        for name, weight in _named(module)
    ]
    return Found(
        max(losses),
        max(norms),
        max(gradients, default=None, key=_error_of),
        max(parameters, default=None, key=_error_of),
        alone.about["tolerance"],
        draws=alone.about["draws"],
    )


def _error_of(deviation: Deviation) -> float:
    return deviation.error


@cache
def _first_ranks(count: int) -> dist.ProcessGroup | None:
    """A group of the first so many ranks, None on all others; every rank asks for it."""
    group = dist.new_group(list(range(count)))
    return group if dist.get_rank() < count else None


class _Alone:
    """What one process found."""

    def __init__(self, file: Path) -> None:
        from safetensors import safe_open  # noqa: PLC0415 -- an extra

        opener: Any = safe_open  # it has no types
        self._file = opener(file, "pt")
        self.about: dict[str, Any] = json.loads(self._file.metadata()["about"])
        self._names = set(self._file.keys())

    def refuse_others(self, parts: Parts, group: dist.ProcessGroup) -> None:
        """Raise on all ranks if one was given another model or batch than the one process."""
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, parts.fingerprint, group)
        if set(found) != {self.about["fingerprint"]}:
            raise PipelineError(
                "the function gives other weights or another batch each time it is called, so there is nothing "
                "to compare: seed what it draws from. torch, numpy and random are seeded before it is called"
            )

    def error(self, name: str, mine: Tensor | None, largest: float) -> float:
        """The error of one tensor."""
        if mine is None or name not in self._names:
            return 0.0 if mine is None and name not in self._names else inf
        theirs = self._file.get_tensor(name).to(torch.float64)
        apart = _most(mine.detach().to(torch.float64) - theirs)
        scale = max(_most(theirs), _FLOOR * largest)
        return _share(apart, scale)


def _apart(mine: float | None, theirs: float) -> float:
    return inf if mine is None else _share(abs(mine - theirs), abs(theirs))


def _share(apart: float, scale: float) -> float:
    """`apart` as a share of `scale`; what is not finite is infinitely far from everything."""
    if not apart < inf or not scale < inf:
        return inf
    return apart / scale if scale else (inf if apart else 0.0)
