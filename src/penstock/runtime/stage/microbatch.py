"""What a stage is configured with, what it keeps of a microbatch, and checks of its values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, increment_version

from penstock.errors import BatchError, PipelineError
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.backward.deferral import DeferredGradients, LayerMode
from penstock.runtime.batch import size_problems
from penstock.runtime.dtensors import whole
from penstock.runtime.pytree import Leaves
from penstock.runtime.stage.values import Source, is_plain
from penstock.runtime.torch_internals.autograd import gradient_edge, unsafe_view, version
from penstock.runtime.torch_internals.data_parallel import FsdpShards
from penstock.runtime.transport.buffer_pool import Buffer


@dataclass(frozen=True)
class StageConfig:
    """How one stage runs: where its values come from, which backwards are split, and its loss."""

    inputs: tuple[int, ...]
    """The stages that feed this one."""
    outputs: tuple[int, ...]
    """The stages that this one feeds."""
    takers: tuple[int, ...]
    """The stages that take its output: those of its rank that it feeds, and one on each other rank."""
    input_source: Source | None
    """The outputs of its inputs; None if no stage feeds it, so that it gets the batch."""
    gradient_source: Source | None
    """The input gradients of its outputs; None if it feeds no stage, so that it has a loss."""
    split_microbatches: Collection[int]
    """The microbatches whose backward is split into I and W."""
    recomputed_microbatches: Collection[int]
    """The microbatches whose forward is repeated by RECOMPUTE."""
    offloaded_microbatches: Collection[int]
    """The microbatches that OFFLOAD moves to the host."""
    sends_at_once: bool
    """Whether every output is sent right after its F, and used by no stage of this rank."""
    loss: LossFunction | None
    """The loss, for a stage that feeds no other."""
    shards: FsdpShards | None
    """The parameters that FSDP shards."""
    is_replicated: bool
    """Whether other ranks train the same stage on other data."""
    check_finite: bool
    gradient_accumulation_fusion: bool
    """Whether W adds products to `.grad` without a temporary tensor."""


def microbatches_with(kind: Kind, schedule: Schedule, stage: int) -> frozenset[int]:
    """Return the microbatches for which a stage has an action of this kind: I where the backward is split."""
    table = schedule.table
    of_stage = table.of_kind(kind) & (table.stage == stage)
    return frozenset(table.microbatch[of_stage].tolist())


def sends_at_once(schedule: Schedule, stage: int) -> bool:
    """Return whether the send of its output follows each F of a stage, with only receives between."""
    steps = schedule.ranks[schedule.placement.stage_to_rank[stage]]
    steps = tuple(step for step in steps if not step.parts[0].kind.is_receive)
    for step, after in zip(steps, [*steps[1:], None]):
        (forward, *overlapped) = step.parts
        if forward.kind is not Kind.F or forward.stage != stage:
            continue
        send = None if after is None else after.parts[0]
        if overlapped or send is None or send.kind is not Kind.SEND_F:
            return False
        if send.work_unit != forward.work_unit:
            return False
    return True


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
    """Return the loss of an output; raise if it is not one number."""
    try:
        value: Any = loss(output) if targets is None else loss(output, targets[microbatch])
    except TypeError as error:
        if targets is not None:
            raise
        raise PipelineError(
            f"the loss function was called without a target, because this call has none ({error}): give "
            "target= on the rank of the last stage, or of every stage that feeds no other"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise PipelineError(f"the loss function must return a tensor with one element; it returned {found}")
    return value


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


@dataclass
class LiveActivations:
    """The number of microbatches whose activations a rank holds, and its peak."""

    count: int = 0
    peak: int = 0

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


@dataclass(slots=True, eq=False)
class MicrobatchState:
    """What a stage keeps of a microbatch from its forward to the end of its backward.

    F creates it, B consumes it; I consumes everything but the deferred weight gradients, which W consumes.
    """

    buffers: tuple[Buffer, ...]
    """The buffers that the inputs are views of."""
    inputs: list[Tensor]
    """The leaves of the autograd graph that need a gradient."""
    inputs_are_held: bool = True
    """Whether these leaves have their values; OFFLOAD leaves only their shapes."""
    counts: tuple[int, ...] = ()
    """If several stages feed this one: how many of these leaves come from each."""
    roots: list[GradientEdge | Tensor] = field(default_factory=list)
    """Where the backward starts: the loss, or the outputs that need a gradient."""
    shapes: list[torch.Size] = field(default_factory=list)
    """The shapes of these outputs."""
    mode: LayerMode = LayerMode.PLAIN
    """How the layers ran, and run again where the backward recomputes."""
    jobs: DeferredGradients | None = None
    """The deferred weight gradients; None if I has computed them."""

    def start_at(self, outputs: Sequence[Tensor], uses: int) -> None:
        """Start the backward of a stage that feeds others at its outputs, once for each use."""
        # autograd adds up the gradients of the same output
        self.roots = [*map(gradient_edge, outputs)] * uses
        self.shapes = [output.shape for output in outputs] * uses


def non_leaf_inputs(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the inputs as results of a node: a stage may change them in place, but not leaves."""
    if all(is_plain(each) and not version(each) for each in inputs):
        # a node of Python would take several times as long
        return [unsafe_view(each, each.shape) for each in inputs]
    return _Identity.apply(*inputs)  # type: ignore[no-untyped-call, no-any-return]


def count_changes(inputs: Sequence[Tensor], entered: Sequence[Tensor]) -> None:
    """Count, on the leaves, changes in place of what entered the stage, which has their memory."""
    for leaf, each in zip(inputs, entered):
        if version(leaf) != version(each):  # results of `_Identity` have the leaves' counters
            increment_version(leaf)


class _Identity(torch.autograd.Function):
    """The same for any tensors, such as DTensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an unused input has no gradient instead of zeros
        return tuple([each.detach() for each in inputs])

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients
