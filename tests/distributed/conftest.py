"""One pool of processes for each number of ranks, kept for the whole test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.distributed.pool import Pool

Pools = Callable[[int], Pool]


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """The pool of so many ranks."""
    started: dict[int, Pool] = {}

    def of(ranks: int) -> Pool:
        return started.setdefault(ranks, Pool(ranks))

    yield of
    for pool in started.values():
        pool.stop()


@pytest.fixture(scope="session")
def failing_pool() -> Iterator[Pool]:
    """Four ranks that tests may break."""
    pool = Pool(4)
    yield pool
    pool.stop()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny matrices are not shared by threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
