"""Which ranks are meant: a process group, one dimension of a mesh, or all of the world."""

from __future__ import annotations

from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.arguments import listed
from penstock.errors import PipelineError

__all__ = ["Group", "members_of", "process_group"]

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"


def process_group(given: Group, name: str, example: str) -> dist.ProcessGroup | None:
    """The group that somebody gave under this name; None for the whole world."""
    if not isinstance(given, DeviceMesh):
        return given
    if given.ndim != 1:
        raise PipelineError(
            f"{name} is a mesh of {given.ndim} dimensions ({listed(given.mesh_dim_names or ())}): give one of "
            f'them, such as mesh["{example}"], or a process group'
        )
    return given.get_group()


def members_of(group: dist.ProcessGroup | None) -> tuple[list[int], int]:
    """The ranks of a group as the world numbers them, and this rank's number among them."""
    if not dist.is_initialized():
        if group is not None:
            raise PipelineError("the group belongs to no process group that is initialized")
        return [0], 0
    members = dist.get_process_group_ranks(group)
    if dist.get_rank() not in members:
        raise PipelineError(
            f"rank {dist.get_rank()} of the world is not in the group, which has world ranks {listed(members)}"
            ": only its members make this call"
        )
    return members, members.index(dist.get_rank())
