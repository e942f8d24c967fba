"""One stage at work: its forward, backward, input gradient and weight gradient for each microbatch.

What a microbatch leaves behind between its actions is one `Record`:

    F   inputs (leaves of the graph), roots (where the graph ends), the buffer the inputs look into
    B   uses it up
    I   uses up all but the weight gradients that were put aside
    W   uses those up
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.errors import PipelineError
from penstock.runtime.backward.deferral import Deferral
from penstock.runtime.data_parallel.fsdp import FsdpShards
from penstock.runtime.dtensors import whole
from penstock.runtime.execution.microbatch_state import Entrance, Live, Record, StepInputs
from penstock.runtime.execution.module_state import Undo
from penstock.runtime.transport.buffer_pool import Pool
from penstock.runtime.transport.channels import Parcel
from penstock.runtime.transport.values import Leaves, Structure, flatten, unflatten

__all__ = ["Stage"]

Loss = Callable[..., Tensor]


class Stage:
    """A module and its place in the pipeline; `split` are the microbatches whose backward is split.

    `take` and `take_gradient` give what other stages made of a microbatch; they are set where stages are wired.
    """

    take: Callable[[int], Parcel]
    take_gradient: Callable[[int], Parcel]

    def __init__(
        self,
        index: int,
        count: int,
        module: nn.Module,
        live: Live,
        pool: Pool,
        *,
        split: Collection[int],
        checks: bool,
    ) -> None:
        self.index, self.module = index, module
        self.is_first, self.is_last = index == 0, index == count - 1
        self.deferral = Deferral(module) if split else None
        self._split = split
        self.loss: Loss | None = None
        self.shards: FsdpShards | None = None
        self.is_replicated = False
        """Whether other ranks train the same stage on other data."""
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self._live, self._pool, self._checks = live, pool, checks
        self._step: StepInputs
        self._records: dict[int, Record] = {}
        self._made: dict[int, tuple[Leaves, Structure]] = {}
        self._gradients: dict[int, tuple[Leaves, Structure]] = {}
        self._tried = False
        """Whether a forward has shown which weights can be put aside."""

    def begin(self, step: StepInputs) -> None:
        """Get ready for a step; whatever a failed one left behind goes."""
        self._step = step
        for kept in (self._records, self._made, self._gradients, self.losses, self.outputs):
            kept.clear()

    # --- forward -----------------------------------------------------------------------------------

    def forward(self, microbatch: int) -> None:
        """F."""
        step = self._step
        parcel = None if self.is_first else self.take(microbatch)
        splits = microbatch in self._split
        if self.deferral is not None:
            self.deferral.enabled = splits
        call = self._first_call if splits and step.training and not self._tried else self._call
        record, output = call(microbatch, parcel)
        leaves, structure = flatten(output)
        if self._checks:
            self._refuse_not_finite(leaves, "its output")
        if self.is_last:
            self._finish(microbatch, output, leaves, record)
            if step.keep_outputs:
                self.outputs[microbatch] = unflatten(structure, _detached(leaves))
        else:
            self._made[microbatch] = leaves, structure
            if step.training:
                kept = _differentiable(leaves)
                # an edge keeps the graph but not the numbers, which are gone once they are sent
                record.roots = [get_gradient_edge(leaf) for leaf in kept]
                record.shapes = [leaf.shape for leaf in kept]
                del kept
        if step.training:
            self._live.add()
            self._records[microbatch] = record
        elif record.buffer is not None:
            del leaves, output
            self._pool.give(record.buffer)

    def _call(self, microbatch: int, parcel: Parcel | None) -> tuple[Record, Any]:
        """Run the module on what the stage before made, or on the batch."""
        step = self._step
        if parcel is None:
            return Record(None, []), self.module(*step.args[microbatch], **step.kwargs[microbatch])
        inputs: list[Tensor] = []
        if step.training:
            wanted = [place for place, wanted in enumerate(parcel.differentiable) if wanted]
            inputs = [parcel.leaves[place].requires_grad_() for place in wanted]
            if inputs:
                for place, entered in zip(wanted, Entrance.apply(*inputs)):  # type: ignore[no-untyped-call]
                    parcel.leaves[place] = entered
        value = unflatten(parcel.structure, parcel.leaves)
        args = value if type(value) is tuple else (value,)
        return Record(parcel.buffer, inputs), self.module(*args, **step.kwargs[microbatch])

    def _first_call(self, microbatch: int, parcel: Parcel | None) -> tuple[Record, Any]:
        """The first forward whose weight gradients are put aside.

        It shows which weights are used outside of their layers too, and so cannot be; if there are any, it is
        undone and done again.
        """
        assert self.deferral is not None, "the backward of this microbatch is split"
        undo = Undo(self.module, self._pool.device)
        again = None
        if parcel is not None:
            copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in parcel.leaves]
            again = parcel._replace(leaves=copies)
        record, output = self._call(microbatch, parcel)
        self._tried = True
        if not self.deferral.exclude_shared_weights(_differentiable(flatten(output)[0])):
            return record, output
        undo.undo()
        return self._call(microbatch, again)

    def _finish(self, microbatch: int, output: object, leaves: Leaves, record: Record) -> None:
        """The end of the last stage: the loss, if there is one to compute."""
        step = self._step
        if self.loss is None or not (step.training or step.targets is not None):
            return
        loss = self._loss_of(output, microbatch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise PipelineError(f"the loss function must return a tensor with one number, it gave {shown}")
        if self._checks and step.weights[microbatch]:
            self._refuse_not_finite([loss], "its loss")
        self.losses[microbatch] = loss.detach()
        if step.training and not step.weights[microbatch] and self.is_replicated:
            # it counts for nothing, but replicas wait for its gradients, and a mean over nothing has none
            record.roots = list(_differentiable(leaves))
        elif step.training and loss.requires_grad:
            record.roots = [loss]
        elif step.training and _differentiable(leaves):
            raise PipelineError(
                "the loss has no gradient, though the output it is computed from has: nothing would be "
                "trained; do not detach it, and give it a type with fractions"
            )

    def _loss_of(self, output: object, microbatch: int) -> Any:
        targets = self._step.targets
        assert self.loss is not None
        if targets is not None:
            return self.loss(output, targets[microbatch])
        try:
            return self.loss(output)
        except TypeError as error:
            raise PipelineError(
                f"the loss function was called without a target, because this call got none ({error}): give "
                "target= on the rank of the last stage"
            ) from error

    def made(self, microbatch: int) -> tuple[Leaves, Structure]:
        """What forward made, for the rank of the next stage."""
        return self._made.pop(microbatch)

    def hand_over(self, microbatch: int) -> Parcel:
        """What forward made, for the next stage on this same rank: no copy, but a graph of its own."""
        leaves, structure = self._made.pop(microbatch)
        differentiable = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        return Parcel(_detached(leaves), structure, differentiable, None)

    # --- backward ----------------------------------------------------------------------------------

    def backward(self, microbatch: int) -> None:
        """B."""
        record = self._records.pop(microbatch)
        if self.deferral is not None:
            self.deferral.enabled = False
        self._run_backward(microbatch, record)
        self._let_go(record)

    def backward_input(self, microbatch: int) -> None:
        """I."""
        assert self.deferral is not None, "the schedule splits this stage's backward"
        record = self._records[microbatch]
        self.deferral.enabled = True
        with self.deferral.deferring() as record.jobs:
            self._run_backward(microbatch, record)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        record = self._records.pop(microbatch)
        assert record.jobs is not None, "the validator saw I before W"
        record.jobs.run()
        record.jobs = None
        if self.shards is not None:
            self.shards.accumulate_gradients()
        self._let_go(record)

    def _run_backward(self, microbatch: int, record: Record) -> None:
        buffer = None
        if self.is_last:
            # the gradient starts here, and here alone it is scaled; a microbatch without tokens has none
            weight = self._step.weights[microbatch] * self._step.scale
            roots = [root for root in record.roots if isinstance(root, Tensor)]
            starts = weight or self.is_replicated
            gradients: Leaves = [torch.full_like(root, weight) if starts else None for root in roots]
        else:
            gradients, _, _, buffer = self.take_gradient(microbatch)
            self._compare_shapes(record, gradients)
        there = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if there:
            ends: Any = [record.roots[place] for place in there]
            torch.autograd.backward(ends, [gradients[place] for place in there])
            del ends
        del gradients
        record.roots = []
        if buffer is not None:
            self._pool.give(buffer)
        if not self.is_first:
            found = [leaf.grad for leaf in record.inputs]
            if self._checks:
                self._refuse_not_finite(found, "the gradient of its input")
            for leaf in record.inputs:
                leaf.grad = None
            self._gradients[microbatch] = flatten(tuple(found))
        record.inputs = []

    def _let_go(self, record: Record) -> None:
        self._live.remove()
        if self._checks:
            for name, parameter in self.module.named_parameters():
                self._refuse_not_finite([parameter.grad], f"the gradient of {name}")
        if record.buffer is not None:
            self._pool.give(record.buffer)

    def _compare_shapes(self, record: Record, gradients: Leaves) -> None:
        """A gradient must look like the output it is for."""
        came = [None if gradient is None else gradient.shape for gradient in gradients]
        if len(came) != len(record.shapes) or any(
            there is not None and there != made for there, made in zip(came, record.shapes)
        ):
            raise PipelineError(
                f"stage {self.index + 1} sent gradients of shapes {_shown(came)} to stage {self.index}, whose "
                f"outputs that require gradients have shapes {_shown(record.shapes)}"
            )

    def gradient(self, microbatch: int) -> tuple[Leaves, Structure]:
        """What backward made for the rank of the stage before."""
        return self._gradients.pop(microbatch)

    def hand_back(self, microbatch: int) -> Parcel:
        """What backward made, for the stage before on this same rank."""
        leaves, structure = self._gradients.pop(microbatch)
        return Parcel(leaves, structure, [], None)

    def _refuse_not_finite(self, leaves: Sequence[Any], what: str) -> None:
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                continue
            bad = int(whole((~torch.isfinite(leaf)).sum()))
            if bad:
                raise PipelineError(
                    f"stage {self.index}: {bad} of {leaf.numel()} numbers in {what} (tensor {place}, shape "
                    f"{list(leaf.shape)}) are not finite"
                )


def _differentiable(leaves: Leaves) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _detached(leaves: Leaves) -> Leaves:
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _shown(shapes: Sequence[torch.Size | None]) -> str:
    return ", ".join("none" if shape is None else str(list(shape)) for shape in shapes) or "none at all"
