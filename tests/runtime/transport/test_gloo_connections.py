"""Promise: aborting a gloo group ends all its waits, and affects no other connection."""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from penstock.runtime.transport.network import store_connection
from penstock.runtime.transport.process_groups import abort_gloo_group, gloo_group, shut_down_gloo_groups
from tests.support.pool import Pools


def wait_and_shut_down(*, everything: bool) -> tuple[str, float]:
    """Rank 1 ends a wait of rank 0."""
    rank = dist.get_rank()
    store = store_connection("test")
    group = gloo_group(PrefixStore(f"{everything}", store), rank, 2, timedelta(seconds=60))
    group.barrier().wait()
    begin = time.monotonic()
    work = group.allreduce([torch.ones(1)]) if rank == 0 else None
    time.sleep(0.2)
    if rank == 1:
        shut_down_gloo_groups() if everything else abort_gloo_group(group)
    outcome = ""
    if work is not None:
        with pytest.raises(RuntimeError) as caught:
            work.wait()
        outcome = str(caught.value)
    if not everything:
        dist.barrier()  # the world's connections are not affected
    else:
        with pytest.raises(RuntimeError):
            dist.barrier()
    assert store.check([f"{everything}"]) in {True, False}  # neither is the store
    return outcome, time.monotonic() - begin


def abort_own_waits() -> list[str]:
    """Rank 0 aborts a send and a receive that rank 1, which has left, never posts."""
    rank = dist.get_rank()
    group = gloo_group(PrefixStore("own", store_connection("test")), rank, 2, timedelta(seconds=60))
    group.barrier().wait()
    errors = []
    if rank == 0:
        works = [group.send([torch.ones(1)], 1, 1), group.recv([torch.ones(1)], 1, 2)]
        dist.barrier()
        dist.barrier()
        abort_gloo_group(group)
        for work in works:
            with pytest.raises(RuntimeError) as caught:
                work.wait(timedelta(seconds=30))
            errors.append(str(caught.value))
    else:
        dist.barrier()
        abort_gloo_group(group)
        dist.barrier()
    return errors


def test_messages_that_the_other_side_never_posts_end(pools: Pools) -> None:
    errors = pools(2).run(abort_own_waits)[0]
    assert len(errors) == 2
    assert not any("Timed out" in error for error in errors)


@pytest.mark.parametrize("everything", [False, True])
def test_a_wait_ends_when_the_other_side_shuts_down(pools: Pools, *, everything: bool) -> None:
    pool = pools(2)
    outcomes = pool.run(run_everything if everything else run_one)
    assert "closed by peer" in outcomes[0][0] or "reset" in outcomes[0][0]
    assert outcomes[0][1] < 30
    if everything:
        pool.stop()


def run_one() -> tuple[str, float]:
    return wait_and_shut_down(everything=False)


def run_everything() -> tuple[str, float]:
    return wait_and_shut_down(everything=True)


@pytest.mark.skipif(sys.platform != "linux", reason="epoll")
def test_sockets_of_python_are_left_alone_whatever_is_in_the_upper_half_of_their_data() -> None:
    with select.epoll() as epoll, socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        for each in (listener, one):
            event = struct.pack("=IiI", select.EPOLLIN, each.fileno(), 0x7F87)  # as CPython 3.11 may pass it
            assert ctypes.CDLL(None).epoll_ctl(epoll.fileno(), 1, each.fileno(), event) == 0
        shut_down_gloo_groups()
        one.sendall(b"x")
        assert other.recv(1) == b"x"
        one.close()
        other.close()
