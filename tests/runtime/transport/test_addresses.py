"""Promise: a rank gives others an address in the network of the job at which they reach it."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from penstock.runtime.transport.network import connect, listening_socket, own_address


def test_the_address_is_that_of_the_interface_that_gloo_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert own_address(None) == "127.0.0.1"


def test_without_an_interface_it_is_that_of_the_route_to_the_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    assert own_address(PrefixStore("a", PrefixStore("b", store))) == "127.0.0.1"
    assert own_address(HashStore()) == "127.0.0.1"  # all ranks are in this process


def test_an_unknown_interface_leaves_the_name_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    assert own_address(HashStore()) is None
    listener, address = listening_socket(HashStore())
    with listener:
        assert address == f"{socket.gethostname()}:{listener.getsockname()[1]}"


def test_a_rank_is_reached_at_its_address() -> None:
    listener, address = listening_socket(HashStore())
    with listener, connect(address, 30) as connection, listener.accept()[0] as accepted:
        connection.sendall(b"x")
        assert accepted.recv(1) == b"x"
    with pytest.raises(OSError, match="refused"):
        connect(address, 30)
