"""One stage of the model on this rank: F, RECOMPUTE, B, I and W of each microbatch, OFFLOAD and RELOAD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.runtime.backward.deferral import Deferral, LayerMode
from penstock.runtime.dtensors import local
from penstock.runtime.pytree import Leaves, Structure, flatten, unflatten
from penstock.runtime.stage.memory import HostStore, KeptForward, SavedTensors, bytes_of, storage_of
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

_NO_HOOKS = nullcontext()


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
        self.counts_bytes = False
        """Whether `held_bytes` will be asked for, so that what F saves has to be known."""
        self._config, self._activations, self._pool = config, activations, pool
        self._modules = [each for each in (module, config.loss) if isinstance(each, nn.Module)]
        """That of the stage, and of its loss if that is a module."""
        self._step: StepInputs
        self._states: dict[int, MicrobatchState] = {}
        """The microbatches that can have their backward."""
        self._kept: dict[int, KeptForward] = {}
        """What F kept for RECOMPUTE."""
        self._saved: dict[int, SavedTensors] = {}
        self._host = HostStore()
        self._output = SharedValues(config.takers)
        self._values = dict.fromkeys(config.takers, self._output)
        """The values for other stages, by stage: the output, and the gradients of inputs."""
        self._values.update((source, SharedValues((source,))) for source in config.inputs)
        self._rows: Rows = ()
        """Those of the microbatch that ran last."""
        self._found_shared = False
        """Whether a forward has shown which weights cannot be deferred."""

    def begin(self, step: StepInputs) -> None:
        """Start a step; discards what a failed step left."""
        self._step = step
        for left in (self.losses, self.outputs, self._states, self._kept, self._saved):
            left.clear()
        for values in self._values.values():
            values.clear()
        self._host.clear()

    # --- F and RECOMPUTE ---------------------------------------------------------------------------

    def forward(self, microbatch: int) -> None:
        """F."""
        step, config = self._step, self._config
        received = None if config.input_source is None else config.input_source(microbatch)
        is_split = microbatch in config.split_microbatches
        mode = (LayerMode.DEFERRED if self._found_shared else LayerMode.JOINED) if is_split else LayerMode.PLAIN
        kept = None
        if step.training and self.is_recomputed(microbatch):
            args = step.args[self.index][microbatch] if received is None else tuple(received.leaves)
            kept = KeptForward(self._modules, mode, received, flatten((args, dict(step.kwargs[microbatch])))[0])
        with self._hooks(microbatch) if kept is None else kept.hooks():
            state, leaves, structure = self._call(microbatch, received, mode)
        del received
        if kept is not None:
            kept.keep_results([*leaves, self.losses.get(microbatch)])
        if config.gradient_source is not None:
            envelope = Envelope(structure, overlapping_positions(leaves), self._rows)
            # a send copies it, and comes before anything that could change it
            handed = leaves if config.sends_at_once else hand_over(leaves)
            differentiable = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in handed]
            self._output.put(microbatch, FlatValue(handed, envelope, differentiable, ()))
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
                self._kept[microbatch] = kept
        elif state.buffers:
            del leaves  # they may refer to the buffers
            self._release_buffers(state.buffers)

    def recompute(self, microbatch: int) -> None:
        """RECOMPUTE."""
        kept = self._kept.pop(microbatch)
        with kept.restored(), self._hooks(microbatch):
            state, leaves, _ = self._call(microbatch, kept.received, kept.mode)
        kept.check_results([*leaves, self.losses.get(microbatch)], self.index, microbatch)
        self._activations.add()
        self._states[microbatch] = state

    def _hooks(self, microbatch: int) -> AbstractContextManager[Any]:
        """Return the hooks on saved tensors under which a forward runs that keeps its graph."""
        offloaded = microbatch in self._config.offloaded_microbatches and not self.is_recomputed(microbatch)
        if self._step.training and (self.counts_bytes or offloaded):
            self._saved[microbatch] = SavedTensors()
            return self._saved[microbatch].hooks()
        return _NO_HOOKS

    def _set_mode(self, mode: LayerMode) -> None:
        """Let the layers run in this mode, in a forward or where a backward recomputes parts of it."""
        if self.deferral is not None:
            self.deferral.state.mode = mode

    def _call(
        self, microbatch: int, received: FlatValue | None, mode: LayerMode
    ) -> tuple[MicrobatchState, Leaves, Structure]:
        """Run the module and the loss; return the state, and the leaves and the structure of the output."""
        step, config = self._step, self._config
        self._set_mode(mode)
        if received is None:
            self._rows = tuple(step.rows.items())[:1]
            state = MicrobatchState((), [], mode=mode)
            output = self.module(*step.args[self.index][microbatch], **step.kwargs[microbatch])
        else:
            state, output = self._call_on(received, step.kwargs[microbatch], mode)
        leaves, structure = flatten(output)
        if config.check_finite:
            check_finite(leaves, "its output", self.index)
        if config.gradient_source is None:
            self._compute_loss(microbatch, output, leaves, state)
        elif step.training:
            state.start_at(_differentiable(leaves), len(config.outputs))
        return state, leaves, structure

    def _call_on(
        self, received: FlatValue, kwargs: Mapping[str, Any], mode: LayerMode
    ) -> tuple[MicrobatchState, Any]:
        """Call the module on outputs of other stages; return the state and the output."""
        inputs: list[Tensor] = []
        entered: Sequence[Tensor] = ()
        if self._step.training:
            positions = [position for position, needed in enumerate(received.differentiable) if needed]
            inputs = [received.leaves[position].requires_grad_() for position in positions]
            if inputs:
                entered = non_leaf_inputs(inputs)
                for position, each in zip(positions, entered):
                    received.leaves[position] = each
        envelope: Envelope | JoinedEnvelope = received.structure
        check_rows(envelope.rows, self._step.rows)
        overlapping = envelope.overlapping
        before = versions(received.leaves, overlapping) if overlapping else []
        output = self.module(*envelope.arguments(received.leaves), **kwargs)
        count_changes(inputs, entered)
        if overlapping:
            check_unchanged(before, versions(received.leaves, overlapping), self.index, self._config.inputs)
        self._rows = envelope.rows
        counts = envelope.counts if isinstance(envelope, JoinedEnvelope) else ()
        return MicrobatchState(received.buffers, inputs, counts=counts, mode=mode), output

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

    # --- B, I and W -----------------------------------------------------------------------------------

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
        self._set_mode(state.mode)
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
                self._values[source].put(microbatch, FlatValue(found[:count], None, [], ()))
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

    def pop_value(self, microbatch: int, other: int) -> tuple[Leaves, Structure]:
        """Return the output, or the gradients of inputs, to be sent to the rank of another stage."""
        value = self._values[other].send(microbatch, other)
        return value.leaves, value.structure

    def take_value(self, microbatch: int, other: int) -> FlatValue:
        """Return the output, or the gradients of inputs, for another stage of this rank."""
        return self._values[other].take(other, microbatch)

    # --- memory ---------------------------------------------------------------------------------------

    def is_recomputed(self, microbatch: int) -> bool:
        """Return whether there is a RECOMPUTE for this microbatch."""
        return microbatch in self._config.recomputed_microbatches

    def offload(self, microbatch: int) -> None:
        """OFFLOAD."""
        if (kept := self._kept.get(microbatch)) is not None:
            self._saved[microbatch], free = kept.offload(self._host)
        else:
            state = self._states[microbatch]
            for leaf in state.inputs:  # only its gradient is asked for: what the backward uses is saved
                own = local(leaf)
                if type(own) is Tensor and own.layout == torch.strided:
                    own.data = torch.empty((), dtype=own.dtype, device=own.device).expand(own.shape)
            buffers, state.inputs_are_held = state.buffers, False
            state.buffers = self._saved[microbatch].offload(self._host, buffers)
            free = tuple(buffer for buffer in buffers if buffer not in state.buffers)
            self._activations.remove()
        self._release_buffers(free)

    def reload(self, microbatch: int) -> None:
        """RELOAD."""
        self._saved[microbatch].reload(self._host)
        if (kept := self._kept.get(microbatch)) is not None:
            kept.reloaded()
        else:
            self._activations.add()

    def held_bytes(self, microbatch: int) -> tuple[int, int]:
        """Return what a microbatch holds of its forward, and its input alone; requires `counts_bytes`.

        Every storage counts once, a message buffer as long as its message. Not counted are parameters, buffers
        of the module, the batch, gradients, outputs that wait to be sent, and the loss itself.
        """
        kept, state = self._kept.get(microbatch), self._states.get(microbatch)
        if kept is not None:
            buffers = () if kept.received is None else kept.received.buffers
            size = bytes_of(buffers, kept.tensors(), set())
            return size, size
        if state is None:
            return 0, 0
        inputs = state.inputs if state.inputs_are_held else []
        deferred = () if state.jobs is None else state.jobs.inputs()
        saved = self._saved[microbatch].tensors()
        others = self._lasting_storages(microbatch)
        size = bytes_of(state.buffers, chain(inputs, saved, deferred), others)
        return size, bytes_of(state.buffers, inputs, others)

    def _lasting_storages(self, microbatch: int) -> set[int]:
        """Return the storages of parameters, buffers and the batch, which are there before F and after B."""
        step = self._step
        batch = [args[microbatch] for args in step.args.values()], dict(step.kwargs[microbatch])
        leaves, _ = flatten((batch, None if step.targets is None else step.targets[microbatch]))
        owned = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in self._modules)
        return {storage_of(each) for each in chain(leaves, owned) if isinstance(each, Tensor)}


def _differentiable(leaves: Leaves) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
