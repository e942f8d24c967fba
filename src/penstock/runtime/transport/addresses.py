"""Where other ranks reach this process: the address of this host in the network of the job."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import Any

from penstock.runtime.transport.stores import unwrapped

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
