"""Promises of the warm-up: a search waits for it and says so, and nothing else does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from penstock.web import workers as warm_up
from penstock.web.workers import Reply, WorkerPool

SEARCH = {"ranks": 2, "microbatches": 2, "seconds": 1}
SCHEDULES = {"schedules": [{"family": "1f1b", "ranks": 2, "microbatches": 2}]}


class _Held:
    """A warm-up that is over when it is released."""

    def __init__(self, _: object = None) -> None:
        self.released = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.released.is_set()

    async def wait(self, stop: asyncio.Event | None, seconds: float | None = None) -> None:
        waited = [asyncio.ensure_future(each.wait()) for each in (self.released, stop) if each is not None]
        await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        pass


def test_a_search_waits_for_the_warm_up_and_other_requests_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(pool: WorkerPool, held: _Held) -> None:
        replies = pool.stream("search", SEARCH)
        first = await anext(replies)
        assert (first.kind, json.loads(first.text)["phase"].split()[0]) == ("progress", "compiling")
        assert (await pool.ask("compare", SCHEDULES)).kind == "result"
        assert not pool.is_warm
        held.released.set()
        assert [reply async for reply in replies][-1].kind == "result"

    _with_held_warm_up(monkeypatch, check)


def test_a_search_that_is_stopped_during_the_warm_up_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(pool: WorkerPool, _: _Held) -> None:
        stop = asyncio.Event()
        replies = pool.stream("search", SEARCH, stop)
        await anext(replies)
        stop.set()
        expected = Reply("error", "stopped before a schedule was found")
        assert [reply async for reply in replies] == [expected]

    _with_held_warm_up(monkeypatch, check)


def test_a_search_that_is_stopped_between_two_reports_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"ranks": 4, "microbatches": 16, "stages_per_rank": 2, "placement": "v", "live_limit": 3}

    async def check(pool: WorkerPool, held: _Held) -> None:
        held.released.set()
        stop = asyncio.Event()
        replies = pool.stream("search", sizes | {"seconds": 100}, stop)
        assert (await anext(replies)).kind == "progress"
        stop.set()
        last = [reply async for reply in replies][-1]
        assert json.loads(last.text)["interrupted"]

    _with_held_warm_up(monkeypatch, check)


def test_the_warm_up_is_a_process_that_ends() -> None:
    async def check() -> None:
        pool = WorkerPool(size=1)
        pool.start()
        try:
            assert (await pool.ask("search", SEARCH)).kind == "result"
            assert pool.is_warm
        finally:
            pool.close()

    asyncio.run(check())


def test_a_server_without_searches_has_no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        pool = WorkerPool(size=1)
        pool.start(searches=False)
        pool.close()
        assert pool.is_warm

    monkeypatch.setattr("penstock.web.workers.WarmUp", None)
    asyncio.run(check())


def test_the_warm_up_process_compiles_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr("penstock.search.driver.compile_kernels", lambda: called.append("compiled"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    warm_up.compile_search()
    assert called == ["compiled"]


def _with_held_warm_up(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[WorkerPool, _Held], Awaitable[None]]
) -> None:
    async def run() -> None:
        held = _Held()
        monkeypatch.setattr("penstock.web.workers.WarmUp", lambda _: held)
        pool = WorkerPool(size=1)
        pool.start()
        try:
            await check(pool, held)
        finally:
            pool.close()

    asyncio.run(run())
