"""The check `addresses` of `penstock doctor --distributed`: whether gloo listens where other hosts reach it.

gloo listens at the address of GLOO_SOCKET_IFNAME, or else at the address that the name of its host has on that
host, which is often one of the loopback interface. The ranks compare these addresses through the job's store,
because gloo itself waits for minutes. Then each tries to connect to the next host.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.arguments import plural, some
from penstock.diagnostics import Check
from penstock.runtime.transport.addresses import address_of_interface, address_of_route, connect

__all__ = ["check_addresses"]

_CONNECT_SECONDS = 5.0


class _Place(NamedTuple):
    """Where a rank is reached, as it says itself."""

    host: str
    address: str
    port: int
    problem: str
    """Why gloo cannot listen there."""
    advice: str
    """What to set so that other hosts reach it."""


def check_addresses(job_store: Store, rank: int, size: int, limit: timedelta) -> Check:
    """All ranks call it, and get the same answer; raises if one of them does not within the limit."""
    store = PrefixStore("penstock/addresses", job_store)
    with socket.socket() as listener:
        own = _own_place(job_store, listener)
        places = [_Place(*json.loads(each)) for each in _exchanged(store, "place", rank, size, own, limit)]
        problem = _problem(places)
        if not problem:
            unreached = _exchanged(store, "unreached", rank, size, _unreached(places, rank), limit)
            problem = next(filter(None, map(json.loads, unreached)), "")
    if problem:
        _end_together(store, rank, size, limit)
        return Check("addresses", "fail", problem)
    hosts = {place.host: place.address for place in places}
    shown = some([f"{address} ({host})" for host, address in hosts.items()])
    return Check("addresses", "ok", f"gloo listens on {shown}")


def _exchanged(store: Store, name: str, rank: int, size: int, own: object, limit: timedelta) -> list[bytes]:
    """Every rank's value, in JSON."""
    keys = [f"{name}/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(own))
    store.wait(keys, limit)
    return [store.get(key) for key in keys]


def _end_together(store: Store, rank: int, size: int, limit: timedelta) -> None:
    """Rank 0, which may host the store, goes on when no other rank needs it."""
    store.set(f"end/{rank}", "")
    if rank == 0:
        store.wait([f"end/{other}" for other in range(size)], limit)


def _own_place(store: Store, listener: socket.socket) -> _Place:
    """Listen where gloo will."""
    host, name = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    interface = _interface_to(store)
    advice = f"set GLOO_SOCKET_IFNAME={interface}" if interface else "set GLOO_SOCKET_IFNAME"
    try:
        address = address_of_interface(name) if name else _address_of_name(host)
    except OSError:
        known = ", ".join(each for _, each in socket.if_nameindex())
        return _Place(host, "", 0, f"GLOO_SOCKET_IFNAME is {name}, but {host} has {known}", advice)
    listener.bind((address, 0))
    listener.listen(16)
    return _Place(host, address, listener.getsockname()[1], "", advice)


def _address_of_name(host: str) -> str:
    """The first address of the name at which a socket can listen, or else that of the loopback interface."""
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM):
            with socket.socket() as probe, suppress(OSError):
                probe.bind((address[0], 0))
                return str(address[0])
    return "127.0.0.1"


def _interface_to(store: Store) -> str:
    """The interface of this host from which it reaches the store; empty if that is not known."""
    with suppress(OSError):
        address = address_of_route(store)
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                if address_of_interface(name) == address and not ipaddress.ip_address(address).is_loopback:
                    return name
    return ""


def _problem(places: Sequence[_Place]) -> str:
    """An interface that does not exist, or an address that other hosts do not reach."""
    for place in places:
        if place.problem:
            return f"{place.problem}: {place.advice}"
    if len({place.host for place in places}) == 1:
        return ""
    local = {each.host: each for each in places if ipaddress.ip_address(each.address).is_loopback}
    if not local:
        return ""
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    why = f"GLOO_SOCKET_IFNAME is {given}" if given else "a host's own name resolves to it"
    shown = some([f"{each.address} on {host}" for host, each in local.items()])
    return f"gloo listens on {shown}, where other hosts do not reach it ({why}): {_advice(local)}"


def _advice(places: Mapping[str, _Place]) -> str:
    hosts_by_advice: dict[str, list[str]] = {}
    for host, place in places.items():
        hosts_by_advice.setdefault(place.advice, []).append(host)
    if len(hosts_by_advice) == 1:
        return next(iter(hosts_by_advice))
    return "; ".join(f"on {some(hosts)} {advice}" for advice, hosts in hosts_by_advice.items())


def _unreached(places: Sequence[_Place], rank: int) -> str:
    """What to say if this rank does not reach the ranks of the next host, of those in the order of ranks."""
    hosts, own = list(dict.fromkeys(place.host for place in places)), places[rank].host
    following = hosts[(hosts.index(own) + 1) % len(hosts)]
    for other, place in enumerate(places):
        if place.host == following != own:
            try:
                connect(f"{place.address}:{place.port}", _CONNECT_SECONDS).close()
            except OSError as error:
                where = f"rank {other} at {place.address} on {place.host}"
                reason = error.strerror or f"no answer within {plural(f'{_CONNECT_SECONDS:g}', 'second')}"
                advice = "check the interface (GLOO_SOCKET_IFNAME) and the firewall"
                return f"rank {rank} on {own} does not reach {where} ({reason}): {advice}"
    return ""
