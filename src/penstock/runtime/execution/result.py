"""What a step gives back: the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.simulation.timeline import Timeline

__all__ = ["StepResult"]


@dataclass(frozen=True)
class StepResult:
    """The result of `Pipeline.step` or `Pipeline.eval`."""

    loss: float | None
    """The mean of the microbatches' losses over all replicas, weighted by tokens if those are counted, or with
    `average=False` their sum; None without a loss."""
    losses: Tensor | None
    """The loss of each microbatch of this pipeline."""
    outputs: Any = None
    """The merged outputs, on the rank of the last stage and only when asked for."""
    timeline: Timeline | None = None
    """What all ranks did when, inside `with pipeline.profile()`."""
