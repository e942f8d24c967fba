"""What a stage gets for a step, and what it keeps of a microbatch between its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, increment_version

from penstock.runtime.backward.deferral import LayerMode
from penstock.runtime.backward.deferred_gradients import DeferredGradients
from penstock.runtime.execution.handover import is_plain
from penstock.runtime.transport.buffer_pool import Buffer

__all__ = ["LiveActivations", "MicrobatchState", "StepInputs", "count_changes", "non_leaf_inputs"]


class LiveActivations:
    """The number of microbatches whose activations a rank holds, and its peak."""

    def __init__(self) -> None:
        self.count = 0
        self.peak = 0

    def reset(self) -> None:
        """Start a new step."""
        self.count = self.peak = 0

    def add(self) -> None:
        """Count one more."""
        self.count += 1
        self.peak = max(self.peak, self.count)

    def remove(self) -> None:
        """Count one less."""
        self.count -= 1


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one `step` or `eval` for the stages of a rank, with one entry per microbatch."""

    args: Mapping[int, Sequence[tuple[Any, ...]]]
    """The positional arguments by source, the stages that no other stage feeds."""
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any] | None
    weights: Sequence[float]
    """The weight of each microbatch's loss in the loss of the step."""
    scale: float
    """The factor of a GradScaler."""
    training: bool
    keep_outputs: bool
    rows: Mapping[str, int] = field(default_factory=dict)
    """The rows of each tensor of the arguments that was split, by its path."""
    target_rows: Mapping[str, int] = field(default_factory=dict)
    """The same of the target, on the rank of the last stage."""


class MicrobatchState:
    """What a stage keeps of a microbatch from its forward to the end of its backward.

    F creates it, B consumes it; I consumes everything but the deferred weight gradients, which W consumes.
    """

    __slots__ = ("buffers", "counts", "inputs", "inputs_are_held", "jobs", "mode", "roots", "shapes")

    def __init__(self, buffers: tuple[Buffer, ...], inputs: list[Tensor]) -> None:
        self.buffers = buffers
        """The buffers that the inputs are views of."""
        self.inputs = inputs
        """The leaves of the autograd graph that need a gradient."""
        self.inputs_are_held = True
        """Whether these leaves have their values; OFFLOAD leaves only their shapes."""
        self.counts: tuple[int, ...] = ()
        """If several stages feed this one: how many of these leaves come from each."""
        self.roots: list[GradientEdge | Tensor] = []
        """Where the backward starts: the loss, or the outputs that need a gradient."""
        self.shapes: list[torch.Size] = []
        """The shapes of these outputs."""
        self.mode = LayerMode.PLAIN
        """How the layers ran, and run again where the backward recomputes."""
        self.jobs: DeferredGradients | None = None
        """The deferred weight gradients; None if I has computed them."""

    def start_at(self, outputs: Sequence[Tensor], uses: int) -> None:
        """Start the backward of a stage that feeds others at its outputs, once for each use."""
        # autograd adds up the gradients of the same output
        self.roots = [*map(_edge, outputs)] * uses
        self.shapes = [output.shape for output in outputs] * uses


def _edge(output: Tensor) -> GradientEdge:
    """Where the gradient of an output enters the graph; it keeps the graph, but not the memory of the output.

    `get_gradient_edge` gives the same in more time, and is needed for leaves and nodes of Python.
    """
    node: Any = output.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # noqa: SLF001 -- no public name
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


def non_leaf_inputs(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inputs as results of a node: a stage may change them in place, which it may not with leaves."""
    if all(is_plain(each) and not each._version for each in inputs):  # noqa: SLF001 -- counts changes in place
        # a node of Python would take several times as long
        return [torch.ops.aten._unsafe_view.default(each, each.shape) for each in inputs]  # noqa: SLF001
    return _Identity.apply(*inputs)  # type: ignore[no-untyped-call, no-any-return]


def count_changes(inputs: Sequence[Tensor], entered: Sequence[Tensor]) -> None:
    """After a forward: leaves count the changes in place of what entered the stage, which has their memory."""
    for leaf, each in zip(inputs, entered):
        if leaf._version != each._version:  # noqa: SLF001 -- results of `_Identity` have the leaves' counters
            increment_version(leaf)


class _Identity(torch.autograd.Function):
    """The same for any tensors, such as DTensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The same tensors, as results of this node."""
        ctx.set_materialize_grads(False)  # an unused input has no gradient instead of zeros
        return tuple([each.detach() for each in inputs])

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The same gradients."""
        return gradients
