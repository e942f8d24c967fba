"""Gradients of several weights as one row of numbers, so that one collective sums them all.

    | gradient of a | gradient of b | ... | 1 if a has one | 1 if b has one | ... |

A weight without a gradient counts as zeros, and has none afterwards unless another rank had one: an optimizer
with weight decay does something to zeros, and nothing to a gradient that is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.runtime.dtensors import is_dtensor

__all__ = ["Row", "local", "rows_of"]


def local(tensor: Tensor) -> Tensor:
    """The numbers of a tensor that are on this rank, to be read and written."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # noqa: SLF001


class Row:
    """The weights of a row, all of one type and on one device."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self._sizes = [local(weight).numel() for weight in weights]

    def packed(self) -> Tensor:
        """Their gradients and which are there."""
        first = local(self._weights[0])
        parts = []
        for weight, size in zip(self._weights, self._sizes):
            grad = weight.grad
            parts.append(first.new_zeros(size) if grad is None else local(grad).detach().reshape(-1))
        there = [float(weight.grad is not None) for weight in self._weights]
        return torch.cat([*parts, first.new_tensor(there)])

    @torch.no_grad()
    def unpack(self, row: Tensor, share: float = 1.0) -> None:
        """Write the summed gradients, times `share`, where they belong."""
        *parts, there = row.split([*self._sizes, len(self._weights)])  # type: ignore[no-untyped-call]
        if share != 1:
            row *= share
        for weight, part, is_there in zip(self._weights, parts, (there != 0).tolist()):
            if not is_there:
                continue
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            numbers = local(weight.grad)
            numbers.copy_(part.view(numbers.shape))


def rows_of(weights: Iterable[Tensor]) -> list[Row]:
    """The weights in rows, by their type and device."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for weight in weights:
        found.setdefault((weight.dtype, weight.device), []).append(weight)
    return [Row(each) for each in found.values()]
