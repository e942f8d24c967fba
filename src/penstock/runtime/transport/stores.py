"""The job's key-value store: connections to it, and the key prefix under which the ranks of a pipeline connect.

Each new connection of a pipeline uses a prefix that was never used before, because keys of an earlier
connection, closed or failed, may still be in the store.
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock.errors import PipelineError

__all__ = ["STORE_IS_SILENT", "agree_on_prefix", "delete_announcement", "first_line", "store_connection"]

STORE_IS_SILENT = (
    "the job's key-value store does not answer: its host, rank 0 of the world or the agent of torchrun, is "
    "stopped or gone, or the network fails"
)
_POLL_SECONDS = 0.01
_connections: dict[str, tuple[weakref.ref[Any], Store]] = {}
_last_prefix: dict[tuple[int, ...], str] = {}  # by the ranks that connected under it


def store_connection(purpose: str) -> Store:
    """A separate connection to the job's store, cached: one connection handles one request at a time."""
    world: Any = dist.group.WORLD
    made_for, store = _connections.get(purpose, (None, None))
    if made_for is None or store is None or made_for() is not world:
        store = world.get_group_store().clone()
        _connections[purpose] = weakref.ref(world), store
    return store


def first_line(error: BaseException) -> str:
    """The first line of an error of torch, which has many."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _announcement_key(members: Sequence[int]) -> str:
    return "penstock/" + "-".join(map(str, members))


def agree_on_prefix(store: Store, members: tuple[int, ...], rank: int, timeout: timedelta) -> str:
    """A new key prefix for these ranks: rank 0 generates and announces it, the others read it."""
    key = _announcement_key(members)
    if rank == 0:
        prefix = f"{key}/{uuid.uuid4().hex}"
        store.set(key, prefix)
    else:
        prefix = _read_new_prefix(store, key, _last_prefix.get(members), timeout)
    _last_prefix[members] = prefix
    return prefix


def _read_new_prefix(store: Store, key: str, last: str | None, timeout: timedelta) -> str:
    end = time.monotonic() + timeout.total_seconds()
    while True:
        store.wait([key], timeout)
        prefix = store.get(key).decode() if store.check([key]) else ""
        if prefix and prefix != last:
            return prefix
        if time.monotonic() > end:
            raise PipelineError(f"rank 0 of the pipeline did not connect within {timeout.total_seconds():g} s")
        time.sleep(_POLL_SECONDS)


def delete_announcement(store: Store, members: Sequence[int], prefix: str) -> None:
    """Remove the announced prefix, so that the next connection does not read it."""
    key = _announcement_key(members)
    if store.check([key]) and store.get(key).decode() == prefix:
        store.delete_key(key)
