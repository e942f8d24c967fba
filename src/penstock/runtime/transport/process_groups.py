"""The ranks of a `group=` argument: a process group, one dimension of a mesh, or the whole world."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.runtime.torch_internals.distributed import abort_registered_groups, timeout_of
from penstock.runtime.transport.gloo_connections import shut_down_gloo_groups

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"


def process_group(group: Group, name: str, example: str) -> dist.ProcessGroup | None:
    """The process group of the argument `name`; None for the whole world. `example` is a dimension's name."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise PipelineError(
            f"{name} is a mesh of {group.ndim} dimensions ({listed(group.mesh_dim_names or ())}): give one of "
            f'them, such as mesh["{example}"], or a process group'
        )
    return group.get_group()


def members_of(group: dist.ProcessGroup | None) -> tuple[list[int], int]:
    """The world ranks of a group, and this process's rank in the group."""
    if not dist.is_initialized():
        if group is not None:
            raise PipelineError("torch.distributed is not initialized, so the group cannot be used")
        return [0], 0
    members = dist.get_process_group_ranks(group)
    if dist.get_rank() not in members:
        raise PipelineError(
            f"world rank {dist.get_rank()} is not in the group, which has world ranks {listed(members)}: only "
            "members of the group may make this call"
        )
    return members, members.index(dist.get_rank())


def rank_name(rank: int, world_rank: int) -> str:
    """A rank of a group in a message, with its rank in the world if that is another."""
    return f"rank {rank}" if rank == world_rank else f"rank {rank} (world rank {world_rank})"


def abort_process_groups() -> None:
    """End all waits of this process in torch.distributed; its groups do not work afterwards."""
    shut_down_gloo_groups()
    abort_registered_groups()


def group_timeout(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """How long the operations of a group on this device wait."""
    if not dist.is_initialized():
        return default_pg_timeout
    return timeout_of(dist.group.WORLD if group is None else group, device) or default_pg_timeout
