"""Promise: `penstock doctor --distributed` names a host that others do not reach before gloo connects."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from penstock.diagnostics import Check
from penstock.runtime import distributed_checks as address_checks
from penstock.runtime.distributed_checks import _Place, check_addresses

LIMIT = timedelta(seconds=60)


def checked(ranks: int) -> list[Check]:
    """What ranks of this host find."""
    store = HashStore()
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(lambda rank: check_addresses(store, rank, ranks, LIMIT), range(ranks)))


def test_ranks_of_one_host_may_listen_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    message = f"gloo listens on 127.0.0.1 ({socket.gethostname()})"
    assert checked(3) == [Check("addresses", "ok", message)] * 3


def test_an_interface_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    for found in checked(2):
        assert found.verdict == "fail"
        assert found.message.startswith(f"GLOO_SOCKET_IFNAME is none7, but {socket.gethostname()} has lo")
        assert found.message.endswith(": set GLOO_SOCKET_IFNAME")


def test_a_host_that_listens_on_the_loopback_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    places = [
        _Place("node0", "10.0.0.1", 1, "", "set GLOO_SOCKET_IFNAME=eth0"),
        _Place("node1", "127.0.1.1", 1, "", "set GLOO_SOCKET_IFNAME=eth1"),
        _Place("node2", "127.0.0.1", 1, "", "set GLOO_SOCKET_IFNAME=eth2"),
    ]
    assert address_checks._problem(places[:1]) == ""
    assert address_checks._problem(places[:2]) == (
        "gloo listens on 127.0.1.1 on node1, where other hosts do not reach it (a host's own name resolves to "
        "it): set GLOO_SOCKET_IFNAME=eth1"
    )
    assert address_checks._problem(places).endswith(
        ": on node1 set GLOO_SOCKET_IFNAME=eth1; on node2 set GLOO_SOCKET_IFNAME=eth2"
    )


def test_a_host_that_does_not_accept_connections_is_named() -> None:
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        here, there = ("node0", "127.0.0.1", 1, "", ""), ("node1", *bound.getsockname(), "", "")
        places = [_Place(*here), _Place(*there)]
        assert address_checks._unreached(places, 0) == (
            "rank 0 on node0 does not reach rank 1 at 127.0.0.1 on node1 (Connection refused): check the "
            "interface (GLOO_SOCKET_IFNAME) and the firewall"
        )
        assert address_checks._unreached(places[:1], 0) == ""
