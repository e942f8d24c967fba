"""How one stage runs: where its values come from, which backwards are split, and its loss."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from penstock.ir.action import Step
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.fsdp import FsdpShards
from penstock.runtime.execution.joined_inputs import Source
from penstock.runtime.execution.stage_checks import LossFunction

__all__ = ["StageConfig", "microbatches_with", "sends_at_once"]


@dataclass(frozen=True)
class StageConfig:
    """How one stage runs."""

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
    """The microbatches for which a stage has an action of this kind: I where the backward is split."""
    table = schedule.table
    of_stage = table.of_kind(kind) & (table.stage == stage)
    return frozenset(table.microbatch[of_stage].tolist())


def sends_at_once(schedule: Schedule, stage: int) -> bool:
    """Whether each F of a stage is followed by the send of its output, with nothing but receives between."""
    steps = [step for step in schedule.ranks[schedule.placement.stage_to_rank[stage]] if not _is_receive(step)]
    for step, after in zip(steps, [*steps[1:], None]):
        (forward, *overlapped) = step.parts
        if forward.kind is not Kind.F or forward.stage != stage:
            continue
        send = None if after is None else after.parts[0]
        if overlapped or send is None or send.kind is not Kind.SEND_F:
            return False
        if (send.stage, send.microbatch) != (stage, forward.microbatch):
            return False
    return True


def _is_receive(step: Step) -> bool:
    return step.parts[0].kind.is_receive
