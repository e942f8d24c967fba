"""The weight gradients that an input-gradient backward (I) defers, and their computation in W."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.runtime.backward.layer_rules import LayerRule, Tensors

__all__ = ["DeferredGradient", "DeferredGradients"]


class DeferredGradient(NamedTuple):
    """The weight gradients of one call of a layer, not yet computed."""

    rule: LayerRule[Any]
    layer: nn.Module
    x: Tensor
    weights: Tensors
    gradient: Tensor
    leaves: Tensors
    """The parameters that accumulate the gradients; None for a weight that needs none."""

    def compute(self) -> Tensors:
        """The gradients, one per weight, None for a weight that needs none."""
        wanted = tuple([leaf is not None for leaf in self.leaves])
        return self.rule.weight_gradients(self.layer, self.x, self.weights, self.gradient, wanted)


class DeferredGradients:
    """The weight gradients that one backward deferred, in the order in which it reached them."""

    def __init__(self) -> None:
        self._queue: list[DeferredGradient] | None = []

    def __len__(self) -> int:
        return len(self._queue or ())

    def inputs(self) -> list[Tensor]:
        """The inputs of layers that are kept for W."""
        return [deferred.x for deferred in self._queue or ()]

    def add(self, deferred: DeferredGradient) -> None:
        """Append one."""
        assert self._queue is not None, "I does not continue after its W"
        self._queue.append(deferred)

    def run(self) -> None:
        """W: compute and accumulate the gradients; release the tensors of each one when it is done."""
        if self._queue is None:
            raise PipelineError("these weight gradients were already computed")
        queue, self._queue = self._queue, None
        roots = []
        with torch.enable_grad():
            while queue:  # autograd runs the newest node first, so the first entry becomes a node last
                deferred = queue.pop()
                roots.append(_GradientNode.apply(deferred, *deferred.leaves))  # type: ignore[no-untyped-call]
                del deferred
        if roots:
            torch.autograd.backward(roots)


class _GradientNode(torch.autograd.Function):
    """An autograd node above the leaves of a deferred gradient; its backward computes the gradient.

    Autograd itself then sums the gradients of several calls for one leaf, in their order, and accumulates
    the sum once and without a copy.
    """

    @staticmethod
    def forward(ctx: Any, deferred: DeferredGradient, *_leaves: Tensor | None) -> Tensor:
        ctx.deferred = deferred
        return torch.empty((), dtype=deferred.gradient.dtype, device=deferred.gradient.device)

    @staticmethod
    def backward(ctx: Any, _one: Tensor) -> Tensors:
        deferred, ctx.deferred = ctx.deferred, None
        return (None, *deferred.compute())
