"""The call of a stage's module in F and RECOMPUTE, on the output of the stages before it or on the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from penstock.runtime.execution.handover import Envelope, check_unchanged, versions
from penstock.runtime.execution.joined_inputs import JoinedEnvelope
from penstock.runtime.execution.microbatch_state import (
    MicrobatchState,
    StepInputs,
    count_changes,
    non_leaf_inputs,
)
from penstock.runtime.execution.stage_checks import Rows, check_rows
from penstock.runtime.transport.channels import FlatValue

__all__ = ["call_module"]


def call_module(
    module: nn.Module,
    stage: int,
    inputs_from: tuple[int, ...],
    step: StepInputs,
    k: int,
    received: FlatValue | None,
) -> tuple[MicrobatchState, Any, Rows]:
    """The state of microbatch `k`, the output of the module, and the rows of the batch."""
    if received is None:
        output = module(*step.args[stage][k], **step.kwargs[k])
        return MicrobatchState((), []), output, tuple(step.rows.items())[:1]
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
    output = module(*envelope.arguments(received.leaves), **step.kwargs[k])
    count_changes(inputs, entered)
    if overlapping:
        check_unchanged(before, versions(received.leaves, overlapping), stage, inputs_from)
    state = MicrobatchState(received.buffers, inputs)
    if isinstance(envelope, JoinedEnvelope):
        state.counts = envelope.counts
    return state, output, envelope.rows
