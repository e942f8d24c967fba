"""Aliases that replace the weights of deferred layers in the autograd graph.

Autograd visits the accumulator of a weight even where the gradient is None. With the weight itself in the
graph, I would therefore fire the hooks that belong to W. An alias is a detached leaf over the same memory. In a
full backward (B) it forwards its gradient to the weight.

A joined alias is the weight behind a node. It shows that a use of the weight is that of its layer, and autograd
sums the gradients of all uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.runtime.dtensors import is_dtensor

__all__ = ["WeightAliases"]

_PLAIN = (nn.Parameter, Tensor)


class WeightAliases:
    """The aliases of one stage's weights, and the weights that cannot have one."""

    def __init__(self) -> None:
        self._aliases: dict[int, Tensor] = {}
        self._shared: dict[int, Tensor] = {}

    def of(self, weights: list[Tensor | None], *, joined: bool = False) -> list[Tensor | None] | None:
        """An alias for each weight, None for a weight that needs no gradient.

        None for all of them if the first weight, whose gradient is most of the work, is frozen, or if autograd
        alone can compute the gradient of a trained weight.
        """
        if weights[0] is None or not weights[0].requires_grad or torch.compiler.is_compiling():
            return None
        aliases: list[Tensor | None] = []
        for weight in weights:
            if weight is None or not weight.requires_grad:
                aliases.append(None)
            elif not _can_alias(weight) or (id(weight) in self._shared and not joined):
                return None
            elif joined:
                aliases.append(_JoinedAlias.apply(weight))  # type: ignore[no-untyped-call]
            else:
                known = self._aliases.get(id(weight))
                aliases.append(self._new_alias(weight) if known is None else known)
        return aliases

    def _new_alias(self, weight: Tensor) -> Tensor:
        self._aliases[id(weight)] = alias = weight.detach().requires_grad_()
        alias.register_post_accumulate_grad_hook(partial(_forward_gradient, weight))  # type: ignore[no-untyped-call]
        return alias

    def exclude_shared(
        self, weights: Iterable[Tensor], roots: Iterable[Tensor | GradientEdge]
    ) -> tuple[Tensor, ...]:
        """Exclude those of `weights` that the graph below `roots` uses directly; give the newly excluded."""
        own = {id(weight) for weight in weights} - self._shared.keys()
        found = {id(leaf): leaf for leaf in _leaves_below(roots) if id(leaf) in own}
        self._shared.update(found)
        return tuple(found.values())

    def used_twice(self, weights: Iterable[Tensor], roots: Iterable[Tensor | GradientEdge]) -> list[Tensor]:
        """Those of `weights` that the graph below `roots` uses both directly and by their alias."""
        leaves = {id(leaf) for leaf in _leaves_below(roots)}
        aliased = ((weight, self._aliases.get(id(weight))) for weight in weights)
        return [weight for weight, alias in aliased if id(weight) in leaves and id(alias) in leaves]

    def clear(self) -> None:
        """Drop all aliases; excluded weights stay excluded."""
        self._aliases.clear()


def _can_alias(weight: Tensor) -> bool:
    is_known_type = type(weight) in _PLAIN or is_dtensor(weight)
    return weight.is_leaf and is_known_type and not weight.is_complex()


class _JoinedAlias(torch.autograd.Function):
    """Identity on a weight."""

    @staticmethod
    def forward(_ctx: Any, weight: Tensor) -> Tensor:
        return weight.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


def _forward_gradient(weight: Tensor, alias: Tensor) -> None:
    gradient, alias.grad = alias.grad, None
    if gradient is not None:
        torch.autograd.backward(weight, gradient)


def _leaves_below(roots: Iterable[Tensor | GradientEdge]) -> Iterator[Tensor]:
    """The leaves that a backward from these roots reaches, except through a joined alias."""
    to_visit: list[Any] = [
        (get_gradient_edge(root) if isinstance(root, Tensor) else root).node for root in roots
    ]
    alias: type = _JoinedAlias._backward_cls  # noqa: SLF001 -- the type of its nodes
    seen: set[Any] = {None}
    while to_visit:
        node = to_visit.pop()
        if node not in seen and not isinstance(node, alias):
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            to_visit += [below for below, _ in node.next_functions]
