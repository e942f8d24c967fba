"""Promises of `penstock play`: it serves on loopback at a free port, and ends without a trace."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.command_line import Run
from tests.support.grids import small


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-u", "-m", "penstock", "play", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 -- our own
        yield process
        process.kill()


def children_of(pid: int) -> list[int]:
    """The process ids of all descendants."""
    own = [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    return own + [each for child in own for each in children_of(child)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
@small(lambda ending: ending is signal.SIGINT)
def test_it_serves_on_loopback_and_ends_with_all_its_processes(
    server: subprocess.Popen[str], ending: signal.Signals
) -> None:
    assert server.stdout is not None
    line = server.stdout.readline()
    found = re.fullmatch(r"playground: (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends it\)\n", line)
    assert found is not None, line
    with urlopen(found[1], timeout=120) as answer:  # noqa: S310 -- our own address
        assert answer.status == 200
    workers = children_of(server.pid)
    assert workers
    server.send_signal(ending)
    _, err = server.communicate(timeout=120)
    assert "Traceback" not in err
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_port_that_is_used_is_named(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run("play", "--no-open", "--port", taken.getsockname()[1])
    assert result.code == 2
    assert "cannot listen on --host 127.0.0.1 --port" in result.err


def test_a_host_that_does_not_exist_is_named(run: Run) -> None:
    result = run("play", "--no-open", "--host", "no-such-host.invalid")
    assert result.code == 2
    assert "cannot listen on --host no-such-host.invalid" in result.err


def test_without_the_server_the_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "penstock.web.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = run("play", "--no-open")
    assert result.code == 2
    assert "pip install 'penstock[serve]'" in result.err
