"""The job's key-value store: connections to it, and what to say of one that does not answer."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

__all__ = ["STORE_IS_SILENT", "first_line", "open_connections", "store_connection", "unwrapped"]

STORE_IS_SILENT = (
    "the job's key-value store does not answer: its host, rank 0 of the world or the agent of torchrun, is "
    "stopped or gone, or the network fails"
)
_connections: dict[str, tuple[weakref.ref[Any], Store]] = {}


def store_connection(purpose: str) -> Store:
    """A separate connection to the job's store, cached: one connection handles one request at a time."""
    world: Any = dist.group.WORLD
    made_for, store = _connections.get(purpose, (None, None))
    if made_for is None or store is None or made_for() is not world:
        store = world.get_group_store().clone()
        _connections[purpose] = weakref.ref(world), store
    return store


def open_connections() -> list[Any]:
    """The connections so far."""
    return [store for _, store in _connections.values()]


def unwrapped(store: Any) -> Any:
    """The store itself, without the prefixes of its keys."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def first_line(error: BaseException) -> str:
    """The first line of an error of torch, which has many."""
    return (str(error).splitlines() or [type(error).__name__])[0]
