"""gloo groups that can be aborted, which torch does not offer: its waits end by timeout, or with a connection.

The groups of others, such as those of a mesh, are found by their TCP connections. Each gloo device has an epoll
instance with a listening socket, its connections and a pipe, each with a pointer as its data; libuv and Python
have the descriptor in the lower half of the data, and Python leaves the upper half undefined. Linux lists all
of that in /proc; on other systems nothing is found, and the waits of those groups end by their timeout.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock.runtime.torch_internals.distributed import new_gloo_group
from penstock.runtime.transport.addresses import own_address

_DESCRIPTORS = Path("/proc/self/fd")
_UNUSED_TAG = 2**31 - 1


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group that is not registered with torch.distributed.

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
    """The epoll instances of this process."""
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
