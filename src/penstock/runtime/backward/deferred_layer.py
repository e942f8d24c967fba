"""A layer that runs as one autograd node, whose backward computes the input gradient and defers the rest."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.runtime.backward.deferred_gradients import DeferredGradient, DeferredGradients
from penstock.runtime.backward.layer_rules import LayerRule, Tensors, supports_dtensors
from penstock.runtime.backward.weight_aliases import WeightAliases
from penstock.runtime.dtensors import is_dtensor

__all__ = ["DeferralState", "DeferredLayer", "LayerMode"]

_Context: TypeAlias = Any


class LayerMode(Enum):
    """How the layers of a stage run in a forward, and when its backward recomputes parts of it."""

    PLAIN = "as they are, for a full backward"
    JOINED = "as nodes above the weights themselves, for a full backward that shows where weights are used"
    DEFERRED = "as nodes above aliases of the weights, for a split backward"


class DeferralState:
    """What the deferred layers of a stage share."""

    def __init__(self) -> None:
        self.mode = LayerMode.DEFERRED
        """How layers run while installed."""
        self.pending: DeferredGradients | None = None
        """Where the running backward defers weight gradients to; None in a full backward."""
        self.aliases = WeightAliases()


class DeferredLayer:
    """A layer with the rule of its type; `forward` replaces the layer's own while a `Deferral` is installed."""

    def __init__(self, state: DeferralState, layer: nn.Module, rule: LayerRule[Any]) -> None:
        self.state = state
        self.layer = layer
        self.rule = rule

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the layer as one node, or its own forward where W cannot compute all of its weight gradients."""
        layer = self.layer
        deferrable = len(inputs) == 1 and not named and torch.is_grad_enabled() and self._accepts(inputs[0])
        mode = self.state.mode
        if deferrable and mode is not LayerMode.PLAIN and not _in_a_transform():
            weights = self._weights_for(inputs[0])
            joined = mode is LayerMode.JOINED
            aliases = None if weights is None else self.state.aliases.of(weights, joined=joined)
            if weights is not None and aliases is not None:
                return _LayerNode.apply(inputs[0], self, weights, *aliases)  # type: ignore[no-untyped-call]
        return type(layer).forward(layer, *inputs, **named)

    def _accepts(self, x: object) -> bool:
        """Whether the rule applies to this input."""
        return type(x) is Tensor or (is_dtensor(x) and supports_dtensors(self.rule))

    def _weights_for(self, x: Tensor) -> list[Tensor | None] | None:
        """The layer's parameters; None if a parametrization computes one, which must not run twice.

        Also None unless input and weights are all DTensors or all plain tensors.
        """
        parameters = self.layer._parameters  # noqa: SLF001 -- a parametrization is a property, not an entry here
        if not all(name in parameters for name in self.rule.weights):
            return None
        weights: list[Tensor | None] = [parameters[name] for name in self.rule.weights]
        sharded = is_dtensor(x)
        return weights if all(each is None or is_dtensor(each) is sharded for each in weights) else None


def _in_a_transform() -> bool:
    """Whether vmap or another transform of torch.func is active; these look into nodes."""
    return torch._C._functorch.maybe_current_level() is not None  # noqa: SLF001


class _LayerNode(torch.autograd.Function):
    """The node: its backward returns the input gradient, and defers or computes the weight gradients."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, deferred: DeferredLayer, leaves: Tensors, *_aliases: Tensor | None
    ) -> Tensor:
        # detached, because autocast caches its copies of leaves, and those made here carry no gradient
        weights = [None if leaf is None else leaf.detach() for leaf in leaves]
        y = deferred.rule.forward(deferred.layer, x, *weights)
        if y.dtype != x.dtype and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
            x = x.to(y.dtype)
        ctx.deferred = deferred
        ctx.leaves = tuple(leaves)
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return y.detach() if y._is_view() else y  # noqa: SLF001 -- autograd forbids in-place changes of a view

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor | None) -> Tensors:
        deferred, needed = ctx.deferred, ctx.needs_input_grad
        if gradient is None:
            return (None,) * len(needed)
        if torch.is_grad_enabled():
            raise PipelineError(
                "a split backward cannot be differentiated: remove create_graph=True, or use a schedule with a "
                "full backward, such as 1f1b"
            )
        saved, rule, layer = ctx.saved_tensors, deferred.rule, deferred.layer
        x, weights = saved[0], saved[1:]
        leaves = ctx.leaves
        if False in needed[3:]:
            leaves = tuple([leaf if wanted else None for leaf, wanted in zip(leaves, needed[3:])])
        job = DeferredGradient(rule, layer, x, weights, gradient, leaves)
        input_gradient = rule.input_gradient(layer, x, weights, gradient) if needed[0] else None
        pending = deferred.state.pending
        if pending is None:
            return (input_gradient, None, None, *job.compute())
        pending.add(job)
        return (input_gradient, *(None,) * (len(needed) - 1))
