"""What all tests share: pools of processes, the cases that `make test` leaves out, and the order of modules."""

from __future__ import annotations

import gc
import inspect
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # tests without torch do not wait for it
    from tests.support.pool import Pool, Pools


# tiny matrices are not shared by threads, which would wait in a loop on cores that other tests need
os.environ["OMP_NUM_THREADS"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
gc.disable()  # until all modules are loaded: they make no garbage

settings.register_profile("small", deadline=None, max_examples=25)
settings.register_profile("full", deadline=None)  # for tests.support.grids.examples
settings.load_profile("small")  # a busy machine is no failure; `--hypothesis-profile=full` replaces it


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases that only `make test-all` runs, and begin with the modules that start processes."""
    for item in items:
        parameters = (
            item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        )
        for mark in item.iter_markers("small"):
            keep = mark.args[0]
            if not keep(**{name: parameters[name] for name in inspect.signature(keep).parameters}):
                item.add_marker("full")
    items.sort(key=lambda item: "runtime" not in item.path.parts)  # so that no worker is the last by far


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but leave out what the modules hold: that would take most of the time."""
    gc.freeze()
    gc.enable()


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
