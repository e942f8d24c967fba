"""The network of a job: its key-value store, and the addresses at which its ranks reach each other."""

from __future__ import annotations

import os
import socket
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
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


# --- addresses -----------------------------------------------------------------------------------------

_SIOCGIFADDR = 0x8915  # the request of Linux for the address of an interface


def listening_socket(store: Any) -> tuple[socket.socket, str]:
    """A socket at which other ranks can connect to this process, and its address for them."""
    listener, host = socket.socket(), own_address(store)
    listener.bind((host or "", 0))
    listener.listen(1024)  # as many ranks may connect at once
    return listener, f"{host or socket.gethostname()}:{listener.getsockname()[1]}"


def connect(address: str, seconds: float) -> socket.socket:
    """A connection to the rank at `host:port`; raises OSError if it does not answer within this time."""
    host, port = address.rsplit(":", 1)
    return without_delay(socket.create_connection((host, int(port)), seconds))


def without_delay(connection: socket.socket) -> socket.socket:
    """The same connection, which sends each message at once."""
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def own_address(store: Any) -> str | None:
    """The address of this host in the network of the job: of gloo's interface, or of the route to the store.

    None for an unknown name or interface, and on a host without IPv4.
    """
    try:
        if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
            return address_of_interface(name)
        return address_of_route(store)
    except OSError:
        return None


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface of this host; raises OSError if there is none."""
    import fcntl  # noqa: PLC0415 -- not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def address_of_route(store: Any) -> str:
    """The address from which this host reaches the store of the job; raises OSError if there is none."""
    store = unwrapped(store)
    if not hasattr(store, "host"):
        return "127.0.0.1"  # a store in a file or in memory: all ranks are on this host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))
        return str(probe.getsockname()[0])
