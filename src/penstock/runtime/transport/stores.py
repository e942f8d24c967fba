"""The job's key-value store, and calls of torch with a time limit: a store may wait for its host for ever."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock import processes
from penstock.runtime.transport.transport_errors import TransportError

T = TypeVar("T")


def call_within(seconds: float, call: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
    """Do the same as `processes.call_within`, on the CUDA device of this thread.

    torch's store may wait for its host for ever, whatever its timeout is.
    """
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if in_use else None  # a setting of this thread

    def run() -> T:
        if device is not None:
            torch.cuda.set_device(device)
        return call()

    return processes.call_within(seconds, run, check)


# The job's key-value store: connections to it, and what to say of one that does not answer.


class StoreSilentError(TransportError):
    """The job's key-value store does not answer; `error` says how that was noticed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            "the job's key-value store does not answer: its host, rank 0 of the world or the agent of "
            f"torchrun, is stopped or gone, or the network fails ({first_line(error)})"
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
