"""The configuration of one rank's execution, fixed when the pipeline is created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.execution.custom_function import CustomFunction
from penstock.runtime.execution.stage_checks import LossFunction
from penstock.runtime.execution.verified_schedule import VerifiedSchedule

__all__ = ["ExecutionConfig"]


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
