"""Promise: buffers are used again, but never while somebody still looks at them."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.transport.buffer_pool import Pool
from penstock.runtime.transport.values import Layout, describe, flatten


@pytest.fixture
def pool() -> Pool:
    return Pool(torch.device("cpu"))


def test_a_buffer_that_was_given_back_is_taken_again(pool: Pool) -> None:
    first = pool.take(1000)
    pool.give(first)
    assert pool.take(1000) is first
    assert (pool.in_use, pool.peak) == (1, 1)


def test_messages_of_nearly_the_same_length_share_buffers(pool: Pool) -> None:
    first = pool.take(10_000)
    pool.give(first)
    second = pool.take(10_100)
    assert second is first
    assert len(second.bytes_) == 10_100


@pytest.mark.parametrize("look", ["slice", "view", "detached", "graph"])
def test_a_buffer_that_somebody_looks_at_is_not_taken_again(pool: Pool, look: str) -> None:
    first = pool.take(64 + 16)
    seen = first.bytes_[64:].view(torch.float32)
    if look == "view":
        seen = seen.view(2, 2)
    elif look == "detached":
        seen = seen.detach()
    elif look == "graph":
        seen = seen.detach().requires_grad_() * 2
    pool.give(first)
    assert pool.take(64 + 16) is not first
    assert seen.numel() == 4


def test_a_buffer_is_free_once_nobody_looks(pool: Pool) -> None:
    first = pool.take(128)
    seen = first.bytes_[64:].view(torch.float32)
    assert first.holders == 1
    del seen
    assert first.holders == 0


@pytest.mark.parametrize("value", [torch.ones(2, 3), torch.ones(4), (torch.ones(2, 3).T, torch.ones(1, 2), 3)])
def test_a_buffer_whose_tensors_were_read_and_let_go_is_taken_again(pool: Pool, value: object) -> None:
    leaves, structure = flatten(value)
    layout = Layout(describe(leaves, structure))
    first = pool.take(layout.nbytes)
    for _ in range(3):
        layout.write(first.views(layout), leaves)
        read = layout.read(first.views(layout))
        assert first.holders == sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
        del read
        pool.give(first)
        assert pool.take(layout.nbytes) is first


def test_the_flag_is_down_when_a_buffer_comes_back(pool: Pool) -> None:
    first = pool.take(128)
    first.flag = 77
    assert int(first.bytes_[:8].view(torch.int64)) == 77
    pool.give(first)
    assert pool.take(128).flag == 0


def test_buffers_that_nobody_takes_for_a_while_are_let_go(pool: Pool) -> None:
    for size in range(1, 30):
        pool.give(pool.take(size * 5000))
        pool.end_step()
    assert pool.free <= 3


def test_the_peak_counts_what_is_in_use_at_once(pool: Pool) -> None:
    taken = [pool.take(100) for _ in range(5)]
    for buffer in taken:
        pool.give(buffer)
    assert (pool.in_use, pool.peak, pool.free) == (0, 5, 5)
