"""Gradient buckets: the gradients of several weights in one flat tensor, so that one collective sums them all.

    | gradient of a | gradient of b | ... | 1 if a has one | 1 if b has one | ... |

A weight without a gradient counts as zeros. It has no gradient afterwards either, unless another rank had one:
an optimizer with weight decay changes a weight whose gradient is zero, and skips one without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.runtime.dtensors import is_dtensor, local

__all__ = ["GradientBucket", "make_buckets"]


class GradientBucket:
    """The weights of a bucket, all of one dtype and on one device."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self._sizes = [local(weight).numel() for weight in weights]

    def pack(self) -> Tensor:
        """The gradients, and a flag for each weight: whether it has one."""
        first = local(self._weights[0])
        parts = []
        for weight, size in zip(self._weights, self._sizes):
            grad = _gradient_placed_as(weight)
            parts.append(first.new_zeros(size) if grad is None else local(grad).detach().reshape(-1))
        present = [float(weight.grad is not None) for weight in self._weights]
        return torch.cat([*parts, first.new_tensor(present)])

    @torch.no_grad()
    def unpack(self, packed: Tensor) -> None:
        """Write the reduced gradients back to the weights."""
        *parts, present = packed.split([*self._sizes, len(self._weights)])  # type: ignore[no-untyped-call]
        for weight, part, is_present in zip(self._weights, parts, (present != 0).tolist()):
            if not is_present:
                continue
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            values = local(weight.grad)
            values.copy_(part.view(values.shape))


def _gradient_placed_as(weight: Tensor) -> Tensor | None:
    """The gradient with the placements of its weight: only then can ranks add their local parts."""
    grad = weight.grad
    if grad is not None and grad.layout != torch.strided:
        raise PipelineError(
            f"a weight of shape {list(weight.shape)} has a sparse gradient, which cannot be summed over ranks: "
            "create its layer with sparse=False"
        )
    if is_dtensor(grad) and is_dtensor(weight) and grad.placements != weight.placements:
        with torch.no_grad():
            weight.grad = grad.redistribute(placements=weight.placements)
    return weight.grad


def make_buckets(weights: Iterable[Tensor]) -> list[GradientBucket]:
    """One bucket for each dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for weight in weights:
        found.setdefault((weight.dtype, weight.device), []).append(weight)
    return [GradientBucket(each) for each in found.values()]
