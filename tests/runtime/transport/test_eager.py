"""Promise: short messages arrive as they were sent, in order, and no wait outlives its connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from penstock.runtime.transport import eager
from penstock.runtime.transport.eager import EAGER_BYTES, EagerMessages, host_bytes
from penstock.runtime.transport.transport_errors import TransportError

KEY = "k" * 32


@contextmanager
def connected(ranks: int = 2, seconds: float = 60) -> Iterator[list[EagerMessages]]:
    """The ends of all ranks, in this process."""
    store = HashStore()

    def end_of(rank: int) -> EagerMessages:
        return EagerMessages(store, rank, ranks, KEY, timedelta(seconds=seconds))

    with ThreadPoolExecutor(ranks) as threads:
        ends = list(threads.map(end_of, range(ranks)))
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def received(end: EagerMessages, peer: int, tag: int, like: Tensor) -> Tensor:
    tensor = torch.empty_like(like)
    end.receive(host_bytes(tensor), peer, tag).wait()
    return tensor


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64])
@pytest.mark.parametrize("numbers", [1, 7, 4096])
def test_messages_arrive_as_they_were_sent(dtype: torch.dtype, numbers: int) -> None:
    with connected() as (first, second):
        sent = torch.arange(numbers).to(dtype)
        first.send(host_bytes(sent), 1, 3).wait()
        sent_later = sent + 1
        sent.zero_()  # its memory can be used again
        second.send(host_bytes(sent_later), 0, 3).wait()
        assert torch.equal(received(second, 0, 3, sent), torch.arange(numbers).to(dtype))
        assert torch.equal(received(first, 1, 3, sent), sent_later)


def test_every_rank_reaches_every_other() -> None:
    with connected(4) as ends:
        for rank, end in enumerate(ends):
            for peer in set(range(4)) - {rank}:
                end.send(host_bytes(torch.tensor([rank])), peer, 0)
        found = [
            [
                int(received(end, peer, 0, torch.empty(1, dtype=torch.int64)))
                for peer in range(4)
                if peer != rank
            ]
            for rank, end in enumerate(ends)
        ]
    assert found == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


def test_messages_can_be_waited_for_in_any_order_and_keep_theirs_within_a_tag() -> None:
    with connected() as (first, second):
        for number in range(6):
            first.send(host_bytes(torch.tensor([number])), 1, number % 2)
        like = torch.empty(1, dtype=torch.int64)
        assert [int(received(second, 0, 1, like)) for _ in range(3)] == [1, 3, 5]
        assert [int(received(second, 0, 0, like)) for _ in range(3)] == [0, 2, 4]


def test_a_send_returns_even_if_the_network_is_full() -> None:
    count = 400  # 26 MB, more than the buffers of a connection hold
    with connected() as (first, second):
        sends = [
            first.send(host_bytes(torch.full((EAGER_BYTES,), k % 251, dtype=torch.uint8)), 1, k)
            for k in range(count)
        ]
        like = torch.empty(EAGER_BYTES, dtype=torch.uint8)
        assert all(bool((received(second, 0, k, like) == k % 251).all()) for k in range(count))
        for send in sends:
            send.wait()
        one = host_bytes(torch.ones(1))
        assert second.send(one, 0, 0) is first.send(one, 1, 0)  # at once again


@pytest.mark.parametrize("aborting", [0, 1])
def test_an_abort_ends_the_waits_of_both_ends(aborting: int) -> None:
    with connected() as ends, ThreadPoolExecutor(2) as threads:
        waits = [ends[rank].receive(host_bytes(torch.empty(1)), 1 - rank, 0) for rank in (0, 1)]
        running = [threads.submit(wait.wait) for wait in waits]
        time.sleep(0.05)
        ends[aborting].abort()
        for each in running:
            with pytest.raises(TransportError, match="broke: closed by the other end"):
                each.result(60)


def test_an_abort_ends_a_send_that_the_network_does_not_take() -> None:
    with connected() as (first, _):
        sends = [first.send(host_bytes(torch.zeros(EAGER_BYTES, dtype=torch.uint8)), 1, 0) for _ in range(400)]
        threading.Timer(0.05, first.abort).start()
        with pytest.raises(TransportError, match="could not be sent"):
            sends[-1].wait()
        with pytest.raises(TransportError, match="rank 1 broke"):
            first.send(host_bytes(torch.zeros(1)), 1, 0)


def test_what_was_sent_before_the_end_of_a_connection_arrives() -> None:
    with connected() as (first, second):
        first.send(host_bytes(torch.tensor([5])), 1, 0)
        first.close()
        like = torch.empty(1, dtype=torch.int64)
        assert int(received(second, 0, 0, like)) == 5
        with pytest.raises(TransportError, match="connection to rank 0 broke") as found:
            received(second, 0, 0, like)
        assert not found.value.timed_out


def test_a_wait_ends_after_the_timeout() -> None:
    with connected(seconds=0.2) as (first, _):
        with pytest.raises(TransportError, match=r"Timed out after 0\.2 s") as found:
            received(first, 1, 0, torch.empty(1))
        assert found.value.timed_out


def test_the_wait_for_a_send_that_the_network_does_not_take_ends_after_the_timeout() -> None:
    with connected(seconds=0.5) as (first, _):
        sends = [first.send(host_bytes(torch.zeros(EAGER_BYTES, dtype=torch.uint8)), 1, 0) for _ in range(400)]
        with pytest.raises(TransportError, match=r"Timed out after 0\.5 s") as found:
            sends[-1].wait()
        assert found.value.timed_out


@pytest.mark.parametrize("early", [False, True])
def test_a_message_of_another_length_is_an_error(*, early: bool) -> None:
    with connected() as (first, second):
        first.send(host_bytes(torch.zeros(3, dtype=torch.uint8)), 1, 4)
        if early:
            first.send(host_bytes(torch.zeros(3, dtype=torch.uint8)), 1, 5)
            received(second, 0, 5, torch.empty(3, dtype=torch.uint8))
        with pytest.raises(TransportError, match=r"sent 3 bytes with tag 4, and this rank waits for 5"):
            received(second, 0, 4, torch.empty(5, dtype=torch.uint8))


@pytest.mark.parametrize("hello", [b"", b"x" * 40])
def test_a_stranger_is_not_accepted(hello: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_HELLO_SECONDS", 0.1)
    store = HashStore()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(EagerMessages, store, 0, 2, KEY, timedelta(seconds=60))
        host, port = store.get("0").decode().split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(hello)
            assert stranger.recv(1) == b""
        second = EagerMessages(store, 1, 2, KEY, timedelta(seconds=60))
        first = waiting.result(60)
    first.send(host_bytes(torch.tensor([1.0])), 1, 0)
    assert float(received(second, 0, 0, torch.empty(1))) == 1
    first.close()
    second.close()


def test_a_rank_that_does_not_connect_is_a_transport_error() -> None:
    with pytest.raises(TransportError, match="could not be made"):
        EagerMessages(HashStore(), 0, 2, KEY, timedelta(seconds=0.1))
