"""Promise: 50 requests at once, valid and junk, all get an answer; no error 500, and memory stays bounded."""

from __future__ import annotations

import contextlib
import json
import random
import string
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from penstock import build, families
from penstock.web.api import REQUESTS
from penstock.web.lessons import lessons
from tests.support.grids import small
from tests.support.playground import Playground, running

AT_ONCE = 50
ANSWERS = {200, 400, 413, 415, 422, 503}
MOST_BYTES = 1 << 30
"""Resident memory that all processes together may gain; each has loaded numpy and Penstock before."""
NAMES = tuple(name for name in families() if name != "forward-only")


@pytest.fixture(scope="module")
def play() -> Iterator[Playground]:
    with running() as playground:
        playground.ask("compare", {"schedules": [{"family": "zbv", "ranks": 4, "microbatches": 8}]})
        yield playground


# --- random requests --------------------------------------------------------------------------------


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, also numbers and texts that nobody would send."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, 0, -1, 1e308, -1e308, 10**30, 2**63, 0.1, "", "NaN", "\0", "🚰" * 99]),
        lambda: "".join(rng.choices(string.printable, k=rng.randrange(40))),
        lambda: rng.choice(
            ["0F0", "1B", "(0F0;0B1)OVERLAP_F_B", "9F99999999", "-1F0", "<script>alert(1)</script>"]
        ),
    ]
    if depth < 4:
        kinds.append(lambda: [junk(rng, depth + 1) for _ in range(rng.randrange(5))])
        keys = ["schedules", "family", "ranks", "microbatches", "costs", "steps", "lesson", "csv", "x"]
        kinds.append(lambda: {rng.choice(keys): junk(rng, depth + 1) for _ in range(rng.randrange(5))})
    return rng.choice(kinds)()


def good(rng: random.Random) -> dict[str, Any]:
    """A question that a page could ask."""
    ranks, microbatches = rng.randint(1, 8), rng.randint(1, 24)
    costs = {"forward_seconds": rng.choice([0, 1, 1e-9, 1e9]), "latency_seconds": rng.choice([0, 0.5, 100])}
    schedules: list[dict[str, Any]] = [
        {"family": rng.choice(NAMES), "ranks": ranks, "microbatches": microbatches}
        for _ in range(rng.randint(1, 3))
    ]
    rows = [[str(step) for step in row] for row in build("1f1b", ranks=3, microbatches=4).ranks]
    rng.shuffle(rows[rng.randrange(3)])
    schedules.append({"steps": rows, "stage_to_rank": [0, 1, 2], "microbatches": 4})
    schedules.append(
        {"csv": rng.choice(["0F0,0B0\n1F0,1B0\n", "0F0,\x00", ",,,\n" * 50, "\ufeff0F0,0B0", "a;b"])}
    )
    return {"schedules": rng.sample(schedules, rng.randint(1, 3)), "costs": costs}


def request_of(rng: random.Random) -> tuple[str, bytes]:
    name = rng.choice([*REQUESTS, "search"])
    if name == "lesson":
        lesson = rng.choice(list(lessons().values()))
        rows = [row.split() for row in lesson.steps]
        rng.shuffle(rows[0])
        return name, json.dumps({"lesson": lesson.key, "steps": rows}).encode()
    if name == "search":
        return name, json.dumps({"ranks": rng.randint(0, 3), "microbatches": 2, "seconds": 0.2}).encode()
    document: Any = good(rng)
    if rng.random() < 0.5:  # damage it
        key = rng.choice([*document, *document["schedules"][0]])
        (document if key in document else document["schedules"][0])[key] = junk(rng)
    if rng.random() < 0.2:
        document = junk(rng)
    body = json.dumps(document).encode()
    return name, body if rng.random() < 0.9 else body[: rng.randrange(len(body) + 1)] + rng.randbytes(9)


def resident(play: Playground) -> int:
    """Bytes of the server, which is this process, and of its workers."""
    total: int = psutil.Process().memory_info().rss
    for worker in list(play.pool._all):
        with contextlib.suppress(psutil.NoSuchProcess):  # being replaced
            total += psutil.Process(worker.process.pid).memory_info().rss
    return total


# --- promises ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@small(lambda seed: seed == 0)
def test_fifty_requests_at_once_all_get_an_answer_in_bounded_memory(play: Playground, seed: int) -> None:
    rng = random.Random(seed)
    requests = [request_of(rng) for _ in range(AT_ONCE)]
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
        lines = answer.splitlines() if name == "search" and status == 200 else [answer]
        for line in lines:
            record = json.loads(line)
            assert "internal error" not in json.dumps(record), (name, body, record)
            assert status == 200 or record["error"]
    assert most - before < MOST_BYTES
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
