"""Process groups: the ranks of a `group=` argument, and gloo groups that can be aborted."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.runtime.torch_internals.distributed import abort_registered_groups, new_gloo_group, timeout_of
from penstock.runtime.transport.network import own_address

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


# --- gloo groups that can be aborted: in torch, their waits end by timeout, or with a connection ----------
#
# The groups of others, such as those of a mesh, are found by their TCP connections. Each gloo device has an
# epoll instance with a listening socket, its connections and a pipe, each with a pointer as its data; libuv and
# Python have the descriptor in the lower half of the data, and Python leaves the upper half undefined. Linux
# lists all of that in /proc; elsewhere nothing is found, and the waits of those groups end by their timeout.

_DESCRIPTORS = Path("/proc/self/fd")
_UNUSED_TAG = 2**31 - 1


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group that is not registered with torch.distributed.

    It listens where the other ranks reach this host. gloo's default is the address that the name of the host
    has on the host itself, which is often that of the loopback interface.
    """
    gloo: Any = dist.ProcessGroupGloo
    host = own_address(store)
    device = gloo.create_default_device() if host is None else gloo.create_device(hostname=host)
    return new_gloo_group(store, rank, size, [device], timeout)


def abort_gloo_group(group: Any) -> None:
    """End every wait of a group, here and on its other ranks; any thread may call it.

    gloo closes all connections of a group in which a wait times out, and fails what is pending, also sends that
    their receivers have not posted, which a closed connection does not end.
    """
    if group.size() > 1:
        with suppress(RuntimeError):
            group.recv_anysource([torch.zeros(1)], _UNUSED_TAG).wait(timedelta(milliseconds=1))


def shut_down_gloo_groups() -> None:
    """End the connections of all gloo groups of this process."""
    for epoll in _epolls():
        watched = list(_watched_by(epoll))
        if all(data != descriptor for descriptor, _, data in watched) and any(
            _is_listening(descriptor) for descriptor, _, _ in watched
        ):
            for descriptor, inode, _ in watched:
                _shut_down(descriptor, inode)


def _epolls() -> set[int]:
    found = set()
    with suppress(OSError):
        for entry in _DESCRIPTORS.iterdir():
            with suppress(OSError):  # closed since it was listed
                if entry.readlink().name == "anon_inode:[eventpoll]":
                    found.add(int(entry.name))
    return found


def _watched_by(epoll: int) -> list[tuple[int, int, int]]:
    """Descriptor, inode and lower half of the data of everything that an epoll instance watches."""
    try:
        text = (_DESCRIPTORS.parent / "fdinfo" / str(epoll)).read_text(encoding="ascii")
    except OSError:
        return []
    rows = [line.split() for line in text.splitlines() if line.startswith("tfd:")]
    return [(int(row[1]), int(row[7].removeprefix("ino:"), 16), int(row[5], 16) & 0xFFFF_FFFF) for row in rows]


def _is_listening(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            return listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0
    except OSError:  # not a socket, or closed
        return False


def _shut_down(descriptor: int, inode: int) -> None:
    """Shut down a connection, unless its descriptor has another meaning by now."""
    with suppress(OSError):  # closed, or it listens
        status = os.fstat(descriptor)
        if stat.S_ISSOCK(status.st_mode) and status.st_ino == inode:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
