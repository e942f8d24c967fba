"""The configuration of one rank's execution, fixed when the pipeline is created."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.ir.action import Step
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.stage.microbatch import LossFunction
from penstock.runtime.stage.stage import Stage
from penstock.validation import SendModel, invalid_schedule_error, validate


@dataclass(frozen=True)
class ActionCall:
    """The argument of a user function: the action that it replaces."""

    action: Step
    stages: Mapping[int, Stage]
    """The stages of this rank."""
    run: Callable[[], None]
    """What the runtime does without the function; for an overlapped pair, its parts one after the other."""
    parts: tuple[ActionCall, ...] = ()
    """For an overlapped pair: the forward and the backward, with the functions for their kinds."""


CustomFunction: TypeAlias = Callable[[ActionCall], None]

_PROVIDED = SendModel.EDGE_STREAMS  # of our channels: no message waits for one of another channel


@dataclass(frozen=True)
class VerifiedSchedule:
    """A valid schedule with communication."""

    schedule: Schedule
    safe_with_blocking_sends: bool
    """Whether it has no deadlock even if every send blocks until it is received (`rendezvous`).

    If so, the same holds for its forward-only part: leaving out whole messages removes waits and adds none.
    """


def verify_schedule(schedule: Schedule) -> VerifiedSchedule:
    """Lower the schedule if it has no communication, and raise if it is not valid.

    `lower` raises for an invalid schedule, and the communication that it adds has no deadlock under any send
    model. A schedule with communication is validated under the strictest send model; deadlocks that our
    channels cannot have are not errors.
    """
    if all(kind.is_compute or kind.is_host_copy for kind in schedule.table.kinds):
        return VerifiedSchedule(lower(schedule), safe_with_blocking_sends=True)
    violations = validate(schedule)
    errors = [each for each in violations if not each.send_models or _PROVIDED in each.send_models]
    if errors:
        raise invalid_schedule_error(schedule, errors)
    return VerifiedSchedule(schedule, safe_with_blocking_sends=not violations)


@dataclass(frozen=True)
class ExecutionConfig:
    """The schedule, this rank's place in it, its modules, and how they run."""

    verified: VerifiedSchedule
    rank: int
    members: Sequence[int]
    """The world ranks of the pipeline's ranks."""
    device: torch.device
    timeout: timedelta
    modules: Mapping[int, nn.Module]
    """The modules of this rank's stages."""
    trained: Mapping[int, nn.Module]
    """The same with the parameters of the loss, if it has any."""
    losses: Mapping[int, LossFunction]
    """The loss of each sink, the stages that feed no other; empty without a loss."""
    functions: Mapping[Kind, CustomFunction]
    replication: ReplicaGroup
    check_finite: bool
    gradient_accumulation_fusion: bool
    mesh: DeviceMesh | None = None
    """The mesh of the pipeline, if it was given as one: DTensors may be on other slices of its root mesh."""
    state_dir: Path | None = None
    """The folder of the state files; None if there are none."""

    @property
    def schedule(self) -> Schedule:
        """The lowered schedule."""
        return self.verified.schedule

    @property
    def evaluated(self) -> list[nn.Module]:
        """The modules of this rank's stages and losses."""
        return [each for each in (*self.modules.values(), *self.losses.values()) if isinstance(each, nn.Module)]

    @property
    def is_single_rank(self) -> bool:
        """Whether the pipeline has only this rank."""
        return len(self.members) == 1
