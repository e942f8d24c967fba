"""What all tests share: pools of processes, a browser, the cases that `make test` runs, the order of files."""

from __future__ import annotations

import gc
import inspect
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # tests without torch or a browser do not wait for them
    from selenium.webdriver import Chrome

    from tests.support.host_ranks import HostRanks
    from tests.support.hosts import Hosts
    from tests.support.pool import Pool, Pools


# tiny matrices are not shared by threads, which would wait in a loop on cores that other tests need
os.environ["OMP_NUM_THREADS"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
gc.disable()  # until all modules are loaded: they make no garbage

settings.register_profile("small", deadline=None, max_examples=25)
settings.register_profile("full", deadline=None)  # for tests.support.grids.examples
settings.load_profile("small")  # a busy machine is no failure; `--hypothesis-profile=full` replaces it


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip modules that need torch or notebooks where these are not installed, as in `make test-core`."""
    report = yield
    call = getattr(report, "call", None)
    cause = None if call is None or call.excinfo is None else call.excinfo.value.__cause__
    if isinstance(cause, ModuleNotFoundError) and cause.name in ("torch", "nbformat", "nbclient"):
        report.outcome, report.longrepr = "skipped", (report.nodeid, 1, f"Skipped: it needs {cause.name}")
    return report


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases that only `make test-all` runs, and put the files in the order in which they run."""
    for item in items:
        parameters = (
            item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        )
        for mark in item.iter_markers("small"):
            keep = mark.args[0]
            if not keep(**{name: parameters[name] for name in inspect.signature(keep).parameters}):
                item.add_marker("full")
    place = _order_of_files(list(dict.fromkeys(item.path for item in items)))
    items.sort(key=lambda item: place[item.path])


_WAITING = {"pipelining", "runtime", "test_troubleshooting.py"}
_LONG = {"failure", "trainers", "test_docs.py", "test_examples.py", "test_troubleshooting.py", "web"}
_COMPUTING = {"cli", "planning", "search", "view"}


def _parts(file: Path) -> set[str]:
    return set(file.relative_to(Path(__file__).parent).parts)


def _order_of_files(files: list[Path]) -> dict[Path, float]:
    """Files whose tests wait for ranks in turn with those that compute; the many short ones are the last.

    So cores have work while ranks wait, and no worker ends long after the others.
    """
    waiting = [file for file in files if _WAITING & _parts(file)]
    computing = [file for file in files if file not in waiting and (_COMPUTING | _LONG) & _parts(file)]
    place = dict.fromkeys(files, 1.0)
    for turns in (waiting, computing):
        turns.sort(key=lambda file: not _LONG & _parts(file))
        place |= {file: number / len(turns) for number, file in enumerate(turns)}
    return place


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage from now on, but leave out what the modules hold: that would take most of the time."""
    gc.freeze()
    gc.enable()
    if any(_WAITING & _parts(item.path) for item in session.items):
        from penstock.runtime.local_ranks import start_fork_server  # noqa: PLC0415
        from tests.support import pool  # noqa: F401, PLC0415 -- says what to load

        start_fork_server()  # before the playground, for which it would load too little


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


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    """Hosts whose links tests may cut."""
    from tests.support.hosts import hosts_on_this_machine, why_no_hosts  # noqa: PLC0415

    if reason := why_no_hosts():
        pytest.skip(reason)
    with hosts_on_this_machine(2) as hosts:
        yield hosts


@pytest.fixture
def host_ranks(two_hosts: Hosts) -> Iterator[HostRanks]:
    """Two new ranks on each of two hosts."""
    from tests.support.host_ranks import HostRanks  # noqa: PLC0415

    with HostRanks(two_hosts, 2) as ranks:
        yield ranks
    for host in two_hosts.all:
        two_hosts.restore(host.number)


@pytest.fixture(scope="session")
def started_chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A browser that takes longer to start than most tests of pages."""
    from tests.support.browser import start_chromium  # noqa: PLC0415

    driver = start_chromium(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def driver(started_chromium: Chrome) -> Chrome:
    """The browser without what tests of other modules have set."""
    started_chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    started_chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    return started_chromium
