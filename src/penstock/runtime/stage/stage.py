"""One stage of the model on this rank: F, RECOMPUTE, B, I and W of each microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.runtime.backward.deferral import Deferral, LayerMode
from penstock.runtime.pytree import Leaves, Structure, flatten, unflatten
from penstock.runtime.stage.memory import StageMemory
from penstock.runtime.stage.microbatch import (
    LiveActivations,
    MicrobatchState,
    Rows,
    StageConfig,
    StepInputs,
    check_finite,
    check_gradient_shapes,
    check_rows,
    checked_loss,
    count_changes,
    non_leaf_inputs,
)
from penstock.runtime.stage.values import (
    Envelope,
    JoinedEnvelope,
    SharedValues,
    check_unchanged,
    hand_over,
    overlapping_positions,
    own_tensors,
    versions,
)
from penstock.runtime.torch_internals.autograd import run_backward
from penstock.runtime.transport.buffer_pool import Buffer, BufferPool
from penstock.runtime.transport.channels import FlatValue


class Stage:
    """A module and its place in the pipeline."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        config: StageConfig,
        activations: LiveActivations,
        pool: BufferPool,
    ) -> None:
        self.index, self.module = index, module
        fusion = config.gradient_accumulation_fusion
        self.deferral = Deferral(module, fusion=fusion) if config.split_microbatches else None
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self._config, self._activations, self._pool = config, activations, pool
        self._step: StepInputs
        self.memory = StageMemory(index, module, config, activations, pool)
        """What is held of each microbatch."""
        self._states = self.memory.states
        self._taken_outputs = SharedValues(config.takers)
        self._input_gradients: dict[int, dict[int, tuple[Leaves, Structure]]] = {
            source: {} for source in config.inputs
        }
        """By the stage that they are for, and microbatch."""
        self._rows: Rows = ()
        """Those of the microbatch that ran last."""
        self._found_shared = False
        """Whether a forward has shown which weights cannot be deferred."""

    def begin(self, step: StepInputs) -> None:
        """Start a step; discards what a failed step left."""
        self._step = step
        self.memory.begin(step)
        self._taken_outputs.clear()
        for left in (self.losses, self.outputs, *self._input_gradients.values()):
            left.clear()

    def forward(self, microbatch: int) -> None:
        """F."""
        step, config = self._step, self._config
        received = None if config.input_source is None else config.input_source(microbatch)
        is_split = microbatch in config.split_microbatches
        mode = (LayerMode.DEFERRED if self._found_shared else LayerMode.JOINED) if is_split else LayerMode.PLAIN
        self._set_mode(mode)
        kept = self.memory.kept_forward(microbatch, received, mode)
        with self.memory.hooks(microbatch, kept):
            state, output = self._call(microbatch, received)
            state.mode = mode
            del received
            leaves, structure = flatten(output)
            if config.check_finite:
                check_finite(leaves, "its output", self.index)
            if config.gradient_source is None:
                self._compute_loss(microbatch, output, leaves, state)
            if kept is not None:
                kept.keep_results(self._results(microbatch, leaves))
        output = None
        if config.gradient_source is not None:
            self._hand_on(microbatch, leaves, structure, state)
        elif step.keep_outputs:
            self.outputs[microbatch] = unflatten(structure, own_tensors(leaves))
        if step.training:
            if mode is not LayerMode.PLAIN:
                assert self.deferral is not None, "the backward of this microbatch is split"
                self.deferral.inspect_graph(state.roots)
                self._found_shared = True
            if kept is None:
                self._activations.add()
                self._states[microbatch] = state
            else:
                kept.finish(self.index)
                self.memory.kept[microbatch] = kept
        elif state.buffers:
            del leaves, output  # they may refer to the buffers
            self._release_buffers(state.buffers)

    def recompute(self, microbatch: int) -> None:
        """RECOMPUTE."""
        kept = self.memory.kept.pop(microbatch)
        self._set_mode(kept.mode)
        with kept.restored(), self.memory.hooks(microbatch):
            state, output = self._call(microbatch, kept.received)
            state.mode = kept.mode
            leaves, _ = flatten(output)
            if self._config.gradient_source is None:
                self._compute_loss(microbatch, output, leaves, state)
            else:
                state.start_at(_differentiable(leaves), len(self._config.outputs))
        kept.check_results(self._results(microbatch, leaves), self.index, microbatch)
        self._activations.add()
        self._states[microbatch] = state

    def _results(self, microbatch: int, leaves: Leaves) -> Leaves:
        """Return what a forward has computed, its loss included."""
        return [*leaves, *(self.losses[k] for k in self.losses if k == microbatch)]

    def _set_mode(self, mode: LayerMode) -> None:
        """Let the layers run in this mode, in a forward or where a backward recomputes parts of it."""
        if self.deferral is not None:
            self.deferral.state.mode = mode

    def _call(self, k: int, received: FlatValue | None) -> tuple[MicrobatchState, Any]:
        """Call the module on the batch, or on outputs of other stages; return the state and the output."""
        step = self._step
        if received is None:
            self._rows = tuple(step.rows.items())[:1]
            return MicrobatchState((), []), self.module(*step.args[self.index][k], **step.kwargs[k])
        inputs: list[Tensor] = []
        entered: Sequence[Tensor] = ()
        if step.training:
            positions = [position for position, needed in enumerate(received.differentiable) if needed]
            inputs = [received.leaves[position].requires_grad_() for position in positions]
            if inputs:
                entered = non_leaf_inputs(inputs)
                for position, each in zip(positions, entered):
                    received.leaves[position] = each
        envelope: Envelope | JoinedEnvelope = received.structure
        check_rows(envelope.rows, step.rows)
        overlapping = envelope.overlapping
        before = versions(received.leaves, overlapping) if overlapping else []
        output = self.module(*envelope.arguments(received.leaves), **step.kwargs[k])
        count_changes(inputs, entered)
        if overlapping:
            check_unchanged(before, versions(received.leaves, overlapping), self.index, self._config.inputs)
        state = MicrobatchState(received.buffers, inputs)
        if isinstance(envelope, JoinedEnvelope):
            state.counts = envelope.counts
        self._rows = envelope.rows
        return state, output

    def _hand_on(self, microbatch: int, leaves: Leaves, structure: Structure, state: MicrobatchState) -> None:
        """End the forward of a stage that feeds others: keep its output for them."""
        if self._step.training:
            state.start_at(_differentiable(leaves), len(self._config.outputs))
        envelope = Envelope(structure, overlapping_positions(leaves), self._rows)
        # a send copies it, and comes before anything that could change it
        handed = leaves if self._config.sends_at_once else hand_over(leaves)
        differentiable = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in handed]
        self._taken_outputs.put(microbatch, FlatValue(handed, envelope, differentiable, ()))

    def _compute_loss(self, microbatch: int, output: object, leaves: Leaves, state: MicrobatchState) -> None:
        """End the forward of a stage that feeds no other: compute the loss, if there is one to compute."""
        step, config = self._step, self._config
        if config.loss is None or not (step.training or step.targets is not None):
            return
        check_rows(self._rows, step.target_rows)
        loss = checked_loss(config.loss, output, step.targets, microbatch)
        weight = step.weights[microbatch]
        if config.check_finite and weight:
            check_finite([loss], "its loss", self.index)
        self.losses[microbatch] = loss.detach()
        if step.training and not weight and config.is_replicated:
            # its weight is 0, but replicas wait for its gradients, and a mean over nothing has none
            state.roots = list(_differentiable(leaves))
        elif step.training and loss.requires_grad:
            state.roots = [loss]
        elif step.training and _differentiable(leaves):
            raise PipelineError(
                "the loss has no gradient, but the output that it is computed from has one, so nothing would "
                "be trained: do not detach the loss, and give it a floating-point dtype"
            )

    def pop_output(self, microbatch: int, consumer: int) -> tuple[Leaves, Structure]:
        """Return the output of forward, to be sent to the rank of the stage that uses it."""
        value = self._taken_outputs.send(microbatch, consumer)
        return value.leaves, value.structure

    def take_output(self, microbatch: int, consumer: int) -> FlatValue:
        """Return the output of forward, for a stage on the same rank."""
        return self._taken_outputs.take(consumer, microbatch)

    def backward(self, microbatch: int) -> None:
        """B."""
        state = self._states.pop(microbatch)
        self._set_mode(state.mode)
        self._run_backward(microbatch, state)
        self._release(state)

    def backward_input(self, microbatch: int) -> None:
        """I."""
        assert self.deferral is not None, "the schedule splits the backward of this stage"
        state = self._states[microbatch]
        self.deferral.state.mode = state.mode
        if state.mode is LayerMode.JOINED:
            self._run_backward(microbatch, state)
            return
        state.jobs = self.deferral.begin_deferring()
        try:
            self._run_backward(microbatch, state)
        finally:
            self.deferral.end_deferring()

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        state = self._states.pop(microbatch)
        if state.jobs is not None:
            state.jobs.run()
            state.jobs = None
        if self._config.shards is not None:
            self._config.shards.accumulate_gradients()
        self._release(state)

    def _run_backward(self, microbatch: int, state: MicrobatchState) -> None:
        gradients, buffers = self._root_gradients(microbatch, state)
        positions = [position for position, gradient in enumerate(gradients) if gradient is not None]
        if positions:
            roots: Any = [state.roots[position] for position in positions]
            run_backward(roots, [gradients[position] for position in positions])
            del roots
        del gradients
        state.roots = []
        self._release_buffers(buffers)
        if self._config.input_source is not None:
            found = [leaf.grad for leaf in state.inputs]
            if self._config.check_finite:
                check_finite(found, "the gradient of its input", self.index)
            for leaf in state.inputs:
                leaf.grad = None
            for source, count in zip(self._config.inputs, state.counts or (len(found),)):
                self._input_gradients[source][microbatch] = found[:count], None
                del found[:count]
        state.inputs = []

    def _root_gradients(self, microbatch: int, state: MicrobatchState) -> tuple[Leaves, Any]:
        """Return the gradient of each root, and the buffers that hold them."""
        if (source := self._config.gradient_source) is None:
            # the loss is weighted and scaled here and nowhere else; a microbatch of weight 0 has no gradient
            weight = self._step.weights[microbatch] * self._step.scale
            roots = [root for root in state.roots if isinstance(root, Tensor)]
            starts = weight or self._config.is_replicated
            return [torch.full_like(root, weight) if starts else None for root in roots], ()
        gradients, _, _, buffers = source(microbatch)
        check_gradient_shapes(gradients, state.shapes, self.index)
        return gradients, buffers

    def _release(self, state: MicrobatchState) -> None:
        """End the backward of a microbatch."""
        self._activations.remove()
        if self._config.check_finite:
            for name, parameter in self.module.named_parameters():
                check_finite([parameter.grad], f"the gradient of {name}", self.index)
        self._release_buffers(state.buffers)

    def _release_buffers(self, buffers: tuple[Buffer, ...]) -> None:
        for buffer in buffers:
            self._pool.release(buffer)

    def pop_input_gradient(self, microbatch: int, source: int) -> tuple[Leaves, Structure]:
        """Return the input gradients of backward, to be sent to the rank of the stage that they are for."""
        return self._input_gradients[source].pop(microbatch)

    def take_input_gradient(self, microbatch: int, source: int) -> FlatValue:
        """Return the input gradients of backward, for a stage on the same rank."""
        leaves, structure = self._input_gradients[source].pop(microbatch)
        return FlatValue(leaves, structure, [], ())


def _differentiable(leaves: Leaves) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
