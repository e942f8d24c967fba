"""Promise: buffers are reused, but never while a tensor still refers to them."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.pytree import flatten
from penstock.runtime.transport.buffer_pool import BufferPool
from penstock.runtime.transport.message_spec import MessageSpec, spec_key


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(torch.device("cpu"))


def test_a_released_buffer_is_reused(pool: BufferPool) -> None:
    first = pool.acquire(1000)
    pool.release(first)
    assert pool.acquire(1000) is first
    assert (pool.in_use, pool.peak) == (1, 1)


def test_messages_of_similar_length_share_buffers(pool: BufferPool) -> None:
    first = pool.acquire(10_000)
    pool.release(first)
    second = pool.acquire(10_100)
    assert second is first
    assert len(second.message) == 10_100


@pytest.mark.parametrize("reference", ["slice", "view", "detached", "graph"])
def test_a_buffer_with_an_external_reference_is_not_reused(pool: BufferPool, reference: str) -> None:
    first = pool.acquire(64 + 16)
    view = first.message[64:].view(torch.float32)
    if reference == "view":
        view = view.view(2, 2)
    elif reference == "detached":
        view = view.detach()
    elif reference == "graph":
        view = view.detach().requires_grad_() * 2
    pool.release(first)
    assert pool.acquire(64 + 16) is not first
    assert view.numel() == 4


def test_external_references_are_counted(pool: BufferPool) -> None:
    first = pool.acquire(128)
    view = first.message[64:].view(torch.float32)
    assert first.external_references == 1
    del view
    assert first.external_references == 0


@pytest.mark.parametrize("value", [torch.ones(2, 3), torch.ones(4), (torch.ones(2, 3).T, torch.ones(1, 2), 3)])
def test_a_buffer_whose_tensors_were_read_and_freed_is_reused(pool: BufferPool, value: object) -> None:
    leaves, structure = flatten(value)
    spec = MessageSpec(spec_key(leaves, structure))
    first = pool.acquire(spec.nbytes)
    for _ in range(3):
        spec.write(first.views(spec), leaves)
        read = spec.read(first.views(spec))
        assert first.external_references == sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
        del read
        pool.release(first)
        assert pool.acquire(spec.nbytes) is first


def test_the_flag_is_0_in_a_reused_buffer(pool: BufferPool) -> None:
    first = pool.acquire(128)
    first.flag = 77
    assert int(first.message[:8].view(torch.int64)) == 77
    pool.release(first)
    assert pool.acquire(128).flag == 0


def test_buffers_that_are_unused_for_some_steps_are_freed(pool: BufferPool) -> None:
    for size in range(1, 30):
        pool.release(pool.acquire(size * 5000))
        pool.end_step()
    assert pool.free <= 3


def test_the_peak_counts_buffers_in_use_at_once(pool: BufferPool) -> None:
    acquired = [pool.acquire(100) for _ in range(5)]
    for buffer in acquired:
        pool.release(buffer)
    assert (pool.in_use, pool.peak, pool.free) == (0, 5, 5)


def test_a_buffer_whose_memory_was_moved_is_not_reused(pool: BufferPool) -> None:
    first = pool.acquire(64 + 16)
    view = first.message[64:].view(torch.float32).detach()
    # as a stage, or a queue between processes, may do with an input
    view.share_memory_()  # type: ignore[no-untyped-call]
    del view
    pool.release(first)
    assert pool.acquire(64 + 16) is not first
