"""Promise: 50 requests at once, valid and junk, all get an answer; no error 500, and memory stays bounded."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.support.playground import Playground, running
from tests.support.random_requests import random_body

AT_ONCE = 50
ANSWERS = {200, 400, 413, 415, 422, 503}
MAX_BYTES = 1 << 30
"""Resident memory that all processes together may gain; each has loaded numpy and Penstock before."""


@pytest.fixture(scope="module")
def play() -> Iterator[Playground]:
    with running() as playground:
        playground.ask("compare", {"schedules": [{"family": "zbv", "ranks": 4, "microbatches": 8}]})
        yield playground


def resident(play: Playground) -> int:
    """Bytes of the server, which is this process, and of its workers."""
    total: int = psutil.Process().memory_info().rss
    for worker in list(play.pool._all):
        with contextlib.suppress(psutil.NoSuchProcess):  # being replaced
            total += psutil.Process(worker.process.pid).memory_info().rss
    return total


# --- promises ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.full
def test_fifty_requests_at_once_all_get_an_answer_in_bounded_memory(play: Playground, seed: int) -> None:
    rng = random.Random(seed)
    requests = [random_body(rng) for _ in range(AT_ONCE)]
    before, most, done = resident(play), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.05):
            most = max(most, resident(play))

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(lambda request: play.send(f"/api/{request[0]}", request[1]), requests))
    done.set()
    watching.join()
    for (name, body), (status, answer, _) in zip(requests, answers):
        assert status in ANSWERS, (name, body[:300], status, answer[:300])
        lines = answer.splitlines() if name in ("search", "pareto") and status == 200 else [answer]
        for line in lines:
            record = json.loads(line)
            assert "internal error" not in json.dumps(record), (name, body, record)
            assert status == 200 or record["error"]
    assert most - before < MAX_BYTES
    statuses = [status for status, _, _ in answers]
    assert 10 <= statuses.count(200) <= AT_ONCE - 10  # neither only valid nor only junk


def test_clients_that_leave_free_their_workers(play: Playground) -> None:
    """30 large requests are dropped at once; a small one is then answered, long before those could end."""
    large = {"schedules": [{"family": "zbv", "ranks": 32, "microbatches": 500}], "jitter": 0.1}
    connections = [play.connect() for _ in range(30)]
    for connection in connections:
        connection.request("POST", "/api/robustness", json.dumps(large), {"Content-Type": "application/json"})
    time.sleep(0.2)
    for connection in connections:
        connection.close()
    status, _ = play.ask("compare", {"schedules": [{"family": "1f1b", "ranks": 4, "microbatches": 8}]})
    assert status == 200
    deadline = time.monotonic() + 60
    while any(psutil.Process(pid).cpu_percent(0.1) > 20 for pid in play.pool.pids):
        assert time.monotonic() < deadline, "a worker still computes"
