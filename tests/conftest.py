"""What all tests share: pools of processes, the cases that `make test` leaves out, and groups for workers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # tests without torch do not wait for it
    from tests.support.pool import Pool, Pools


settings.register_profile("small", deadline=None)
settings.register_profile("full", deadline=None)  # for tests.support.grids.examples
settings.load_profile("small")  # a busy machine is no failure; `--hypothesis-profile=full` replaces it
SHARED_GROUPS = {"failures", "ranks-2", "ranks-4"}
"""Groups with too many tests for one worker: each worker that runs some of them starts its own pool."""


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects, and before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases that only `make test-all` runs, and split large groups by module."""
    for item in items:
        parameters = (
            item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        )
        for mark in item.iter_markers("small"):
            keep = mark.args[0]
            if not keep(**{name: parameters[name] for name in inspect.signature(keep).parameters}):
                item.add_marker("full")
        if any(mark.args[0] in SHARED_GROUPS for mark in item.iter_markers("xdist_group")):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="module")  # threads of gloo wake up a hundred times a second, also in idle ranks
def pools() -> Iterator[Pools]:
    """The pool of so many ranks."""
    from tests.support.pool import Pool  # noqa: PLC0415

    started: dict[int, Pool] = {}

    def of(ranks: int) -> Pool:
        return started.setdefault(ranks, Pool(ranks))

    yield of
    for pool in started.values():
        pool.stop()


@pytest.fixture(scope="module")
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
