"""What a stage is given for a step, and what it keeps of a microbatch between its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.runtime.backward.deferred_gradients import DeferredGradients
from penstock.runtime.transport.buffer_pool import Buffer

__all__ = ["Entrance", "Live", "Record", "StepInputs"]


class Live:
    """How many microbatches' activations a rank holds, and the most it held at once."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def add(self) -> None:
        """One more."""
        self.now += 1
        self.peak = max(self.peak, self.now)

    def remove(self) -> None:
        """One less."""
        self.now -= 1


class StepInputs:
    """What one call of `step` or `eval` hands to the stages of a rank, one entry per microbatch."""

    def __init__(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[Mapping[str, Any]],
        targets: Sequence[Any] | None,
        weights: Sequence[float],
        *,
        scale: float,
        training: bool,
        keep_outputs: bool,
    ) -> None:
        self.args, self.kwargs, self.targets, self.weights = args, kwargs, targets, weights
        self.scale, self.training, self.keep_outputs = scale, training, keep_outputs


class Record:
    """What is kept of a microbatch between its forward and the end of its backward."""

    __slots__ = ("buffer", "inputs", "jobs", "roots", "shapes")

    def __init__(self, buffer: Buffer | None, inputs: list[Tensor]) -> None:
        self.buffer = buffer
        self.inputs = inputs
        self.roots: list[GradientEdge | Tensor] = []
        self.shapes: list[torch.Size] = []
        self.jobs: DeferredGradients | None = None


class Entrance(torch.autograd.Function):
    """The way into a stage: what comes out can be changed in place, which leaves of a graph cannot."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The same numbers, as results of this node."""
        ctx.set_materialize_grads(False)  # an input that was not used has no gradient, not zeros
        return tuple([each.detach() for each in inputs])

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The same gradients."""
        return gradients
