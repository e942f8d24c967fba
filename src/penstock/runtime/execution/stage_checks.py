"""Checks of the values of a stage: finite numbers, the loss, and the shapes of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import BatchError, PipelineError
from penstock.runtime.dtensors import whole
from penstock.runtime.execution.splitting import size_problems
from penstock.runtime.pytree import Leaves

__all__ = ["LossFunction", "Rows", "check_finite", "check_gradient_shapes", "check_rows", "checked_loss"]

LossFunction: TypeAlias = Callable[..., Tensor]
Rows: TypeAlias = tuple[tuple[str, int], ...]
"""Arguments of the first stages that were split, each with its number of rows."""


def check_finite(tensors: Sequence[Any], what: str, stage: int) -> None:
    """Raise if a floating-point or complex tensor has an element that is not finite."""
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        if count := int(whole((~torch.isfinite(tensor)).sum())):
            raise PipelineError(
                f"stage {stage}: {count} of {tensor.numel()} elements of {what} (tensor {position}, shape "
                f"{list(tensor.shape)}) are not finite"
            )


def check_rows(rows: Rows, own_rows: Mapping[str, int]) -> None:
    """Raise if what this rank splits has another number of rows than the arguments of the first stages."""
    counts = {count for _, count in rows}
    if len(counts) > 1 or (counts and not counts.issuperset(own_rows.values())):
        raise BatchError("\n".join(size_problems([*rows, *own_rows.items()])))


def checked_loss(loss: LossFunction, output: object, targets: Sequence[Any] | None, microbatch: int) -> Tensor:
    """The loss of an output; raises if it is not one number."""
    value: Any = _computed_loss(loss, output, targets, microbatch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise PipelineError(f"the loss function must return a tensor with one element; it returned {found}")
    return value


def _computed_loss(
    loss: LossFunction, output: object, targets: Sequence[Any] | None, microbatch: int
) -> Tensor:
    if targets is not None:
        return loss(output, targets[microbatch])
    try:
        return loss(output)
    except TypeError as error:
        raise PipelineError(
            f"the loss function was called without a target, because this call has none ({error}): give "
            "target= on the rank of the last stage, or of every stage that feeds no other"
        ) from error


def check_gradient_shapes(gradients: Leaves, shapes: Sequence[torch.Size], stage: int) -> None:
    """Raise if received gradients do not have the shapes of the outputs of this stage."""
    received = [None if gradient is None else gradient.shape for gradient in gradients]
    if len(received) != len(shapes) or any(
        shape is not None and shape != expected for shape, expected in zip(received, shapes)
    ):
        raise PipelineError(
            f"stage {stage} received gradients of shapes {_listed(received)}, but its outputs that require "
            f"gradients have shapes {_listed(shapes)}"
        )


def _listed(shapes: Sequence[torch.Size | None]) -> str:
    return ", ".join("none" if shape is None else str(list(shape)) for shape in shapes) or "none at all"
