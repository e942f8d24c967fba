"""The result of a step, the same on every rank."""

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
    """The mean of the microbatches' losses over all replicas, weighted by tokens if `tokens=` counts them, or
    their sum with `average=False`; None without a loss."""
    losses: Tensor | None
    """The loss of each microbatch of this pipeline; the sum, if several stages have a loss."""
    outputs: Any = None
    """The merged outputs, with `return_outputs=True` on the rank of the last stage; by stage, if several stages
    feed no other."""
    timeline: Timeline | None = None
    """The measured timeline of all ranks, inside `with pipeline.profile()`."""
