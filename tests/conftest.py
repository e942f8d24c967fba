"""One pool of processes for each number of ranks, kept for the whole test run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # tests without torch do not wait for it
    from tests.support.pool import Pool, Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """The pool of so many ranks."""
    from tests.support.pool import Pool  # noqa: PLC0415

    started: dict[int, Pool] = {}

    def of(ranks: int) -> Pool:
        return started.setdefault(ranks, Pool(ranks))

    yield of
    for pool in started.values():
        pool.stop()


@pytest.fixture(scope="session")
def failing_pool() -> Iterator[Pool]:
    """Four ranks that tests may break."""
    from tests.support.pool import Pool  # noqa: PLC0415

    pool = Pool(4)
    yield pool
    pool.stop()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny matrices are not shared by threads."""
    import torch  # noqa: PLC0415

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
