"""The weight gradients that an input-gradient backward (I) defers, and their computation in W."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.errors import PipelineError
from penstock.runtime.backward.layer_rules import LayerRule, Tensors

__all__ = ["DeferredGradient", "DeferredGradients", "accumulator_is_held", "has_hooks"]

_MARK = "penstock"


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

    def add(self) -> None:
        """Compute the gradients and add them to those that the leaves have, as autograd does."""
        for leaf, gradient in zip(self.leaves, self.compute()):
            if leaf is not None and gradient is not None:
                assert leaf.grad is not None
                fits = gradient.shape == leaf.shape and gradient.dtype == leaf.dtype
                leaf.grad.add_(gradient if fits else gradient.sum_to_size(leaf.shape).to(leaf.dtype))

    def add_fused(self) -> None:
        """The same without temporary gradients where the rule can, which rounds differently."""
        add = getattr(self.rule, "add_weight_gradients", None)
        totals = [None if leaf is None else leaf.grad for leaf in self.leaves]
        dtype = self.gradient.dtype
        if add is None or not all(total is None or total.dtype == dtype for total in totals):
            self.add()
        else:
            add(self.layer, self.x, self.gradient, tuple(totals))


class DeferredGradients:
    """The weight gradients that one backward deferred, in the order in which it reached them.

    `held` are the ids of weights whose accumulators may have hooks.
    """

    def __init__(self, *, fusion: bool = False, held: frozenset[int] = frozenset()) -> None:
        self._held = held
        self._queue: list[DeferredGradient] | None = []
        self._add = DeferredGradient.add_fused if fusion else DeferredGradient.add

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
        if self._can_add(queue):
            queue.reverse()
            with torch.no_grad():
                while queue:
                    self._add(queue.pop())
        else:
            _accumulate_by_autograd(queue)

    def _can_add(self, queue: list[DeferredGradient]) -> bool:
        """Whether W may add to each `.grad` itself, because autograd would do nothing else.

        Autograd also calls hooks, keeps a first gradient without a copy, and sums the gradients of several
        calls before it accumulates them.
        """
        leaves = [leaf for deferred in queue for leaf in deferred.leaves if leaf is not None]
        ids = set(map(id, leaves))
        if len(ids) < len(leaves) or not self._held.isdisjoint(ids) or torch.is_anomaly_enabled():
            return False
        return all(map(_has_only_a_gradient, leaves))


def accumulator_is_held(leaf: Tensor) -> bool:
    """Whether anything holds the `AccumulateGrad` node of a weight, as everything does that adds hooks to it.

    torch makes the node on demand, and it ends with its last holder: then a mark on it is gone at once.
    """
    _metadata(leaf)[_MARK] = True
    return _MARK in _metadata(leaf)


def _metadata(leaf: Tensor) -> dict[str, Any]:
    """What is noted on the node that accumulates a leaf's gradient."""
    return cast("dict[str, Any]", get_gradient_edge(leaf).node.metadata)  # torch declares a method


def has_hooks(leaf: Tensor) -> bool:
    """Whether a weight has hooks on its gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)  # noqa: SLF001


def _has_only_a_gradient(leaf: Tensor) -> bool:
    # a sharded weight has a DTensor as gradient
    return type(leaf.grad) is Tensor and not has_hooks(leaf)


def _accumulate_by_autograd(queue: list[DeferredGradient]) -> None:
    """Compute and accumulate the gradients as nodes of a graph, which calls the hooks of the leaves."""
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
