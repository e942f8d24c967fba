"""Promises of the server: clear answers to everything, nothing for other sites, and bounded work."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.web.server import Access
from penstock.web.workers import LIMITS, Limit
from tests.support.playground import Playground, running

BASIC: dict[str, Any] = {"schedules": [{"family": "1f1b", "ranks": 4, "microbatches": 8}]}
LARGE = {"schedules": [{"family": "zbv", "ranks": 32, "microbatches": 500}], "jitter": 0.1}
"""Takes far longer than a test waits."""


@pytest.fixture(scope="module")
def play() -> Iterator[Playground]:
    with running() as playground:
        yield playground


def test_the_page_and_its_files_are_served_with_a_strict_policy(play: Playground) -> None:
    status, page, headers = play.send("/")
    assert status == 200
    assert b"<script type" in page
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers
    for name in ("main.js", "timelines.js", "timelines.css", "play.css", "icon.svg"):
        assert play.send(f"/page/{name}")[0] == 200


@pytest.mark.parametrize(
    "path", ["/page/../app.py", "/page/%2e%2e/app.py", "/etc/passwd", "/page/", "/api/none"]
)
def test_nothing_else_is_served(play: Playground, path: str) -> None:
    assert play.send(path)[0] == 404


def test_a_request_is_answered(play: Playground) -> None:
    status, answer = play.ask("compare", BASIC)
    assert status == 200
    assert answer["schedules"][0]["row"]["makespan"] == 33


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not valid JSON"),
        (b'{"schedules": NaN}', 400, "not valid JSON"),
        (b"\xff\xfe junk", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        ([], 422, "expected an object"),
        ({"schedules": "x"}, 422, "schedules: expected list"),
    ],
)
def test_junk_gets_a_message(play: Playground, body: object, status: int, message: str) -> None:
    found, answer = play.ask("compare", body)
    assert (found, message in answer["error"]) == (status, True)


def test_a_body_that_is_too_large_is_refused(play: Playground) -> None:
    status, answer = play.ask("compare", b" " * (LIMITS["compare"].body + 1))
    assert status == 413
    assert "at most" in answer["error"]


def test_only_json_is_accepted_because_forms_of_other_sites_cannot_send_it(play: Playground) -> None:
    status, _, _ = play.send("/api/compare", b"{}", headers={"Content-Type": "text/plain"})
    assert status == 415


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
    ],
)
def test_other_hosts_and_other_sites_are_refused(play: Playground, headers: dict[str, str]) -> None:
    assert play.ask("compare", BASIC, headers=headers)[0] == 403


def test_behind_a_proxy_its_public_address_is_accepted() -> None:
    origin = "https://schedules.example.com"
    with running(access=Access(origins=frozenset({origin}))) as play:
        assert play.ask("compare", BASIC, headers={"Origin": origin})[0] == 200
        assert play.ask("compare", BASIC, headers={"Origin": "https://other.example"})[0] == 403


def test_read_only_refuses_files_and_searches() -> None:
    with running(read_only=True) as play:
        assert play.ask("compare", BASIC)[0] == 200
        assert play.ask("compare", {"schedules": [{"csv": "0F0,0B0"}]})[0] == 403
        assert play.ask("search", {"ranks": 2, "microbatches": 2})[0] == 403


def test_a_request_that_takes_too_long_is_ended_and_its_worker_replaced(
    play: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "robustness", Limit(seconds=0.5))
    before = set(play.pool.pids)
    status, answer = play.ask("robustness", LARGE)
    assert status == 503
    assert "takes more than" in answer["error"]
    assert set(play.pool.pids) != before
    assert play.ask("compare", BASIC)[0] == 200


def test_a_cancelled_request_stops_computing(play: Playground) -> None:
    before = set(play.pool.pids)
    connection = play.connect()
    body = json.dumps(LARGE)
    connection.request("POST", "/api/robustness", body, {"Content-Type": "application/json"})
    time.sleep(0.3)
    connection.close()
    for _ in range(500):
        if len(before & set(play.pool.pids)) == len(before) - 1:
            break
        time.sleep(0.02)
    assert len(before & set(play.pool.pids)) == len(before) - 1
    assert play.ask("compare", BASIC)[0] == 200


def lines_of(play: Playground, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    connection = play.connect()
    connection.request("POST", "/api/search", json.dumps(request), {"Content-Type": "application/json"})
    response = connection.getresponse()
    while line := response.readline():
        yield json.loads(line)
    connection.close()


def test_a_search_sends_its_progress_and_its_certificate(play: Playground) -> None:
    *progress, last = lines_of(play, {"ranks": 3, "microbatches": 4, "seconds": 20})
    assert all(set(line) == {"progress"} for line in progress)
    assert last["result"]["proved"]
    assert last["result"]["certificate"].startswith("Proved optimal: no schedule")


def test_a_search_that_is_stopped_keeps_the_best(play: Playground) -> None:
    request = {"id": "a", "ranks": 5, "microbatches": 24, "stages_per_rank": 2, "live_limit": 7, "seconds": 100}
    started = time.monotonic()
    last: dict[str, Any] = {}
    for n, line in enumerate(lines_of(play, request)):
        last = line
        if n == 1:
            assert play.ask("search", {"stop": "a"})[0] == 200
    assert last["result"]["interrupted"]
    assert time.monotonic() - started < 90
    assert play.ask("compare", BASIC)[0] == 200


def test_a_search_that_cannot_be_answered_says_why(play: Playground) -> None:
    (line,) = lines_of(play, {"ranks": 3, "microbatches": 4, "seconds": 1e9})
    assert "seconds: from 0 to 120" in line["error"]
