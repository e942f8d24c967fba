"""Gradients of several weights as one row of numbers, so that one collective sums them all.

    | gradient of a | gradient of b | ... | 1 if a has one | 1 if b has one | ... |

A weight without a gradient counts as zeros, and has none afterwards unless another rank had one: an optimizer
with weight decay does something to zeros, and nothing to a gradient that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.runtime.dtensors import is_dtensor, local

__all__ = ["Row", "differing", "mark_of", "rows_of"]


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
            grad = _placed_as(weight)
            parts.append(first.new_zeros(size) if grad is None else local(grad).detach().reshape(-1))
        there = [float(weight.grad is not None) for weight in self._weights]
        return torch.cat([*parts, first.new_tensor(there)])

    @torch.no_grad()
    def unpack(self, row: Tensor) -> None:
        """Write the summed gradients where they belong."""
        *parts, there = row.split([*self._sizes, len(self._weights)])  # type: ignore[no-untyped-call]
        for weight, part, is_there in zip(self._weights, parts, (there != 0).tolist()):
            if not is_there:
                continue
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            numbers = local(weight.grad)
            numbers.copy_(part.view(numbers.shape))


def _placed_as(weight: Tensor) -> Tensor | None:
    """The gradient of a weight, shared out as the weight is: only then may parts of several ranks be added."""
    grad = weight.grad
    if grad is not None and grad.layout != torch.strided:
        raise PipelineError(
            f"a weight of shape {list(weight.shape)} has a sparse gradient, which is not summed over ranks: "
            "make its layer with sparse=False"
        )
    if is_dtensor(grad) and is_dtensor(weight) and grad.placements != weight.placements:
        with torch.no_grad():
            weight.grad = grad.redistribute(placements=weight.placements)
    return weight.grad


def mark_of(weight: Tensor) -> Tensor:
    """A number that changes when any bit of the weight does, but for rare accidents."""
    numbers = local(weight.detach()).contiguous().reshape(-1)
    if not numbers.numel():
        return torch.zeros((), dtype=torch.int64, device=numbers.device)
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.element_size()]
    return numbers.view(integer).sum(dtype=torch.int64) & (2**62 - 1)  # so that it has a negative


def differing(marks: Tensor, largest: Callable[[Tensor], Tensor]) -> list[bool]:
    """Which marks are not the same everywhere, given how to find the largest of each anywhere."""
    most, least = largest(torch.stack([marks, -marks])).tolist()
    return [one != -other for one, other in zip(most, least)]


def rows_of(weights: Iterable[Tensor]) -> list[Row]:
    """The weights in rows, by their type and device."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for weight in weights:
        found.setdefault((weight.dtype, weight.device), []).append(weight)
    return [Row(each) for each in found.values()]
